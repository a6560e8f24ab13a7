"""A quantized embedding: rows are dequantized when they are looked up; the codes may serve a tied head as well.

y[t] = (codes[ids[t]] - zero_point[ids[t]]) * scale[ids[t]]        scales by row or by group of a row
"""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cann_llm_quant.quant.scheme import QuantizedTensor


class QuantizedLookup:
    """Rows of `weight`, in `dtype`, on `device`; every row of `weight` has scales of its own."""

    def __init__(self, weight: QuantizedTensor, device: torch.device, dtype: torch.dtype) -> None:
        if weight.scale.shape[0] != weight.shape[0] or weight.group_index is not None:
            raise ValueError(f"an embedding has scales for each row, not {weight.scheme}")
        zero_point = None if weight.zero_point is None else weight.zero_point.to(device)
        codes, scale = weight.codes.to(device), weight.scale.to(device)
        self.weight = replace(weight, stored=codes, scale=scale, zero_point=zero_point)
        self.device, self.dtype = device, dtype

    def __call__(self, ids: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq hidden"]:
        """The rows for `ids`."""
        whole, flat = self.weight, ids.flatten()
        zero_point = None if whole.zero_point is None else whole.zero_point[flat]
        rows = replace(whole, stored=whole.codes[flat], scale=whole.scale[flat], zero_point=zero_point)
        return rows.dequantize(self.dtype).view(*ids.shape, whole.shape[1])
