"""Whether a layout can hold a model, before any weight is read: what stays, what is split, what is rounded anew.

A linear that the layout refuses may fit with smaller groups (`regroup`, exact) or after being dequantized and rounded
to the layout's nearest scheme (`requantize`, not exact). Without the user's word neither is done; the refusal says
which of the two would help.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.export.layout import Holder, PackedModel
from cann_llm_quant.quant.regroup import finer, regroup
from cann_llm_quant.quant.rtn import solve
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme

# Layouts that can say which group each column has.
_KEEP_COLUMN_ORDER = ("gptq", "gptq_v2", "onnx")
_SIZES = (1024, 512, 256, 128, 64, 32, 16)


@dataclass(frozen=True)
class Fit:
    """The schemes that will be written, by module, and the modules whose weights are rounded anew."""

    schemes: Mapping[str, Scheme]
    rounded: frozenset[str]

    def weight(self, module: str, weight: QuantizedTensor) -> QuantizedTensor:
        """The weight in the scheme that will be written."""
        scheme = self.schemes[module]
        if module in self.rounded:
            dtype = weight.scale.dtype if weight.scheme.scale_type == "float" else torch.float32
            return solve(weight.dequantize(), scheme, dtype)
        if scheme == weight.scheme:
            return weight
        assert scheme.group_size is not None, "only groups are made smaller"
        return regroup(weight, scheme.group_size)


def fit(model: PackedModel, holder: Holder, *, size: int | None = None, requantize: bool = False) -> Fit:
    """How each linear goes into the layout; `size` splits groups that are wider.

    Raises UnsupportedError, naming a linear of each refused kind, when some do not fit.
    """
    schemes: dict[str, Scheme] = {}
    rounded: set[str] = set()
    refused: dict[str, list[str]] = {}
    for module, own in model.schemes.items():
        scheme = _split(own, model.shapes[module][1], size)
        reason = _refusal(model, holder, module, scheme)
        nearest = holder.nearest(scheme, model.shapes[module]) if reason and requantize else None
        if reason and nearest and _refusal(model, holder, module, nearest) is None:
            scheme, reason = nearest, None
            rounded.add(module)
        schemes[module] = scheme
        if reason:
            refused.setdefault(reason, []).append(module)
    if refused:
        raise UnsupportedError(_message(model, holder, refused, size))
    return Fit(schemes, frozenset(rounded))


def fitted(model: PackedModel, fit: Fit) -> PackedModel:
    """The model as it will be written."""
    return replace(model, schemes=fit.schemes)


def _split(scheme: Scheme, columns: int, size: int | None) -> Scheme:
    if size is None or (scheme.group_size is not None and scheme.group_size <= size):
        return scheme
    return finer(scheme, columns, size) or scheme


def _refusal(model: PackedModel, holder: Holder, module: str, scheme: Scheme) -> str | None:
    scattered = module in model.scattered and scheme == model.schemes[module]
    if scattered and holder.layout not in _KEEP_COLUMN_ORDER:
        return "has groups of scattered columns (act-order), which only GPTQ's g_idx can say"
    return holder.refusal(module, scheme, model.activations.get(module), model.shapes[module])


def _message(model: PackedModel, holder: Holder, refused: Mapping[str, list[str]], size: int | None) -> str:
    """One line: the kinds of refusal, a module of each, and what would make it possible."""
    kinds = [
        f"{modules[0]} ({_label(model, modules[0])}{f', like {len(modules) - 1} others' if len(modules) > 1 else ''}) "
        f"{reason}"
        for reason, modules in refused.items()
    ]
    every = [module for modules in refused.values() for module in modules]
    helps = []
    sizes = [n for n in _SIZES if size is None and all(_fits_split(model, holder, module, n) for module in every)]
    if sizes:
        helps.append(f"--regroup {sizes[0]} splits the groups without a loss")
    if all(_fits_nearest(model, holder, module) for module in every):
        near = holder.nearest(model.schemes[every[0]], model.shapes[every[0]])
        assert near is not None, "it fits"
        helps.append(f"--requantize rounds them anew, to {near.label()}")
    advice = " or ".join(helps) if helps else "quantize the float model for this layout instead"
    return f"the source cannot be written as {holder.layout}: {'; '.join(kinds)}; {advice}"


def _label(model: PackedModel, module: str) -> str:
    activations = model.activations.get(module)
    inputs = "" if activations is None else f" with {activations.dtype} inputs"
    return model.schemes[module].label() + inputs


def _fits_split(model: PackedModel, holder: Holder, module: str, size: int) -> bool:
    scheme = _split(model.schemes[module], model.shapes[module][1], size)
    return _refusal(model, holder, module, scheme) is None


def _fits_nearest(model: PackedModel, holder: Holder, module: str) -> bool:
    nearest = holder.nearest(model.schemes[module], model.shapes[module])
    return nearest is not None and _refusal(model, holder, module, nearest) is None
