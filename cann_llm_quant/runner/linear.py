"""Which kernel runs a packed linear.

| activations on        | codes                                  | `auto`                      | `reference`        |
|-----------------------|----------------------------------------|-----------------------------|--------------------|
| CPU, bfloat16         | integers of <= 4 bits, out % 16 == 0,  | torch int4 operator         | dequantize, in     |
|                       | in % 2 == 0, groups a multiple of 32   |                             | blocks of rows     |
| CPU, bfloat16         | int8, symmetric, one scale a row,      | torch int8 operator         | dequantize         |
|                       | in % 32 == 0                           |                             |                    |
| CPU, bfloat16         | FP8, MXFP4, MXFP8, NVFP4               | dequantize                  | dequantize         |
| CPU, float32, float16 | any                                    | dequantize                  | dequantize         |
| any other device      | any                                    | dequantize                  | dequantize         |

Groups that are scattered over the columns are brought together first (`kernels/reordered.py`).

torch's operators are vectorized for bfloat16 alone: on a 2048 x 2048 matrix, one AVX2 core and one token
they took 0.7 ms (int4) and 0.6 ms (int8) in bfloat16, 10 and 6.6 ms in float32, where dequantizing took 5.4
and 2.4 ms. So float32 stays on the reference kernel, which is exact as well as faster.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.errors import UsageError
from cann_llm_quant.models.decoder import DenseLinear, LinearOp
from cann_llm_quant.models.quantized_input import QuantizedInputLinear
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.scheme import QuantizedTensor
from cann_llm_quant.runner.kernels.dequantize import DequantizeLinear
from cann_llm_quant.runner.kernels.integer import IntegerLinear, integer_fits
from cann_llm_quant.runner.kernels.reordered import ReorderedLinear, in_group_order
from cann_llm_quant.runner.kernels.torch_int4 import Int4Linear, operator_group
from cann_llm_quant.runner.kernels.torch_int8 import Int8Linear, operator_fits

KERNELS = ("auto", "reference")


def packed_linear(
    weight: QuantizedTensor,
    bias: Float[Tensor, " out"] | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kernel: str = "auto",
    inputs: InputQuantizer | None = None,
) -> LinearOp:
    """A linear operation over packed storage on `device`, for activations of `dtype`; see the module's table.

    With `inputs` the input is quantized first: int8 by int8 is then summed in whole numbers whatever the kernel, any
    other weight is multiplied by the codes of the input as by any number. Raises UsageError for an unknown kernel name.
    """
    if kernel not in KERNELS:
        raise UsageError(f"unknown kernel {kernel!r}; choose {' or '.join(KERNELS)}")
    bias = None if bias is None else bias.to(device)
    if weight.group_index is not None:
        return _scattered(weight, bias, device=device, dtype=dtype, kernel=kernel, inputs=inputs)
    if inputs is not None and integer_fits(weight, inputs):
        return IntegerLinear(_moved(weight, device), inputs, bias)
    if inputs is not None:
        product = packed_linear(weight, None, device=device, dtype=dtype, kernel=kernel)
        return QuantizedInputLinear(product, inputs, bias)
    if kernel == "auto" and device.type == "cpu" and dtype == torch.bfloat16:
        if operator_group(weight) is not None:
            return Int4Linear(weight, bias, dtype)
        if operator_fits(weight):
            return Int8Linear(weight, bias, dtype)
    return DequantizeLinear(_moved(weight, device), bias)


def _scattered(
    weight: QuantizedTensor,
    bias: Float[Tensor, " out"] | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kernel: str,
    inputs: InputQuantizer | None,
) -> LinearOp:
    """Groups of one size are brought together; a matrix with others is kept in float."""
    ordered = in_group_order(weight)
    if ordered is not None and (inputs is None or inputs.scheme.strategy != "group"):
        matrix, order = ordered
        product = packed_linear(matrix, bias, device=device, dtype=dtype, kernel=kernel, inputs=inputs)
        return ReorderedLinear(product, order.to(device))
    product = DenseLinear(weight.dequantize(dtype).to(device), None if bias is None else bias.to(dtype))
    return product if inputs is None else QuantizedInputLinear(product, inputs)


def _moved(weight: QuantizedTensor, device: torch.device) -> QuantizedTensor:
    return QuantizedTensor(
        stored=weight.codes.to(device),
        scale=weight.scale.to(device),
        zero_point=None if weight.zero_point is None else weight.zero_point.to(device),
        scheme=weight.scheme,
        global_scale=None if weight.global_scale is None else weight.global_scale.to(device),
    )
