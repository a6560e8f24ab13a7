"""Tensors from a checkpoint into decoder layers: one at a time, what surrounds them, or a whole model."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.models.decoder import DecoderLayer, DecoderModel, DenseLinear, LinearOp
from cann_llm_quant.models.quantized_input import QuantizedInputLinear
from cann_llm_quant.quant.activations import InputQuantizer

_FLOAT: Mapping[str, InputQuantizer] = {}


@dataclass(frozen=True)
class OuterWeights:
    """What surrounds the layers. With a tied head, `head` is the very tensor `embedding`."""

    embedding: Float[Tensor, "vocab hidden"]
    norm: Float[Tensor, "hidden"]
    head: Float[Tensor, "vocab hidden"]


def load_layer(
    checkpoint: Checkpoint, arch: Arch, index: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """One layer's tensors by stored name, on `device` in `dtype`.

    Raises CheckpointError when a tensor is not there or no longer has the shape that the map was made from.
    """
    shapes = arch.layers[index].tensor_shapes()
    return {name: _load(checkpoint, name, shape, device, dtype) for name, shape in shapes.items()}


def build_layer(
    arch: Arch, index: int, tensors: Mapping[str, Tensor], inputs: Mapping[str, InputQuantizer] = _FLOAT
) -> DecoderLayer:
    """A decoder layer over float matrices; `tensors` as `load_layer` returns them, nothing is copied.

    Linears whose module is in `inputs` quantize what they are given.
    """
    layer = arch.layers[index]
    linears: dict[str, LinearOp] = {}
    for spec in layer.linears:
        weight, bias = tensors[f"{spec.module}.weight"], tensors[f"{spec.module}.bias"] if spec.bias else None
        if spec.module in inputs:
            linears[spec.role] = QuantizedInputLinear(DenseLinear(weight), inputs[spec.module], bias)
        else:
            linears[spec.role] = DenseLinear(weight, bias)
    return DecoderLayer(arch, layer, linears, {p.role: tensors[p.name] for p in layer.parameters})


def load_outer(checkpoint: Checkpoint, arch: Arch, device: torch.device, dtype: torch.dtype) -> OuterWeights:
    """Embedding, final norm and head, on `device` in `dtype`. Raises CheckpointError as `load_layer` does."""
    shapes = arch.outer_shapes()
    tensors = {name: _load(checkpoint, name, shape, device, dtype) for name, shape in shapes.items()}
    embedding = tensors[arch.embedding_name]
    head = embedding if arch.tied_head else tensors[f"{arch.head_module}.weight"]
    return OuterWeights(embedding, tensors[arch.final_norm_name], head)


def load_model(checkpoint: Checkpoint, arch: Arch, device: torch.device, dtype: torch.dtype) -> DecoderModel:
    """The whole model in memory. Raises CheckpointError as `load_layer` does."""
    outer = load_outer(checkpoint, arch, device, dtype)
    layers = [
        build_layer(arch, index, load_layer(checkpoint, arch, index, device, dtype)) for index in range(arch.num_layers)
    ]
    return DecoderModel(arch, layers, outer.embedding, outer.norm, DenseLinear(outer.head))


def _load(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> Tensor:
    tensor = checkpoint.load(name)
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}"
        )
    return tensor.to(device=device, dtype=dtype)
