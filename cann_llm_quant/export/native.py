"""The native layout: compressed-tensors `pack-quantized`, which transformers, vLLM and SGLang read as well.

For a linear W [out, in] with b bits and G groups a row (source: the compressed-tensors format, checked against its
own reader):

    <module>.weight_packed      int32 [out, ceil(in*b/32)]   little-endian stream of codes + 2^(b-1) along the row
    <module>.weight_scale       source dtype [out, G]        [out, 1] per channel
    <module>.weight_zero_point  int32 [ceil(out*b/32), G]    asymmetric only; packed the same way, along the rows
    <module>.weight_shape       int64 [2]                    (out, in)

    W ~ (codes - zero_point) * scale
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.quant.number_formats import INT_BITS
from cann_llm_quant.quant.pack import pack_int32, unpack_int32
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme

FORMAT_VERSION = "0.20.1"
_EXPERT = ".experts."
SUFFIXES = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")


def encode(module: str, weight: QuantizedTensor) -> dict[str, Tensor]:
    """The stored tensors of one quantized linear, by full name."""
    bits = weight.scheme.bits
    out, columns = weight.shape
    scale = weight.scale.expand(out, -1) if weight.scale.shape[0] != out else weight.scale
    tensors = {
        f"{module}.weight_packed": pack_int32(weight.codes, bits, dim=1),
        f"{module}.weight_scale": scale.contiguous(),
        f"{module}.weight_shape": torch.tensor([out, columns], dtype=torch.int64),
    }
    if weight.zero_point is not None:
        tensors[f"{module}.weight_zero_point"] = pack_int32(weight.zero_point, bits, dim=0)
    return tensors


def decode(module: str, tensors: Mapping[str, Tensor], bits: Iterable[int] = (4, 8)) -> QuantizedTensor:
    """The quantized linear that these tensors store; `bits` are the widths that the config allows.

    Raises CheckpointError when a tensor is absent or the shapes contradict each other.
    """
    try:
        packed, scale, shape = (tensors[f"{module}.{s}"] for s in ("weight_packed", "weight_scale", "weight_shape"))
    except KeyError as error:
        raise CheckpointError(f"{module}: tensor {error.args[0]} is missing; the linear cannot be read") from None
    out, columns = (int(n) for n in shape.tolist())
    width = next((b for b in bits if packed.shape == (out, -(-columns * b // 32))), None)
    groups = scale.shape[1] if scale.dim() == 2 else 0
    if width is None or scale.shape[0] != out or groups == 0 or columns % groups:
        raise CheckpointError(
            f"{module}: weight_packed {list(packed.shape)} and weight_scale {list(scale.shape)} do not store a "
            f"[{out}, {columns}] matrix at {'/'.join(str(b) for b in bits)} bits"
        )
    zeros = tensors.get(f"{module}.weight_zero_point")
    if zeros is not None and zeros.shape != (-(-out * width // 32), groups):
        raise CheckpointError(
            f"{module}: weight_zero_point is {list(zeros.shape)}, expected [{-(-out * width // 32)}, {groups}] "
            f"(packed along the {out} rows)"
        )
    dtype = next(name for name, value in INT_BITS.items() if value == width)
    strategy = ("channel", None) if groups == 1 else ("group", columns // groups)
    return QuantizedTensor(
        codes=unpack_int32(packed, width, columns, dim=1),
        scale=scale,
        zero_point=None if zeros is None else unpack_int32(zeros, width, out, dim=0),
        scheme=Scheme(dtype, zeros is None, *strategy),  # type: ignore[arg-type]
    )


def quantized_modules(checkpoint: Checkpoint) -> list[str]:
    """Names of the linears that are stored packed, in file order."""
    suffix = ".weight_packed"
    return [name.removesuffix(suffix) for name in checkpoint.tensors if name.endswith(suffix)]


def read_linear(checkpoint: Checkpoint, module: str) -> QuantizedTensor | None:
    """One linear of a native checkpoint, None when it is not stored packed. Raises CheckpointError as `decode` does."""
    names = [f"{module}.{suffix}" for suffix in SUFFIXES if f"{module}.{suffix}" in checkpoint.tensors]
    if f"{module}.weight_packed" not in names:
        return None
    return decode(module, {name: checkpoint.load(name) for name in names}, _config_bits(checkpoint.config))


def _config_bits(config: Mapping[str, Any]) -> tuple[int, ...]:
    groups = (config.get("quantization_config") or {}).get("config_groups") or {}
    found = {(group.get("weights") or {}).get("num_bits") for group in groups.values()}
    known = [bits for bits in sorted(INT_BITS.values()) if bits in found]
    return tuple(known) or (4, 8)


def quantization_config(schemes: Mapping[str, Scheme], float_modules: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` section of `config.json`.

    `ignore` lists the full name of every linear left in float, as it really is in the files (never a pattern): runtimes
    map names one by one. One scheme targets the class `Linear`. Several schemes target patterns; experts then get a
    group of their own, because transformers takes the experts' scheme from the first group whose pattern names them.
    """
    by_scheme: dict[tuple[Scheme, bool], list[str]] = {}
    several = len(set(schemes.values())) > 1
    for module, scheme in schemes.items():
        by_scheme.setdefault((scheme, several and _EXPERT in module), []).append(module)
    groups = {}
    for number, ((scheme, _), modules) in enumerate(by_scheme.items()):
        groups[f"group_{number}"] = {
            "targets": _targets(modules, schemes) if several else ["Linear"],
            "format": "pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": scheme.bits,
                "type": "int",
                "symmetric": scheme.symmetric,
                "strategy": scheme.strategy,
                "group_size": scheme.group_size,
                "dynamic": False,
            },
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "version": FORMAT_VERSION,
        "config_groups": groups,
        "ignore": list(float_modules),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _targets(modules: list[str], schemes: Mapping[str, Scheme]) -> list[str]:
    """A pattern for each kind of linear all of which are in `modules`, full names for the others."""
    chosen = set(modules)
    kinds: dict[str, list[str]] = {}
    for module in schemes:
        kinds.setdefault(_kind(module), []).append(module)
    targets: list[str] = []
    for kind in dict.fromkeys(_kind(module) for module in modules):
        whole = all(module in chosen for module in kinds[kind])
        targets += [kind] if whole else [module for module in kinds[kind] if module in chosen]
    return targets


def _kind(module: str) -> str:
    """The pattern of a linear's kind: its last two names, or its last name below `experts.N`."""
    *_, parent, name = module.split(".")
    if _EXPERT in module:
        return rf"re:.*\.experts\.\d+\.{re.escape(name)}$"
    return rf"re:.*\.{re.escape(parent)}\.{re.escape(name)}$"
