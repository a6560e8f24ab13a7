"""Whether a source that is about to be quantized is already quantized, by what it stores and not only by what it says.

Quantizing packed codes as if they were weights would give noise, so such a source is refused until a reader turns it
into plain weights; a `quantization_config` that no stored tensor backs is stale and would mislead whoever loads the
output.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from cann_llm_quant.checkpoint.base import TensorInfo
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.shown import shown, shown_name

CONFIG_KEYS = ("quantization_config", "compression_config")
_PACKED_SUFFIXES = (
    ".qweight",
    ".qzeros",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_zero_point",
    ".weight.absmax",
    ".weight.quant_map",
    ".weight_blocks",
    ".SCB",
)
_CODE_DTYPES = (
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)


def float_source_config(
    path: Path, config: Mapping[str, Any], tensors: Iterable[TensorInfo], *, ignore_stale: bool
) -> dict[str, Any]:
    """The config of a source that really stores float weights, without a stale quantization field.

    Raises UnsupportedError naming the method when the tensors are quantized; CheckpointError when only the config says
    so and `ignore_stale` is not set.
    """
    tensors = list(tensors)
    if any(is_quantized_tensor(info) for info in tensors):
        refuse_quantized(path, config, tensors)
    claimed = _claimed(config)
    if _only_cache(claimed):
        return dict(config)
    if claimed and not ignore_stale:
        raise CheckpointError(
            f"{path / 'config.json'}: {next(iter(claimed))} says {_method(claimed)}, but no tensor is quantized, so "
            "the field is stale; remove it or pass --ignore-source-quant to drop it"
        )
    return {key: value for key, value in config.items() if key not in claimed}


def refuse_quantized(path: Path, config: Mapping[str, Any], tensors: Iterable[TensorInfo]) -> NoReturn:
    """Raise UnsupportedError for a source that stores quantized tensors, naming the method and one of them."""
    evidence = next(info for info in tensors if is_quantized_tensor(info))
    raise UnsupportedError(
        f"{path} is already quantized ({_method(_claimed(config))}: tensor {shown(evidence.name)} is stored as "
        f"{_short(evidence.dtype)}); give the float model it was made from, or add --dequantize to read it in float"
    )


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """The `quant_method` that a config names; None where it names none."""
    methods = [section.get("quant_method") for section in _claimed(config).values() if isinstance(section, dict)]
    return next((method for method in methods if isinstance(method, str)), None)


def _claimed(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in CONFIG_KEYS if config.get(key)}


def _only_cache(claimed: Mapping[str, Any]) -> bool:
    """Whether all that is claimed is a quantized KV cache over float weights, as compressed-tensors writes it."""
    sections = list(claimed.values())
    return bool(sections) and all(
        isinstance(section, dict) and section.get("kv_cache_scheme") and not section.get("config_groups")
        for section in sections
    )


def is_quantized_tensor(info: TensorInfo) -> bool:
    """Whether a stored tensor holds codes or scales of a quantized matrix rather than a plain parameter or buffer."""
    if info.name.endswith(_PACKED_SUFFIXES):
        return True
    return info.name.endswith("weight") and info.dtype in _CODE_DTYPES


def _method(claimed: Mapping[str, Any]) -> str:
    return shown_name(quantization_method(claimed) or "method not named in config.json")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
