"""torch's own CPU operator for group-wise 4-bit weights, `_weight_int4pack_mm_for_cpu`.

    w = (u - 8) * scale + shift,   u = codes + 8,   shift = -zero_point * scale

The operator stores two codes a byte in an order of its own, wants scale and shift interleaved as [in /
group, out, 2] in the dtype of the activations, out a multiple of 16, in of 2, groups of 32, 64, 128 or 256.
A wider group (or a whole row) is the same scale repeated over several of those. Rounding scale and shift to
bfloat16 costs at most 2^-9 of their size, as rounding the dequantized weights would; scales that are stored
in bfloat16 (the default) stay exact.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.quant.scheme import QuantizedTensor

OPERATOR_GROUPS = (256, 128, 64, 32)
PACK_ROWS = 512


def operator_group(weight: QuantizedTensor) -> int | None:
    """The operator's group size for this matrix, None when the operator does not take it."""
    out, columns = weight.shape
    if not weight.scheme.is_integer or weight.scheme.bits > 4 or out % 16 or columns % 2:
        return None
    own = columns // weight.scale.shape[1]
    return next((size for size in OPERATOR_GROUPS if own % size == 0), None)


class Int4Linear:
    """A linear of 4 bits or fewer on torch's CPU operator; activations must have the dtype it was built for.."""

    def __init__(self, weight: QuantizedTensor, bias: Float[Tensor, " out"] | None, dtype: torch.dtype) -> None:
        group = operator_group(weight)
        if group is None:
            raise ValueError(f"the int4 operator does not take {weight.shape} with scales {tuple(weight.scale.shape)}")
        out, columns = weight.shape
        self.group = group
        self.out_features = out
        self.codes = _pack(weight)
        scale = weight.scale.to(torch.float32).expand(out, -1)
        shift = torch.zeros_like(scale) if weight.zero_point is None else -weight.zero_point.to(torch.float32) * scale
        repeat = columns // group // scale.shape[1]
        both = torch.stack([scale, shift], dim=-1).repeat_interleave(repeat, dim=1)
        self.scales_and_shifts = both.transpose(0, 1).contiguous().to(dtype)
        self.bias = None if bias is None else bias.to(dtype)

    def __call__(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """`x @ wᵀ + bias`."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self.codes, self.group, self.scales_and_shifts)
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], self.out_features)


def _pack(weight: QuantizedTensor) -> Tensor:
    """The operator's packing, a few rows at a time: it takes int32 codes, eight times the size of what it returns.

    Its row tiles divide `PACK_ROWS`, so that pieces stack to what the whole matrix would give.
    """
    pieces = [
        torch.ops.aten._convert_weight_to_int4pack_for_cpu(rows.to(torch.int32) + 8, 1)
        for rows in torch.split(weight.codes, PACK_ROWS)
    ]
    return torch.cat(pieces)
