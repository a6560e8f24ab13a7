"""Coordinate descent on a quantized matrix: codes and scales, one at a time, each moved to where the loss is least.

    loss = tr(E H Eᵀ),   E = Q - W,   Q = (codes - zero_point) * scale

With everything else fixed, the best real value of one weight is q - (E H)_j / H_jj, and the best code is the one nearest
to it on the grid, since the loss is a parabola in every single weight. Columns are visited by falling diagonal, in blocks
whose gradient is computed by one product and kept current inside. The scales of all groups of a row are a linear least
squares problem once the codes are fixed; a row takes the solution, rounded to storage, only where its loss falls.

No step raises the loss, and the cost depends on the matrix alone: no calibration token is read again. (Coordinate descent
for this objective: QuantEase, Behdin et al. 2023, arXiv:2309.01885.)
"""

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from cann_llm_quant.quant.gptq import column_grid
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme

_BLOCK = 64
_RIDGE = 1e-3


def descend_codes(
    weight: QuantizedTensor, w: Float[Tensor, "out in"], hessian: Float[Tensor, "in in"], sweeps: int = 1
) -> QuantizedTensor:
    """Better codes for the same grid; `w` is the float matrix that is aimed at."""
    out, columns = w.shape
    steps, zeros = column_grid(weight.scale, weight.zero_point, out)
    h = hessian.to(torch.float32)
    order = h.diagonal().argsort(descending=True, stable=True)
    order = order[h.diagonal()[order] > torch.finfo(torch.float32).tiny]
    group = (order // (columns // steps.shape[0])).tolist()
    codes = weight.codes.T.contiguous()
    error = (weight.dequantize() - w.to(torch.float32)).T.contiguous()
    for _ in range(sweeps):
        for begin in range(0, len(group), _BLOCK):
            block = order[begin : begin + _BLOCK]
            strip = h[block]
            corner = strip[:, block]
            gradient = strip @ error
            before = codes[block]
            moved = _descend_block(
                before.to(torch.float32), gradient, corner, group[begin : begin + _BLOCK], steps, zeros, weight.scheme
            )
            change = moved - before
            codes[block] = moved.to(torch.int8)
            error[block] += change * steps[group[begin : begin + _BLOCK]]
    return QuantizedTensor(codes.T.contiguous(), weight.scale, weight.zero_point, weight.scheme)


def _descend_block(
    codes: Tensor,
    gradient: Tensor,
    corner: Tensor,
    group: list[int],
    steps: Tensor,
    zeros: Tensor | None,
    scheme: Scheme,
) -> Tensor:
    """One pass over the columns of a block; `gradient` (E H) of the block is kept current. Returns the new codes."""
    pivots = corner.diagonal().tolist()
    codes = codes.clone()
    for j, pivot in enumerate(pivots):
        step = steps[group[j]]
        # The code moves by a whole number of steps from where it is, so that the zero point does not enter.
        move = torch.div(gradient[j], step).div_(-pivot).add_(codes[j]).round_()
        move.clamp_(scheme.qmin, scheme.qmax).sub_(codes[j])
        codes[j] += move
        gradient[j + 1 :].addr_(corner[j, j + 1 :], move.mul_(step))
    return codes


def refit_scales(
    weight: QuantizedTensor, w: Float[Tensor, "out in"], hessian: Float[Tensor, "in in"]
) -> QuantizedTensor:
    """Least-squares scales of every row for fixed codes, in the storage type of the old ones; group schemes only."""
    out, groups = weight.scale.shape
    if out != w.shape[0]:
        return weight
    h, w = hessian.to(torch.float32), w.to(torch.float32)
    width = w.shape[1] // groups
    levels = weight.codes.to(torch.float32)
    if weight.zero_point is not None:
        levels = levels - weight.zero_point.to(torch.float32).repeat_interleave(width, dim=1)
    grouped = levels.view(out, groups, width)
    target = ((w @ h).view(out, groups, width) * grouped).sum(-1)
    normal = torch.empty(out, groups, groups, dtype=torch.float32, device=w.device)
    for g in range(groups):
        reached = grouped[:, g] @ h[g * width : (g + 1) * width]
        normal[:, g] = (reached.view(out, groups, width) * grouped).sum(-1)
    old = weight.scale.to(torch.float32)
    fitted = _ridge(normal, target, old).to(weight.scale.dtype)
    usable = torch.isfinite(fitted) & (fitted > 0.5 * old) & (fitted < 2 * old)
    fitted = torch.where(usable, fitted, weight.scale)
    candidate = QuantizedTensor(weight.codes, fitted, weight.zero_point, weight.scheme)
    better = row_losses(candidate, w, h) < row_losses(weight, w, h)
    scale = torch.where(better.unsqueeze(1), fitted, weight.scale)
    return QuantizedTensor(weight.codes, scale, weight.zero_point, weight.scheme)


def _ridge(normal: Tensor, target: Tensor, old: Tensor) -> Tensor:
    """Solve `normal x = target`, pulled weakly toward `old`, so that groups without energy keep their scale."""
    diagonal = normal.diagonal(dim1=1, dim2=2)
    pull = _RIDGE * diagonal.mean(-1, keepdim=True) + torch.finfo(torch.float32).tiny
    diagonal.add_(pull)
    return torch.linalg.solve_ex(normal, (target + pull * old).unsqueeze(-1))[0].squeeze(-1)


def row_losses(
    weight: QuantizedTensor, w: Float[Tensor, "out in"], hessian: Float[Tensor, "in in"]
) -> Float[Tensor, " out"]:
    """`e H eᵀ` of every row."""
    e = weight.dequantize() - w.to(torch.float32)
    return (e @ hessian).mul_(e).sum(-1)
