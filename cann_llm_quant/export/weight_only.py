"""What the layouts of weight-only integer linears (GPTQ, AWQ, MLX) share: zero points without sign, half-precision
scales, and what none of them can hold.
"""

from collections import Counter
from dataclasses import replace

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.export.layout import PackedModel
from cann_llm_quant.quant.number_formats import all_finite
from cann_llm_quant.quant.ranges import SCALE_DTYPES
from cann_llm_quant.quant.scheme import ActivationScheme, QuantizedTensor, Scheme


def refusal(
    layout: str, scheme: Scheme, activations: ActivationScheme | None, bits: tuple[int, ...], columns: int
) -> str | None:
    """Why a layout of weight-only integers in `bits` cannot hold a linear; None where it can."""
    if activations is not None:
        return f"has inputs in {activations.dtype}, and {layout} stores weights only"
    if not scheme.is_integer:
        return f"is stored as {scheme.label()}, and {layout} holds integers only"
    if scheme.bits not in bits:
        return f"has {scheme.bits}-bit codes, and {layout} holds {_listed(bits)} bits"
    if scheme.strategy == "tile":
        return f"has a scale for each tile, and {layout} has them for groups of a row's columns"
    if scheme.group_size is not None and columns % scheme.group_size:
        return f"has {columns} columns, which groups of {scheme.group_size} do not divide"
    return None


def nearest_bits(scheme: Scheme, bits: tuple[int, ...]) -> int:
    """The smallest width of `bits` that is not below the scheme's, else the largest."""
    return min((width for width in bits if width >= scheme.bits), default=max(bits))


def linears_only(layout: str, model: PackedModel, floats: frozenset[str]) -> PackedModel:
    """The model as it is written when `floats` are dequantized.

    Raises UnsupportedError for a quantized embedding that is not among them, and where nothing else is quantized.
    """
    kept = replace(model, schemes={module: own for module, own in model.schemes.items() if module not in floats})
    if not kept.schemes:
        way = "export to float" if model.schemes else "quantize the model first"  # of floats nothing is made float
        raise UnsupportedError(f"no linear is in codes, so there is nothing to write in {layout}; {way}")
    linears = {spec.module for layer in model.arch.layers for spec in layer.linears} | {model.arch.head_module}
    others = [module for module in kept.schemes if module not in linears]
    if others:
        raise UnsupportedError(
            f"{others[0]} is quantized, and {layout} stores only linears in codes; leave the embedding in float"
        )
    return kept


def left_out(layout: str, model: PackedModel, floats: frozenset[str]) -> list[str]:
    """A sentence each on what a weight-only layout does not keep of this model."""
    lost = []
    opened = [module for module in model.schemes if module in floats]
    if opened:
        lost.append(f"written in float, where {layout}'s readers take no codes: {', '.join(opened)}")
    if model.kv.quantizes:
        lost.append(f"{layout} cannot say how keys and values are cached; the KV cache's format is left out")
    return lost


def unread_experts(layout: str, model: PackedModel) -> list[str]:
    """A warning where experts in codes have Mixtral's names, by which GPTQModel 7.6 does not find them."""
    first = next((module for module in model.schemes if ".block_sparse_moe.experts." in module), None)
    if first is None:
        return []
    return [
        f"{first} and the other experts are named as Mixtral's, and GPTQModel looks for mlp.experts.0.gate_proj: of "
        f"such {layout} files it loads none of the experts"
    ]


def zero_fields(weight: QuantizedTensor) -> UInt8[Tensor, "out groups"]:
    """Zero points as layouts without signs have them, `zero_point + 2^(b-1)`, a row for each of the matrix."""
    half = 1 << (weight.scheme.bits - 1)
    out, groups = weight.shape[0], weight.scale.shape[1]
    if weight.zero_point is None:
        return torch.full((out, groups), half, dtype=torch.uint8, device=weight.scale.device)
    return (weight.zero_point.to(torch.int16) + half).to(torch.uint8).expand(out, groups)


def half_precision(name: str, tensor: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The tensor in float16. Raises UnsupportedError where it holds more than float16 does."""
    halves = tensor.to(torch.float16)
    if not bool(halves.isfinite().all()):
        raise UnsupportedError(
            f"{name} holds {float(tensor.abs().amax()):g}, beyond float16, which the layout stores; export to another"
        )
    return halves


def dense(module: str, weight: QuantizedTensor, bias: Tensor | None) -> dict[str, Tensor]:
    """The stored tensors of a module that is written in float, in the type of its scales.

    Raises UnsupportedError for numbers beyond that type.
    """
    matrix = weight.dequantize(weight.scale.dtype)
    if not all_finite(matrix):
        kind = str(matrix.dtype).removeprefix("torch.")
        raise UnsupportedError(
            f"{module} holds numbers beyond {kind}, the type of its scales; export to another layout"
        )
    tensors = {"weight": matrix} | ({} if bias is None else {"bias": bias})
    return {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}


def most_common(schemes: dict[str, Scheme]) -> Scheme:
    """The scheme of most linears, the first of those that as many have."""
    return Counter(schemes.values()).most_common(1)[0][0]


def _listed(bits: tuple[int, ...]) -> str:
    return ", ".join(map(str, bits[:-1])) + f" or {bits[-1]}" if len(bits) > 1 else str(bits[0])


def stored_modules(checkpoint: Checkpoint, suffix: str) -> list[str]:
    """Names of the modules that have a tensor with this suffix, in the files' order."""
    return [name.removesuffix(f".{suffix}") for name in checkpoint.tensors if name.endswith(f".{suffix}")]


def stored_matrix(checkpoint: Checkpoint, name: str, dtype: torch.dtype | None) -> tuple[int, int]:
    """Rows and columns of a stored tensor of this type (None: one of scales), known without reading it.

    Raises CheckpointError where it is missing, no matrix, or of another type.
    """
    info = checkpoint.tensors.get(name)
    if info is None:
        raise CheckpointError(f"{checkpoint.path}: tensor {name} is missing; its linear cannot be read")
    if len(info.shape) != 2 or not all(info.shape):
        raise CheckpointError(f"{checkpoint.path}: {name} is {list(info.shape)}, expected a matrix")
    if info.dtype != dtype and (dtype is not None or info.dtype not in SCALE_DTYPES):
        raise CheckpointError(
            f"{checkpoint.path}: {name} is {info.dtype}, expected {dtype or 'a float type of 16 or 32 bits'}"
        )
    return info.shape[0], info.shape[1]


def finite(name: str, tensor: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The tensor. Raises CheckpointError where it holds NaN or infinity."""
    if not all_finite(tensor):
        raise CheckpointError(f"{name} holds NaN or infinity; the file is damaged")
    return tensor
