"""The AscendV1 layout read: linears of every integer type of ascend_types.py, static input ranges, the int8 KV cache.

What a type's inputs are follows what runs it: a dense W4A8_DYNAMIC linear with groups takes float inputs, since the one
runtime that loads it (vllm-ascend to 0.25) quantizes none there. Two levels of scales are multiplied in float32, and
where `weight_scale` is absent (static W8A8) it is `deq_scale / input_scale`; either may be off by the last bit.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from cann_llm_quant.checkpoint.base import Checkpoint, TensorInfo
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.export.ascend_description import Description, check_names, load_description
from cann_llm_quant.export.ascend_kv import read_kv
from cann_llm_quant.export.ascend_shapes import check_tensors, matrix_shape
from cann_llm_quant.export.ascend_targets import is_expert
from cann_llm_quant.export.ascend_types import SUFFIXES, TYPES, AscendType, decode_linear
from cann_llm_quant.export.kv_section import KvCache
from cann_llm_quant.export.layout import StoredLinear
from cann_llm_quant.models.config_fields import ConfigFields
from cann_llm_quant.quant.activations import InputQuantizer, InputRange
from cann_llm_quant.quant.kv import KvScales
from cann_llm_quant.quant.scheme import ActivationScheme, IntType, QuantizedTensor, Scheme, Strategy
from cann_llm_quant.shown import shown_name

_TOKEN = ActivationScheme("int8")
_FLOAT = "FLOAT"
# Corrections that smoothing leaves beside norms and linears, which our decoder does not compute.
_CORRECTIONS = re.compile(r".*(?:norm\.bias|norm\.module\.(?:weight|bias)|\.div\.mul_scale|_trans|\.clip_ratio)")


class AscendReader:
    """The quantized linears of an opened folder.

    Raises CheckpointError when its files contradict each other, UnsupportedError for types and features that are known
    but not read.
    """

    layout = "ascend"

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.tied: Mapping[str, str] = {}
        self.description: Description = load_description(checkpoint.path)
        config = checkpoint.config
        check_names(self.description, checkpoint.tensors, "lm_head" if config.get("tie_word_embeddings") else None)
        self._refuse_corrections()
        self._dtype = _model_dtype(config)
        self._kinds = self._linear_types()
        self._inputs = {module: self._input(module) for module in self._kinds}
        self.linears: Mapping[str, StoredLinear] = {module: self._linear(module) for module in self._kinds}
        self.kv_cache, self._kv_scales = self._cache()

    def quantized(self, module: str) -> QuantizedTensor:
        """One linear in its stored codes. Raises CheckpointError when its tensors contradict each other."""
        linear = self.linears[module]
        tensors = {name.rpartition(".")[2]: self._checkpoint.load(name) for name in linear.tensors}
        bias = f"{module}.bias"
        if self._kinds[module] == "W8A8" and bias in self._checkpoint.tensors:
            tensors["bias"] = self._checkpoint.load(bias)
        return decode_linear(module, self._kinds[module], tensors, linear.scheme, packed=self.description.packed)

    def inputs(self, module: str) -> InputQuantizer | None:
        """How the input of one linear is quantized; None where it stays in float."""
        return self._inputs[module]

    def kv_scales(self) -> tuple[KvScales, ...]:
        """The cache's scales, `[heads, 1, head_dim]` a side, layer by layer; empty where the cache is float."""
        return self._kv_scales

    def _linear_types(self) -> dict[str, AscendType]:
        found: dict[str, AscendType] = {}
        for name, kind in self.description.types.items():
            if kind == _FLOAT or not name.endswith(".weight"):
                continue
            if kind not in TYPES:
                raise UnsupportedError(
                    f"{self.description.path}: {shown_name(name)} is {shown_name(kind)}, a type that is not read; "
                    f"known are {', '.join(TYPES)}"
                )
            found[name.removesuffix(".weight")] = kind
        return found

    def _refuse_corrections(self) -> None:
        for name in self._checkpoint.tensors:
            if _CORRECTIONS.fullmatch(name):
                raise UnsupportedError(
                    f"{self._checkpoint.path}: {shown_name(name)} corrects activations at run time, which is not "
                    "computed here; use a model quantized without it"
                )

    def _infos(self, module: str) -> dict[str, TensorInfo]:
        names = ((suffix, f"{module}.{suffix}") for suffix in SUFFIXES)
        return {suffix: self._checkpoint.tensors[name] for suffix, name in names if name in self._checkpoint.tensors}

    def _linear(self, module: str) -> StoredLinear:
        kind, infos = self._kinds[module], self._infos(module)
        check_tensors(str(self._checkpoint.path), module, kind, infos, packed=self.description.packed)
        shape, groups = matrix_shape(kind, infos, packed=self.description.packed)
        dtype: IntType = "int4" if kind in ("W4A8_DYNAMIC", "W4A16") else "int8"
        scheme = self._scheme(module, dtype, shape[1] // groups if self._has_groups(kind, infos, groups) else None)
        inputs = self._inputs[module]
        tensors = tuple(info.name for info in infos.values())
        return StoredLinear(scheme, shape, tensors, self._dtype, None if inputs is None else inputs.scheme)

    def _has_groups(self, kind: AscendType, infos: Mapping[str, TensorInfo], groups: int) -> bool:
        return groups > 1 or "weight_scale_second" in infos or (kind == "W4A16" and self.description.group_size > 0)

    def _scheme(self, module: str, dtype: IntType, group_size: int | None) -> Scheme:
        strategy: Strategy = "channel" if group_size is None else "group"
        return Scheme(dtype, self._is_symmetric(module), strategy, group_size)

    def _is_symmetric(self, module: str) -> bool:
        """Whether all offsets are 0. Raises UnsupportedError where they are no zero points that a runtime applies."""
        for suffix in ("weight_offset", "weight_offset_second"):
            name = f"{module}.{suffix}"
            offset = self._checkpoint.load(name) if name in self._checkpoint.tensors else torch.zeros(1)
            if not bool(offset.any()):
                continue
            whole = bool((offset == offset.to(torch.int8)).all())
            if self._kinds[module] not in ("W8A16", "W4A16") or suffix != "weight_offset" or not whole:
                raise UnsupportedError(
                    f"{self._checkpoint.path}: {name} is not 0, but {self._kinds[module]} is read as symmetric"
                )
            return False
        return True

    def _input(self, module: str) -> InputQuantizer | None:
        kind = self._kinds[module]
        if kind in ("W8A16", "W4A16"):
            return None
        grouped = f"{module}.weight_scale_second" in self._checkpoint.tensors
        if kind == "W4A8_DYNAMIC" and grouped and not is_expert(module):
            return None
        return self._static_input(module) if kind == "W8A8" else InputQuantizer(_TOKEN)

    def _static_input(self, module: str) -> InputQuantizer:
        scale, offset = (self._number(f"{module}.{suffix}") for suffix in ("input_scale", "input_offset"))
        if not bool((scale > 0) & scale.isfinite()) or not bool(offset == offset.to(torch.int8)):
            raise CheckpointError(
                f"{self._checkpoint.path}: {module} has input_scale {scale.item():g}, input_offset {offset.item():g}; "
                "they must be positive and a whole number of int8"
            )
        symmetric = not bool(offset.any())
        fixed = InputRange(scale, None if symmetric else offset.to(torch.int8))
        return InputQuantizer(ActivationScheme("int8", symmetric, False, "tensor"), fixed)

    def _number(self, name: str) -> Tensor:
        info = self._checkpoint.tensors.get(name)
        if info is None or info.shape not in ((), (1,)):
            state = "is missing" if info is None else f"is {list(info.shape)}, expected one number"
            raise CheckpointError(f"{self._checkpoint.path}: tensor {name} {state}; the static linear needs it")
        return self._checkpoint.load(name).to(torch.float32).view(1)

    def _cache(self) -> tuple[KvCache, tuple[KvScales, ...]]:
        if not self.description.kv_cache:
            return KvCache(), ()
        fields = ConfigFields(self._checkpoint.config, f"{self._checkpoint.path}/config.json")
        layers, head_dim = fields.integer("num_hidden_layers"), fields.optional_integer("head_dim")
        if layers > len(self._checkpoint.tensors):
            raise CheckpointError(
                f"{fields.where}: {layers} layers cannot lie in {len(self._checkpoint.tensors)} tensors"
            )
        if head_dim is None:
            head_dim = max(1, fields.integer("hidden_size") // fields.integer("num_attention_heads"))
        return read_kv(self._checkpoint, layers, head_dim)


def _model_dtype(config: Mapping[str, object]) -> torch.dtype:
    """What the config says; float32 where it says nothing that is a type of weights."""
    named = getattr(torch, str(config.get("torch_dtype") or config.get("dtype")), None)
    return named if named in (torch.bfloat16, torch.float16) else torch.float32
