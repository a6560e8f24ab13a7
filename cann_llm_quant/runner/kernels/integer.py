"""Integer weights times integer activations, summed exactly, then scaled: what an int8 matrix unit computes.

    y = (codes_x - zero_x) @ (codes_w - zero_w)ᵀ * scale_x[row] * scale_w[column] + bias

The sums are of whole numbers. Float32 holds those exactly up to 2^24, in whatever order a matrix multiplication adds:
1024 products of int8 numbers. Wider matrices are multiplied in pieces of that many columns, and the pieces are added in
float64. torch's own int8 operator (`_int_mm`) gives the same sums and took 22 times as long on a CPU without VNNI
(1001 ms against 46 ms for 512 x 576 times 576 x 1536).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.number_formats import INT_BITS
from cann_llm_quant.quant.scheme import QuantizedTensor

_EXACT = 1 << 24
_BLOCK_ELEMENTS = 1 << 19


def integer_fits(weight: QuantizedTensor, inputs: InputQuantizer) -> bool:
    """Whether both sides are 8-bit integers with one scale a row (or one in all)."""
    ours = weight.scheme.dtype == "int8" and weight.scheme.strategy in ("channel", "tensor")
    return ours and inputs.scheme.dtype in INT_BITS and inputs.scheme.strategy != "group"


class IntegerLinear:
    """A W8A8 linear; codes stay in int8 and become float32 a block of rows at a time."""

    def __init__(self, weight: QuantizedTensor, inputs: InputQuantizer, bias: Float[Tensor, "out"] | None) -> None:
        if not integer_fits(weight, inputs):
            raise ValueError(f"{weight.scheme} and {inputs.scheme} are not integers with one scale a row")
        self.out_features, self.in_features = weight.shape
        self.inputs, self.bias = inputs, bias
        self.codes = weight.codes
        self.scale = weight.scale.to(torch.float32)[:, 0].expand(self.out_features)
        zero = weight.zero_point
        self.zero_point = None if zero is None else zero.to(torch.float32).expand(self.out_features, 1)
        largest = (128 if zero is None else 255) * (128 if inputs.scheme.symmetric else 255)
        self._columns = _EXACT // largest

    def __call__(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """The product with the quantized input, in the dtype of `x`."""
        quantized = self.inputs(x.reshape(-1, self.in_features))
        y = self._sums(quantized.centered()).mul_(quantized.scale).mul_(self.scale)
        if self.bias is not None:
            y += self.bias.to(torch.float32)
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _sums(self, centered: Float[Tensor, "tokens in"]) -> Float[Tensor, "tokens out"]:
        sums = centered.new_empty(len(centered), self.out_features)
        step = max(1, _BLOCK_ELEMENTS // self.in_features)
        for start in range(0, self.out_features, step):
            rows = slice(start, start + step)
            block = self.codes[rows].to(torch.float32)
            if self.zero_point is not None:
                block -= self.zero_point[rows]
            sums[:, rows] = exact_product(centered, block, self._columns)
        return sums


def exact_product(
    left: Float[Tensor, "tokens in"], right: Float[Tensor, "out in"], columns: int
) -> Float[Tensor, "tokens out"]:
    """`left @ rightᵀ` of whole numbers, the sum rounded once to float32; `columns` products stay below 2^24."""
    if left.shape[1] <= columns:
        return left @ right.t()
    pieces = zip(torch.split(left, columns, 1), torch.split(right, columns, 1), strict=True)
    total = torch.zeros(len(left), len(right), dtype=torch.float64, device=left.device)
    for a, b in pieces:
        total += a @ b.t()
    return total.to(torch.float32)
