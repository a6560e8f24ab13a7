"""`C8`, the int8 KV cache of the AscendV1 layout: static scales of every channel of K (after RoPE) and V.

    <attention>.{k,v}_proj.kv_cache_scale, kv_cache_offset    float32 [kv_heads * head_dim], head after head

`q = round(x / scale + offset)`. vllm-ascend adds the offset when it stores and forgets it when it reads, so only
offsets of 0 are written; scales of a head or of a whole layer are repeated for its channels.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.export.kv_section import KvCache, KvFormat, KvLayer
from cann_llm_quant.export.layout import PackedModel
from cann_llm_quant.quant.kv import KvScales, KvScheme
from cann_llm_quant.shown import shown_name

SUFFIXES = ("kv_cache_scale", "kv_cache_offset")
_NAME = re.compile(r"(?:^|.*\.)layers\.(?P<layer>\d+)\..*(?P<side>[kv])_proj\.kv_cache_(?P<part>scale|offset)")
_STATIC = ("tensor", "head", "channel")
# What the NPU's attention over int8 pages is documented for.
_HEAD_DIM = 128


def is_c8_tensor(name: str) -> bool:
    """Whether a tensor of this name is a scale or an offset of the cache."""
    return _NAME.fullmatch(name) is not None


def encode_kv(model: PackedModel) -> dict[str, dict[str, Tensor]]:
    """The cache's tensors by full name, for each module of K or V whose weights they lie beside.

    Empty where no format has stored scales: then nothing is lost, and `kv_warnings` says that the runtime's cache is
    float. Raises UnsupportedError for formats that C8 is not.
    """
    arch, found = model.arch, {}
    if not _has_scales(model):
        return {}
    for layer, kv, scales in zip(arch.layers, model.kv.layers, model.kv.scales, strict=False):
        if kv.k is None and kv.v is None:
            continue
        for role, scheme, scale in (("k", kv.k, scales.k_scale), ("v", kv.v, scales.v_scale)):
            if not _is_c8(scheme) or scale is None:
                label = "the compute type" if scheme is None else scheme.label()
                raise UnsupportedError(
                    f"layer {layer.index} keeps {role.upper()} of the KV cache in {label}; ascend holds int8 with "
                    "static symmetric scales of K and V alike (--kv-cache int8-channel-static), or a float cache"
                )
            # scales are in the order in which our decoder turns channels, which is not the one that is stored
            if role == "k" and scheme is not None and scheme.strategy == "channel" and arch.rope.interleaved:
                raise UnsupportedError(
                    f"layer {layer.index}: scales of K's channels cannot be written for {arch.model_type}, whose RoPE "
                    "turns neighbours; use --kv-cache int8-head-static, or a float cache"
                )
            module = layer.linear(role).module
            full = scale.to(torch.float32).expand(arch.num_kv_heads, 1, arch.head_dim).flatten().contiguous()
            found[module] = {f"{module}.kv_cache_scale": full, f"{module}.kv_cache_offset": torch.zeros_like(full)}
    return found


def kv_warnings(model: PackedModel) -> list[str]:
    """What a cache loses in C8 or without it, or may not run with, a sentence each."""
    if not _has_scales(model):
        return ["The KV cache's formats are left out; Ascend runtimes keep it in float."] if model.kv.quantizes else []
    warnings = []
    if model.kv.sink_tokens or model.kv.recent_tokens or model.kv.sensitive:
        warnings.append(
            "The pages that the KV cache keeps in float are left out; Ascend runtimes quantize all of them."
        )
    if model.arch.head_dim != _HEAD_DIM:
        warnings.append(
            f"The NPU's attention over an int8 KV cache is documented for heads of {_HEAD_DIM} channels, this model's "
            f"have {model.arch.head_dim}."
        )
    return warnings


def read_kv(checkpoint: Checkpoint, num_layers: int, head_dim: int) -> tuple[KvCache, tuple[KvScales, ...]]:
    """How the cache is stored and its scales, layer by layer; float and empty for layers without any.

    Raises CheckpointError for tensors that are missing, of another shape, or no scales.
    """
    layers, found = [], []
    schemes: dict[str, KvFormat] = {}
    stored = _by_layer(checkpoint, num_layers)
    if not stored:
        raise CheckpointError(
            f"{checkpoint.path}: the description announces an int8 KV cache, but no kv_cache_scale is in any file"
        )
    for number in range(num_layers):
        parts = stored.get(number)
        keys: dict[str, str] = {}
        scales: dict[str, Tensor] = {}
        for side in "kv" if parts else "":
            scale, zero_point = _loaded(checkpoint, parts or {}, number, side, head_dim)
            scheme = KvScheme("int8", symmetric=zero_point is None, strategy="channel")
            schemes[scheme.label()] = KvFormat.of(scheme)
            keys[side] = scheme.label()
            scales |= {f"{side}_scale": scale} | ({} if zero_point is None else {f"{side}_zero": zero_point})
        layers.append(KvLayer(**keys))
        found.append(KvScales(**scales))
    return KvCache(schemes=schemes, layers=layers, scales="model"), tuple(found)


def _has_scales(model: PackedModel) -> bool:
    schemes = (scheme for layer in model.kv.layers for scheme in (layer.k, layer.v))
    return any(scheme is not None and not scheme.is_plain and not scheme.dynamic for scheme in schemes)


def _is_c8(scheme: KvScheme | None) -> bool:
    return (
        scheme is not None
        and scheme.dtype == "int8"
        and scheme.symmetric
        and not scheme.dynamic
        and scheme.strategy in _STATIC
    )


def _by_layer(checkpoint: Checkpoint, num_layers: int) -> dict[int, dict[tuple[str, str], str]]:
    """Names of the cache's tensors by layer, then by side and part."""
    found: dict[int, dict[tuple[str, str], str]] = {}
    for name in checkpoint.tensors:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        if int(match["layer"]) >= num_layers:
            raise CheckpointError(f"{checkpoint.path}: {shown_name(name)} is of no layer, the model has {num_layers}")
        found.setdefault(int(match["layer"]), {})[match["side"], match["part"]] = name
    return found


def _loaded(
    checkpoint: Checkpoint, parts: Mapping[tuple[str, str], str], layer: int, side: str, head_dim: int
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of one side, `[heads, 1, head_dim]`; no zero point where all offsets are 0."""
    name = parts.get((side, "scale"))
    if name is None:
        raise CheckpointError(f"{checkpoint.path}: layer {layer} has no {side}_proj.kv_cache_scale beside its other")
    shape = checkpoint.tensors[name].shape
    if len(shape) != 1 or shape[0] % head_dim or not shape[0]:
        raise CheckpointError(f"{checkpoint.path}: {name} is {list(shape)}, no whole number of heads of {head_dim}")
    scale = checkpoint.load(name).to(torch.float32)
    if not bool(((scale > 0) & scale.isfinite()).all()):
        raise CheckpointError(f"{checkpoint.path}: {name} is not positive and finite; the file is damaged")
    offset_name = parts.get((side, "offset"))
    offset = torch.zeros_like(scale) if offset_name is None else checkpoint.load(offset_name).to(torch.float32)
    if offset.shape != scale.shape or not bool((offset == offset.round()).all()):
        raise CheckpointError(f"{checkpoint.path}: {offset_name} is not one whole number for each scale")
    heads = scale.view(-1, 1, head_dim)
    return heads, offset.to(torch.int32).view_as(heads) if bool(offset.any()) else None
