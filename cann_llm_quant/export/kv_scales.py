"""Stored scales of the KV cache: the names that runtimes look for beside the weights, and a file of their own.

    <layer>.self_attn.k_scale, .v_scale   float32 [1]: one symmetric scale a layer, as vLLM reads it
    kv_cache/scales.safetensors           layers.N.k_scale, .k_zero_point, .v_scale, .v_zero_point, of any other shape

Other tools spell the former in several ways, all of which are read: below `self_attn.attn`, as `output_scale` of the
projections, and one `kv_scale` for both. A scale is one number, of shape [] or [1] (C39).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.quant.kv import KvScales, KvScheme, LayerKv
from cann_llm_quant.shown import shown, shown_name

Side = Literal["k", "v"]
_SIDES: tuple[Side, Side] = ("k", "v")
_SIDES_OF: Mapping[str, tuple[Side, ...]] = {"k": ("k",), "v": ("v",), "kv": _SIDES}
_ATTENTION = r"(?:^|.*\.)(?:layers|h|blocks)\.(?P<layer>\d+)\.(?:self_attn|attention|attn)\."
_SPELLINGS = re.compile(
    _ATTENTION + r"(?:(?:attn\.|qkv_proj\.)?(?P<plain>k|v|kv)_scale|(?P<of>k|v)_proj\.(?:output_scale|(?P=of)_scale))$"
)
_ONES = (
    "all KV scales are 1.0, so nothing was calibrated; quantize the model anew with --kv-cache, or with --kv-scale 1.0 "
    "to accept them"
)
_PARTS = {"k_scale": "k_scale", "k_zero": "k_zero_point", "v_scale": "v_scale", "v_zero": "v_zero_point"}


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of this name is a scale of a layer's keys or values, in any spelling."""
    return _SPELLINGS.fullmatch(name) is not None


def common_scheme(layers: Sequence[LayerKv]) -> KvScheme | None:
    """The one scheme of all K and V if compressed-tensors' `kv_cache_scheme` can say it: 8 bits, one static scale."""
    schemes = {scheme for layer in layers for scheme in (layer.k, layer.v)}
    scheme = schemes.pop() if len(schemes) == 1 else None
    return scheme if scheme in (KvScheme("fp8_e4m3"), KvScheme("int8")) else None


def model_tensors(attention: str, scales: KvScales) -> dict[str, Tensor]:
    """A layer's two scales as they lie beside the weights of the module `attention`."""
    assert scales.k_scale is not None
    assert scales.v_scale is not None
    return {f"{attention}.k_scale": scales.k_scale.view(1), f"{attention}.v_scale": scales.v_scale.view(1)}


def scales_bytes(layers: Sequence[KvScales]) -> bytes:
    """The content of the file of scales."""
    tensors = {
        f"layers.{number}.{_PARTS[part.name]}": tensor.contiguous()
        for number, scales in enumerate(layers)
        for part in fields(scales)
        if (tensor := getattr(scales, part.name)) is not None
    }
    data: bytes = safetensors_bytes(tensors)
    return data


def parse_scales(data: bytes, num_layers: int, where: str, *, allow_ones: bool = False) -> tuple[KvScales, ...]:
    """The scales of each layer from the file's content.

    Raises CheckpointError for a damaged file or a foreign name and, unless `allow_ones`, for scales that are all 1.0.
    """
    try:
        tensors = parse_safetensors(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{where} is not a safetensors file: {shown_name(str(error))}") from error
    scales = [tensor for name, tensor in tensors.items() if name.endswith("_scale")]
    if not allow_ones and scales and all(bool((tensor == 1).all()) for tensor in scales):
        raise CheckpointError(f"{where}: {_ONES}")
    found = []
    for number in range(num_layers):
        parts = {part: tensors.pop(f"layers.{number}.{name}", None) for part, name in _PARTS.items()}
        for part, tensor in parts.items():
            if tensor is not None and part.endswith("scale"):
                _positive(f"{where}: layers.{number}.{_PARTS[part]}", tensor)
            elif tensor is not None and tensor.dtype != torch.int32:
                raise CheckpointError(f"{where}: layers.{number}.{_PARTS[part]} is {tensor.dtype}, expected int32")
        found.append(KvScales(**parts))
    if tensors:
        raise CheckpointError(
            f"{where} holds {shown_name(min(tensors))}, which is no scale of a model of {num_layers} layers"
        )
    return tuple(found)


def check_shapes(
    layers: Sequence[LayerKv], scales: Sequence[KvScales], kv_heads: int, head_dim: int, where: str
) -> None:
    """CheckpointError where the scales of a file do not have the shapes of the layers' schemes.

    Raises UsageError for a scheme that does not fit the heads.
    """
    for number, (layer, stored) in enumerate(zip(layers, scales, strict=True)):
        for side, scheme in (("k", layer.k), ("v", layer.v)):
            static = scheme is not None and not scheme.is_plain and not scheme.dynamic
            for part, used in (("scale", static), ("zero", static and scheme is not None and not scheme.symmetric)):
                tensor: Tensor | None = getattr(stored, f"{side}_{part}")
                name = f"{where}: layers.{number}.{_PARTS[f'{side}_{part}']}"
                if tensor is None:
                    continue  # whoever needs it says so
                if not used or scheme is None:
                    raise CheckpointError(f"{name} belongs to a cache that has none; the file is of another model")
                shape = scheme.scale_shape(kv_heads, 1, head_dim)
                if tensor.shape != shape:
                    raise CheckpointError(
                        f"{name} has shape {list(tensor.shape)}, expected {list(shape)}; the file is of another model"
                    )


def stored_scales(checkpoint: Checkpoint) -> dict[tuple[int, Side], tuple[str, Tensor]]:
    """Name and value, float32 [1], of every scale beside the weights, by layer and side.

    Raises CheckpointError for a scale of more numbers than one, for one that is not positive and finite, and for two
    spellings that disagree.
    """
    found: dict[tuple[int, Side], tuple[str, Tensor]] = {}
    for name in filter(is_kv_scale, checkpoint.tensors):
        match = _SPELLINGS.fullmatch(name)
        assert match is not None
        if checkpoint.tensors[name].shape not in ((), (1,)):
            shape = list(checkpoint.tensors[name].shape)
            raise CheckpointError(
                f"{checkpoint.path}: KV scale {shown_name(name)} has shape {shown(shape)}, expected one number"
            )
        value = checkpoint.load(name).to(torch.float32).view(1)
        _positive(f"{checkpoint.path}: KV scale {shown_name(name)}", value)
        for side in _SIDES_OF[match["plain"] or match["of"]]:
            other, known = found.setdefault((int(match["layer"]), side), (name, value))
            if not torch.equal(known, value):
                raise CheckpointError(
                    f"{checkpoint.path}: {shown_name(other)} is {known.item():g} and {shown_name(name)} is "
                    f"{value.item():g}, for the same cache; remove the one that is stale"
                )
    return found


def applied_scales(checkpoint: Checkpoint, num_layers: int, *, allow_ones: bool = False) -> tuple[KvScales, ...]:
    """The scales beside the weights, two for each layer.

    Raises CheckpointError when a layer lacks one or a scale has no layer, as `stored_scales` does, and, unless
    `allow_ones`, when all are 1.0, which is what tools write that have measured nothing (C63).
    """
    found = stored_scales(checkpoint)
    wanted: list[tuple[int, Side]] = [(layer, side) for layer in range(num_layers) for side in _SIDES]
    applied = sum(key in found for key in wanted)
    if applied != 2 * num_layers or len(found) != applied:
        missing = next(
            (f"layer {layer} has no {side}_scale" for layer, side in wanted if (layer, side) not in found), ""
        )
        foreign = next((found[key][0] for key in found if key not in wanted), "")
        problem = missing or f"{shown_name(foreign)} is of no layer"
        raise CheckpointError(
            f"{checkpoint.path}: {applied} KV scales for {num_layers} layers, which need {2 * num_layers}: {problem}"
        )
    if not allow_ones and all(bool((value == 1).all()) for _, value in found.values()):
        raise CheckpointError(f"{checkpoint.path}: {_ONES}")
    value = {key: tensor.view(1, 1, 1) for key, (_, tensor) in found.items()}
    return tuple(KvScales(k_scale=value[layer, "k"], v_scale=value[layer, "v"]) for layer in range(num_layers))


def _positive(what: str, scale: Tensor) -> None:
    if not scale.is_floating_point() or not bool(((scale > 0) & scale.isfinite()).all()):
        raise CheckpointError(f"{what} is not positive and finite; the file is damaged")
