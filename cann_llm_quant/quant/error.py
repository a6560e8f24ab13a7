"""How far a linear's output moves when its weight does, from the input's Gram matrix alone.

With H = sum of xᵀx over the calibration tokens and delta = W' - W, the summed squared error of all outputs is

    sum over tokens of |x deltaᵀ|² = tr(delta H deltaᵀ)

Where only a ranking is wanted, products of columns of different blocks may be left out: rounding errors of different
groups are nearly independent, so that those products are mostly noise.
"""

import torch
from jaxtyping import Float
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 22
_MAX_BLOCK = 128


def output_error(delta: Float[Tensor, "out in"], hessian: Float[Tensor, "in in"]) -> float:
    """`tr(delta H deltaᵀ)`: products in float32, a bounded block of rows at a time, sums in float64."""
    h = hessian.to(torch.float32)
    rows = max(1, _BLOCK_ELEMENTS // max(1, delta.shape[1]))
    total = 0.0
    for r in range(0, delta.shape[0], rows):
        e = delta[r : r + rows].to(torch.float32)
        total += float((e @ h).mul_(e).sum(dtype=torch.float64))
    return total


def relative_output_error(
    w: Float[Tensor, "out in"], w_hat: Float[Tensor, "out in"], hessian: Float[Tensor, "in in"]
) -> float:
    """`output_error` of `w_hat - w` relative to the energy of the outputs, `tr(W H Wᵀ)`; 0 when there is none."""
    energy = output_error(w, hessian)
    if energy <= 0:
        return 0.0
    return output_error(w_hat.to(torch.float32) - w.to(torch.float32), hessian) / energy


def block_output_error(delta: Float[Tensor, "out in"], hessian: Float[Tensor, "in in"], width: int) -> float:
    """`output_error` without products of columns of different blocks.

    Blocks are groups of `width` columns where that divides the columns and is at most 128, else as wide as divides them
    and is at most 128: the cost does not grow with the square of the columns.
    """
    columns = hessian.shape[0]
    if width > _MAX_BLOCK or columns % width:
        width = max(size for size in range(1, min(columns, _MAX_BLOCK) + 1) if columns % size == 0)
    blocks = hessian.to(torch.float32).view(columns // width, width, columns // width, width).diagonal(dim1=0, dim2=2)
    e = delta.to(torch.float32).view(-1, columns // width, width).transpose(0, 1)
    return float(torch.bmm(e, blocks.permute(2, 0, 1)).mul_(e).sum(dtype=torch.float64))
