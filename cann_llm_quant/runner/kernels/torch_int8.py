"""torch's own operator for 8-bit weights with one scale a row, `_weight_int8pack_mm`: w = codes * scale.

The operator reads whole vectors of 32 columns in half precision (100 columns crash it in torch 2.13), hence
the restriction.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.quant.scheme import QuantizedTensor


def operator_fits(weight: QuantizedTensor) -> bool:
    """Whether the operator takes this matrix: symmetric 8-bit codes, one scale a row (or one in all), in % 32 == 0.."""
    one_scale_a_row = weight.scale.shape[1] == 1
    int8 = weight.scheme.dtype == "int8" and weight.zero_point is None
    return int8 and one_scale_a_row and weight.shape[1] % 32 == 0


class Int8Linear:
    """A symmetric per-row 8-bit linear on torch's operator; activations must have the dtype it was built for.."""

    def __init__(self, weight: QuantizedTensor, bias: Float[Tensor, " out"] | None, dtype: torch.dtype) -> None:
        if not operator_fits(weight):
            raise ValueError(f"the int8 operator does not take {weight.scheme} with {weight.shape[1]} columns")
        self.out_features = weight.shape[0]
        self.codes = weight.codes.contiguous()
        self.scale = weight.scale[:, 0].expand(self.out_features).contiguous().to(dtype)
        self.bias = None if bias is None else bias.to(dtype)

    def __call__(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """`x @ wᵀ + bias`."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        y: Tensor = torch.ops.aten._weight_int8pack_mm(flat, self.codes, self.scale)
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], self.out_features)
