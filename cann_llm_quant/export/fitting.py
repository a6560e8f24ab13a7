"""Whether a layout can hold a model, before any weight is read: what stays, what is split, what is rounded anew.

A linear that the layout refuses may fit with smaller groups (`regroup`, exact) or after being dequantized and rounded
to the layout's nearest scheme (`requantize`, not exact). Without the user's word neither is done; the refusal says
which of the two would help.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from cann_llm_quant.errors import UnsupportedError, UsageError
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


def fit(
    model: PackedModel,
    holder: Holder,
    *,
    size: int | None = None,
    requantize: bool = False,
    planned: bool = False,
) -> Fit:
    """How each linear goes into the layout; `size` splits groups that are wider. A `planned` model has no codes yet.

    Raises UnsupportedError, naming a linear of each refused kind, when some do not fit, UsageError for a `size` that
    does not divide their groups.
    """
    _check_divides(model, size)
    schemes: dict[str, Scheme] = {}
    rounded: set[str] = set()
    refused: dict[str, list[str]] = {}
    for module in model.schemes:
        scheme, reason = _as_it_is(model, holder, module, size)
        nearest = _anew(model, holder, module, size) if reason and requantize else None
        if nearest is not None:
            rounded.add(module)
        elif reason:
            refused.setdefault(reason, []).append(module)
        schemes[module] = nearest or scheme
    if refused:
        what, advice = "the source", _advice(model, holder, refused, size)
        if planned:
            what, advice = "what is asked for", "choose another scheme, other bits or groups"
        kinds = "; ".join(_kind(model, modules, reason) for reason, modules in refused.items())
        raise UnsupportedError(f"{what} cannot be written as {holder.layout}: {kinds}; {advice}")
    return Fit(schemes, frozenset(rounded))


def fitted(model: PackedModel, fit: Fit) -> PackedModel:
    """The model as it will be written."""
    return replace(model, schemes=fit.schemes, scattered=model.scattered - fit.rounded)


def _check_divides(model: PackedModel, size: int | None) -> None:
    """Raise UsageError for groups that are to be split and cannot be; block formats keep theirs."""
    for module, scheme in model.schemes.items():
        width = scheme.group_size
        if size and width and scheme.scale_type == "float" and width > size and width % size:
            raise UsageError(
                f"--regroup {size} does not divide the groups of {width} that {module} has; give a divisor"
            )


def _as_it_is(model: PackedModel, holder: Holder, module: str, size: int | None) -> tuple[Scheme, str | None]:
    """The scheme of a linear whose weights are kept, its groups split to `size`, and why the layout refuses it.

    A scale a row is split only where the layout would take the groups: beside grouped linears it means something else.
    """
    own = model.schemes[module]
    scheme, reason = _split(own, model.shapes[module][1], size), _scattered(model, holder, module, size)
    reason = reason or _refusal(model, holder, module, scheme)
    if reason and scheme != own and own.group_size is None and _refusal(model, holder, module, own) is None:
        return own, None
    return scheme, reason


def _anew(model: PackedModel, holder: Holder, module: str, size: int | None) -> Scheme | None:
    """What a refused linear would be rounded to, in groups no wider than `size` where the layout has such."""
    nearest = holder.nearest(model.schemes[module], model.shapes[module])
    if nearest is None:
        return None
    fine = _split(nearest, model.shapes[module][1], size)
    return next((scheme for scheme in (fine, nearest) if _refusal(model, holder, module, scheme) is None), None)


def _split(scheme: Scheme, columns: int, size: int | None) -> Scheme:
    if size is None or (scheme.group_size is not None and scheme.group_size <= size):
        return scheme
    return finer(scheme, columns, size) or scheme


def _refusal(model: PackedModel, holder: Holder, module: str, scheme: Scheme) -> str | None:
    return holder.refusal(module, scheme, model.activations.get(module), model.shapes[module])


def _scattered(model: PackedModel, holder: Holder, module: str, size: int | None) -> str | None:
    """Why a linear whose groups are no runs of columns cannot stay so."""
    if module not in model.scattered:
        return None
    if holder.layout not in _KEEP_COLUMN_ORDER:
        return "has groups of scattered columns (act-order), which only GPTQ's g_idx can say"
    own = model.schemes[module]
    if _split(own, model.shapes[module][1], size) != own:
        return "has groups of scattered columns (act-order), which --regroup cannot split"
    return None


def _kind(model: PackedModel, modules: list[str], reason: str) -> str:
    """One kind of refusal, with a module of it."""
    others = f", like {len(modules) - 1} others" if len(modules) > 1 else ""
    return f"{modules[0]} ({_label(model, modules[0])}{others}) {reason}"


def _advice(model: PackedModel, holder: Holder, refused: Mapping[str, list[str]], size: int | None) -> str:
    """What would make it possible."""
    every = [module for modules in refused.values() for module in modules]
    helps = []
    sizes = [n for n in _SIZES if size is None and all(_as_it_is(model, holder, one, n)[1] is None for one in every)]
    if sizes:
        helps.append(f"--regroup {sizes[0]} splits the groups without a loss")
    nearest = [_anew(model, holder, module, size) for module in every]
    labels = dict.fromkeys(scheme.label() for scheme in nearest if scheme is not None)
    if None not in nearest:
        helps.append(f"--requantize rounds them anew, to {' and '.join(labels)}")
    anew = "quantize the float model again, with these left in float (--ignore) or in a scheme that the layout holds"
    return " or ".join(helps) if helps else anew


def _label(model: PackedModel, module: str) -> str:
    activations = model.activations.get(module)
    inputs = "" if activations is None else f" with {activations.dtype} inputs"
    return model.schemes[module].label() + inputs
