"""The AscendV1 layout of msModelSlim, written for the runtimes of Ascend NPUs: vllm-ascend, MindIE, SGLang.

`quant_model_weights*.safetensors` with `quant_model_description.json` (ascend_description.py); the tensors of each
type are in ascend_types.py, those of the KV cache in ascend_kv.py, what each runtime loads in ascend_targets.py.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.export import ascend_kv, ascend_traps
from cann_llm_quant.export.ascend_description import FILE_NAME, KV_TYPE, description_bytes
from cann_llm_quant.export.ascend_targets import DEFAULT_RUNTIME, Target, nearest_scheme, target_named, why_not
from cann_llm_quant.export.ascend_types import ROW_SLICES, SUFFIXES, TYPES, AscendType, encode_linear
from cann_llm_quant.export.kv_scales import is_kv_scale
from cann_llm_quant.export.layout import PackedModel
from cann_llm_quant.export.model_config import json_bytes, output_config
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.scheme import ActivationScheme, QuantizedTensor, Scheme

_FLOAT = "FLOAT"


@dataclass(frozen=True)
class _Plan:
    """What `check` settles for the rest of the work."""

    types: Mapping[str, AscendType]
    row_parallel: frozenset[str]
    kv: Mapping[str, Mapping[str, Tensor]]
    dtype: torch.dtype


class AscendEncoder:
    """Writes for one `runtime`, a key of `ascend_targets.TARGETS`; without `kv_cache` the cache's formats are left out.

    `inputs` gives how a linear's input is quantized, where there are linears already. `check` must have been called
    before anything is encoded: the model decides the form of some tensors.
    """

    layout = "ascend"
    stem = "quant_model_weights"

    def __init__(
        self,
        runtime: str = DEFAULT_RUNTIME,
        *,
        kv_cache: bool = True,
        inputs: Callable[[str], InputQuantizer | None] = lambda module: None,
    ) -> None:
        self.target: Target = target_named(runtime)
        self._keep_cache = kv_cache
        self._plan: _Plan | None = None
        self._inputs = inputs

    def refusal(
        self, module: str, scheme: Scheme, activations: ActivationScheme | None, shape: tuple[int, int]
    ) -> str | None:
        """Why the runtime cannot have this linear, as the end of a sentence about it; None where it can."""
        return why_not(module, scheme, activations, shape, self.target)

    def nearest(self, scheme: Scheme, shape: tuple[int, int]) -> Scheme | None:
        """The scheme that `--requantize` would round a refused linear to."""
        return nearest_scheme(scheme, shape, self.target)

    def check(self, model: PackedModel) -> list[str]:
        """Warnings about the whole model. Raises UnsupportedError for what would not load or be computed wrongly."""
        types = ascend_traps.linear_types(model, self.target)
        warnings = ascend_traps.check_model(model, types, self.target)
        self._check_shared_ranges(model, types)
        kv = ascend_kv.encode_kv(model) if self._keep_cache else {}
        if kv and not self.target.kv_cache:
            raise UnsupportedError(
                f"{self.target.name} has no int8 KV cache; add --no-kv-cache to leave the cache's formats out"
            )
        specs = [spec for layer in model.arch.layers for spec in layer.linears]
        rows = frozenset(spec.module for spec in specs if spec.role.rpartition(".")[2] in ("o", "down"))
        self._plan = _Plan(types, rows, kv, model.dtype)
        return warnings + (ascend_kv.kv_warnings(model) if self._keep_cache else [])

    def encode(
        self, module: str, weight: QuantizedTensor, inputs: InputQuantizer | None, bias: Tensor | None
    ) -> dict[str, Tensor]:
        """All stored tensors of one quantized linear, and the scales of the cache that lie beside it."""
        plan = self._checked()
        slices = ROW_SLICES if module in plan.row_parallel else 1
        stored = encode_linear(module, plan.types[module], weight, inputs, bias, dtype=plan.dtype, slices=slices)
        return stored | dict(plan.kv.get(module, {}))

    def plain(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The tensor itself, and the scales of the cache that lie beside it; scales in other spellings are dropped."""
        beside = self._checked().kv.get(name.removesuffix(".weight"), {}) if name.endswith(".weight") else {}
        return {} if is_kv_scale(name) else {name: tensor, **beside}

    def files(self, model: PackedModel, tensors: Mapping[str, torch.dtype]) -> dict[str, bytes]:
        """`config.json` without a quantization section, and the description of `tensors`."""
        types = self._checked().types
        described = {name: _type_of_tensor(name, types) for name in tensors}
        if model.arch.tied_head:
            # older releases of vllm-ascend look the head up although no file holds it
            described.setdefault(f"{model.arch.head_module}.weight", _FLOAT)
        counts = Counter(types.values())
        main = max(TYPES, key=lambda kind: counts[kind]) if counts else _FLOAT
        config = output_config(model.config, model.arch, str(model.dtype).removeprefix("torch."), None)
        if self.target.name == "mindie" and counts:
            config["quantize"] = main.lower()
        description = description_bytes(
            described, main, ascend_traps.group_size(model, types), kv_cache=bool(self._checked().kv)
        )
        return {"config.json": json_bytes(config), FILE_NAME: description}

    def _checked(self) -> _Plan:
        assert self._plan is not None, "check comes first"
        return self._plan

    def _check_shared_ranges(self, model: PackedModel, types: Mapping[str, AscendType]) -> None:
        """C24: a fused matrix has one input range at run time, that of its last member."""
        for members in model.fused():
            ranges = {module: self._range(module) for module in members if types.get(module) == "W8A8"}
            first, shared = next(iter(ranges.items()), ("", None))
            for module, own in ranges.items():
                if own != shared and own is not None and shared is not None:
                    raise UnsupportedError(
                        f"{module} has input scale {own[0]:g} and zero point {own[1]:g}, {first} has {shared[0]:g} and "
                        f"{shared[1]:g}; Ascend runtimes fuse them and keep one, so calibrate them as one or make them "
                        "dynamic"
                    )

    def _range(self, module: str) -> tuple[float, float] | None:
        """The stored scale and zero point of a linear's input."""
        inputs = self._inputs(module)
        if inputs is None or inputs.fixed is None:
            return None
        zero_point = inputs.fixed.zero_point
        return float(inputs.fixed.scale), 0.0 if zero_point is None else float(zero_point)


def _type_of_tensor(name: str, types: Mapping[str, AscendType]) -> str:
    module, _, suffix = name.rpartition(".")
    if suffix in ascend_kv.SUFFIXES:
        return KV_TYPE
    return types[module] if module in types and suffix in SUFFIXES else _FLOAT
