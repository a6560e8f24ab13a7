"""A linear whose input is quantized before the product, over a matrix of any storage.

    y = scale[row] * ((codes - zero_point) @ wᵀ) + bias                 one scale a row (or one in all)
    y = ((codes - zero_point) * scale) @ wᵀ + bias                      scales of groups

In the first form codes go into the product, not dequantized values: they are exact in every compute dtype, where
multiplied by their scale they would be rounded to bfloat16's 8 bits, which is as coarse as the codes themselves. They
are divided by 512 on the way, a power of two, so that float16 does not overflow.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.models.decoder import LinearOp
from cann_llm_quant.quant.activations import InputQuantizer

_UNIT = 512.0


class QuantizedInputLinear:
    """`product` is the linear without a bias; see the module's formula."""

    def __init__(self, product: LinearOp, inputs: InputQuantizer, bias: Float[Tensor, "out"] | None = None) -> None:
        self.product, self.inputs, self.bias = product, inputs, bias

    def __call__(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """The product with the quantized input, in the dtype of `x`; scale and bias are applied in float32."""
        quantized = self.inputs(x.reshape(-1, x.shape[-1]))
        if quantized.scale.shape[1] == 1:
            y = self.product((quantized.centered() / _UNIT).to(x.dtype)).to(torch.float32).mul_(quantized.scale * _UNIT)
        else:
            y = self.product(quantized.dequantize().to(x.dtype)).to(torch.float32)
        if self.bias is not None:
            y += self.bias.to(torch.float32)
        return y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])
