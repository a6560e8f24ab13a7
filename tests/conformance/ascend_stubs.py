"""Stand-ins for what vllm-ascend's quantization package imports, so that it runs without an NPU, CANN or vLLM.

`install(folder)` makes `vllm_ascend.quantization` importable from an unpacked wheel. Everything else of vllm_ascend,
and the whole of vllm, torch_npu, acl and triton, are modules made on demand: what the package computes with is defined
here (the NPU's operators by their documented formulas), other names are empty classes and mocks. Meant for a process
of its own: the modules stay.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn

_FAKED = ("vllm", "torch_npu", "acl", "triton", "vllm_ascend")
_REAL = "vllm_ascend.quantization"
CURRENT = SimpleNamespace(
    quant_config=None,
    model_config=SimpleNamespace(
        hf_config=SimpleNamespace(model_type="llama"), enforce_eager=True, dtype=torch.bfloat16
    ),
    parallel_config=SimpleNamespace(enable_expert_parallel=False),
    kv_transfer_config=None,
    compilation_config=SimpleNamespace(mode=None),
)


class LinearBase(nn.Module):
    """A layer that the package attaches parameters to; `prefix` is its name in the model."""

    def __init__(self, prefix: str, params_dtype: torch.dtype) -> None:
        super().__init__()
        self.prefix, self.params_dtype = prefix, params_dtype


class RowParallelLinear(LinearBase):
    pass


class FusedMoE(nn.Module):
    moe_config = None


class Attention(nn.Module):
    pass


class VocabParallelEmbedding(LinearBase):
    pass


class QuantizationConfig:
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}


class Method:
    """Base of every method class; whatever it is told is not needed here."""

    def __init__(self, *_: Any) -> None:
        pass


class PerTensorScaleParameter(nn.Parameter):
    def __new__(cls, data: Tensor, **_: Any) -> "PerTensorScaleParameter":
        return super().__new__(cls, data, requires_grad=False)


def set_weight_attrs(weight: Tensor, attrs: dict[str, Any] | None) -> None:
    for key, value in (attrs or {}).items():
        setattr(weight, key, value)


def npu_dynamic_quant(x: Tensor, dst_type: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales `[rows]`: symmetric, the largest magnitude of a row on 127."""
    assert dst_type == torch.int8
    scale = x.float().abs().amax(-1) / 127
    return (x.float() / scale.unsqueeze(-1)).round().clamp(-128, 127).to(torch.int8), scale


def npu_quant_matmul(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    bias: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    output_dtype: torch.dtype,
) -> Tensor:
    """`(x @ weight + integer bias) * scale`; with a scale for each row of x the bias is a float one, added last."""
    scale = scale.to(torch.int32).view(torch.float32) if scale.dtype == torch.int64 else scale
    y = x.double() @ weight.double()
    if pertoken_scale is None:
        assert bias is None or bias.dtype == torch.int32
        return ((y if bias is None else y + bias) * scale.double()).to(output_dtype)
    y = y * scale.double() * pertoken_scale.double().unsqueeze(-1)
    return (y if bias is None else y + bias.double()).to(output_dtype)


def npu_weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
) -> Tensor:
    """`x @ ((weight + offset) * scale)`, weight int8 `[k, n]` or int4 in int32 `[k, n / 8]`."""
    codes = unpack_int32(weight) if weight.dtype == torch.int32 else weight
    w = codes.double() if antiquant_offset is None else codes.double() + antiquant_offset.double()
    rows = antiquant_group_size or len(w)
    w = w * antiquant_scale.double().view(-1, w.shape[1]).repeat_interleave(rows, dim=0)
    y = x.double() @ w
    return (y if bias is None else y + bias.double()).to(x.dtype)


def unpack_int32(words: Tensor) -> Tensor:
    """Eight int4 codes a word along the last dimension, the first in the lowest bits."""
    fields = [(words >> (4 * place)) & 15 for place in range(8)]
    codes = torch.stack(fields, dim=-1).flatten(-2)
    return torch.where(codes > 7, codes - 16, codes)


def npu_convert_weight_to_int4pack(codes: Tensor) -> Tensor:
    fields = (codes & 15).long().unflatten(-1, (-1, 8))
    words = sum(fields[..., place] << (4 * place) for place in range(8))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _quantize(x: Tensor, scale: Tensor, reciprocal: Tensor, offset: Tensor) -> Tensor:
    return (x.float() * reciprocal.float() + offset.float()).round().clamp(-128, 127).to(torch.int8)


def _always(value: Any) -> Any:
    return lambda *_, **__: value


def _group_without_device() -> Any:
    return SimpleNamespace()


_ASCEND = SimpleNamespace(
    eplb_config=SimpleNamespace(dynamic_eplb=False), multistream_overlap_gate=False, enable_fused_mc2=0
)
_KNOWN: dict[str, dict[str, Any]] = {
    "vllm.config": {
        "CompilationMode": MagicMock(),
        "get_current_vllm_config": lambda: CURRENT,
        "get_current_vllm_config_or_none": lambda: CURRENT,
    },
    "vllm.distributed": {
        "get_tensor_model_parallel_world_size": _always(1),
        "get_tensor_model_parallel_rank": _always(0),
    },
    "vllm.model_executor.layers.linear": {
        "LinearBase": LinearBase,
        "RowParallelLinear": RowParallelLinear,
        "LinearMethodBase": Method,
    },
    "vllm.model_executor.layers.fused_moe": {
        "FusedMoE": FusedMoE,
        "FusedMoEMethodBase": Method,
        "FusedMoeWeightScaleSupported": MagicMock(),
    },
    "vllm.model_executor.layers.attention_layer_base": {"AttentionLayerBase": Attention},
    "vllm.model_executor.layers.vocab_parallel_embedding": {"VocabParallelEmbedding": VocabParallelEmbedding},
    "vllm.model_executor.layers.quantization": {
        "register_quantization_config": lambda name: lambda cls: cls,
        "QUANTIZATION_METHODS": [],
    },
    "vllm.model_executor.layers.quantization.base_config": {"QuantizationConfig": QuantizationConfig},
    "vllm.model_executor.layers.quantization.kv_cache": {"BaseKVCacheMethod": Method},
    "vllm.model_executor.parameter": {"PerTensorScaleParameter": PerTensorScaleParameter},
    "vllm.model_executor.utils": {"set_weight_attrs": set_weight_attrs},
    "vllm.utils.math_utils": {"cdiv": lambda a, b: -(-a // b)},
    "vllm_ascend.distributed.parallel_state": {"get_mc2_group": _group_without_device},
    "vllm_ascend.ascend_config": {"get_ascend_config": _always(_ASCEND)},
    "vllm_ascend.utils": {
        "ASCEND_QUANTIZATION_METHOD": "ascend",
        "COMPRESSED_TENSORS_METHOD": "compressed-tensors",
        "vllm_version_is": _always(True),
        "maybe_trans_nz": lambda weight: weight,
        "enable_dsa_cp": _always(False),
        "enable_dsa_cp_with_layer_shard": _always(False),
        "flashcomm2_enable": _always(False),
        "mlp_tp_enable": _always(False),
        "oproj_tp_enable": _always(False),
    },
    "torch_npu": {
        "npu_dynamic_quant": npu_dynamic_quant,
        "npu_quant_matmul": npu_quant_matmul,
        "npu_weight_quant_batchmatmul": npu_weight_quant_batchmatmul,
        "npu_convert_weight_to_int4pack": npu_convert_weight_to_int4pack,
        "npu_format_cast": lambda weight, form: weight,
    },
}


class _Module(types.ModuleType):
    """A module whose names appear when they are asked for."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = _KNOWN.get(self.__name__, {})
        made = type(name, (), {}) if name[:1].isupper() and not name.isupper() else MagicMock(name=name)
        value = known.get(name, made)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in _FAKED:
            return None
        if name == _REAL or name.startswith(f"{_REAL}."):
            parts = name.split(".")
            return importlib.machinery.PathFinder.find_spec(name, [str(self.folder.joinpath(*parts[:-1]))])
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(folder: Path) -> None:
    """Make the package of this unpacked wheel importable."""
    sys.meta_path.insert(0, _Finder(folder))
    library = torch.library.Library("vllm", "DEF")
    library.define("quantize(Tensor x, Tensor scale, Tensor reciprocal, Tensor offset) -> Tensor")
    library.impl("quantize", _quantize, "CPU")
    _KNOWN["torch_npu"]["library"] = library
    Tensor.npu = lambda self: self
