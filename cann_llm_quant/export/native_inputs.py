"""Stored ranges of inputs in the native layouts, named as compressed-tensors names them.

    <module>.input_scale         a float type [1]   static schemes
    <module>.input_zero_point    int8 [1]           static and asymmetric
    <module>.input_global_scale  float32 [1]        NVFP4: what the scales of groups are multiplied by before rounding

Dynamic schemes store nothing.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.quant.activations import InputQuantizer, InputRange, is_nv, needs_range
from cann_llm_quant.quant.scheme import ActivationScheme


def encode_range(module: str, scheme: ActivationScheme, fixed: InputRange) -> dict[str, Tensor]:
    """The stored tensors of one linear's input range, by full name."""
    if is_nv(scheme):
        return {f"{module}.input_global_scale": fixed.scale.to(torch.float32)}
    tensors = {f"{module}.input_scale": fixed.scale}
    if fixed.zero_point is not None:
        tensors[f"{module}.input_zero_point"] = fixed.zero_point
    return tensors


def decode_inputs(module: str, scheme: ActivationScheme, tensors: Mapping[str, Tensor]) -> InputQuantizer:
    """How one linear's input is quantized, from its scheme and the tensors that hold its range.

    Raises CheckpointError when the range is absent, of another shape, or no positive number.
    """
    if not needs_range(scheme):
        return InputQuantizer(scheme)
    scale = _one_number(f"{module}.{'input_global_scale' if is_nv(scheme) else 'input_scale'}", tensors)
    if not bool((scale > 0).all()) or not bool(scale.isfinite().all()):
        raise CheckpointError(f"{module}: the stored input range is {scale.item()}; a positive number is needed")
    if scheme.symmetric:
        return InputQuantizer(scheme, InputRange(scale))
    zero_point = _one_number(f"{module}.input_zero_point", tensors)
    return InputQuantizer(scheme, InputRange(scale, zero_point.to(torch.int8)))


def _one_number(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    if name not in tensors:
        raise CheckpointError(f"tensor {name} is missing; the linear's input has a stored range and cannot run without")
    if tensors[name].numel() != 1:
        raise CheckpointError(f"tensor {name} has shape {list(tensors[name].shape)}, expected one number")
    return tensors[name].view(1)
