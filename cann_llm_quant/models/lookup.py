"""A quantized embedding: rows are dequantized when they are looked up; the codes may serve a tied head as well.

y[t] = codes[ids[t]] * scale[ids[t]]        one scale a row
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cann_llm_quant.quant.scheme import QuantizedTensor


class QuantizedLookup:
    """Rows of `weight`, in `dtype`, on `device`; `weight` has one scale a row and no zero points."""

    def __init__(self, weight: QuantizedTensor, device: torch.device, dtype: torch.dtype) -> None:
        if weight.scale.shape != (weight.shape[0], 1) or weight.zero_point is not None:
            raise ValueError(f"an embedding has one scale a row and no zero points, not {weight.scheme}")
        self.weight = QuantizedTensor(weight.codes.to(device), weight.scale.to(device), None, weight.scheme)
        self.device, self.dtype = device, dtype

    def __call__(self, ids: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq hidden"]:
        """The rows for `ids`."""
        codes, scale = self.weight.codes[ids], self.weight.scale[ids]
        return (codes.to(torch.float32) * scale.to(torch.float32)).to(self.dtype)
