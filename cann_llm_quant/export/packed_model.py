"""What exporters know of a source before they read a weight, from the opened source."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.export.kv_cache import kv_plan
from cann_llm_quant.export.layout import PackedModel
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.models.arch import Arch


def packed_model(checkpoint: Checkpoint | PackedCheckpoint[Any]) -> PackedModel:
    """The summary of a source, quantized or float. Raises CheckpointError when its files contradict each other."""
    arch = arch_from_checkpoint(checkpoint)
    common: dict[str, Any] = {"arch": arch, "dtype": _float_dtype(checkpoint, arch), "config": checkpoint.config}
    if not isinstance(checkpoint, PackedCheckpoint):
        return PackedModel(schemes={}, activations={}, shapes={}, kv=kv_plan(checkpoint), **common)
    reader = checkpoint.reader
    activations = {name: linear.activations for name, linear in reader.linears.items() if linear.activations}
    return PackedModel(
        schemes={name: linear.scheme for name, linear in reader.linears.items()},
        activations=activations,
        shapes={name: linear.shape for name, linear in reader.linears.items()},
        kv=kv_plan(checkpoint),
        tied=reader.tied,
        kv_cache=reader.kv_cache,
        scattered=frozenset(name for name, linear in reader.linears.items() if linear.scattered),
        **common,
    )


def storage_dtype(checkpoint: Checkpoint, arch: Arch, dtype: torch.dtype | None = None) -> torch.dtype:
    """The type that most tensors of the decoder have, by bytes, if floating ones are written as `dtype` (None: as is).

    Dequantized weights have the type of their scales.
    """
    return dtype or _commonest(checkpoint, arch.tensor_shapes())


def _float_dtype(checkpoint: Checkpoint, arch: Arch) -> torch.dtype:
    """The type of most matrices that are stored in float, of the whole decoder in float where none is.

    Scales do not tell: GPTQ and AWQ have float16 beside bfloat16 embeddings.
    """
    packed = checkpoint.modules if isinstance(checkpoint, PackedCheckpoint) else frozenset()
    names = [
        name
        for name, shape in arch.tensor_shapes().items()
        if len(shape) > 1 and name.removesuffix(".weight") not in packed
    ]
    return _commonest(checkpoint, names) if names else storage_dtype(checkpoint, arch)


def _commonest(checkpoint: Checkpoint, names: Iterable[str]) -> torch.dtype:
    sizes: Counter[torch.dtype] = Counter()
    for name in names:
        info = checkpoint.tensors[name]
        sizes[info.dtype] += info.nbytes
    return sizes.most_common(1)[0][0]


def units(checkpoint: Checkpoint, arch: Arch) -> dict[str, list[str]]:
    """The tensors' names by what is converted at a time: the outer ones, each layer, and what no decoder reads."""
    found = {"outer": list(arch.outer_shapes())}
    found |= {f"layer.{layer.index}": list(layer.tensor_shapes()) for layer in arch.layers}
    claimed = {name for names in found.values() for name in names}
    found["extra"] = [name for name in checkpoint.tensors if name not in claimed]
    return {unit: names for unit, names in found.items() if names}
