"""Coordinate descent on a quantized matrix: codes and scales, one at a time, each moved to where the loss is least.

    loss = tr(E H Eᵀ),   E = Q - W,   Q = (codes - zero_point) * scale

With everything else fixed, the best real value of one weight is q - (E H)_j / H_jj, and the best code is the one
nearest to it on the grid, since the loss is a parabola in every single weight. Columns are visited by falling diagonal,
in blocks whose gradient is computed by one product and kept current inside. The scales of all groups of a row are a
linear least squares problem once the codes are fixed; a row takes the solution, rounded to storage, only where its loss
falls.

No step raises the loss, and the cost depends on the matrix alone: no calibration token is read again. (Coordinate
descent for this objective: QuantEase, Behdin et al. 2023, arXiv:2309.01885.)
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.quant.gptq import column_grid
from cann_llm_quant.quant.number_formats import nearest_, to_codes, to_values
from cann_llm_quant.quant.scheme import QuantizedTensor

_BLOCK = 64
_RIDGE = 1e-3


def descend_codes(
    weight: QuantizedTensor, w: Float[Tensor, "out in"], hessian: Float[Tensor, "in in"], sweeps: int = 1
) -> QuantizedTensor:
    """Better codes for the same grid; `w` is the float matrix that is aimed at."""
    steps, _ = column_grid(weight)
    h = hessian.to(torch.float32)
    order = h.diagonal().argsort(descending=True, stable=True)
    order = order[h.diagonal()[order] > torch.finfo(torch.float32).tiny]
    group = (order // weight.scheme.columns_per_scale(w.shape[1])).tolist()
    values = to_values(weight.codes, weight.scheme.dtype).T.contiguous()
    error = (weight.dequantize() - w.to(torch.float32)).T.contiguous()
    for _ in range(sweeps):
        for begin in range(0, len(group), _BLOCK):
            block, groups = order[begin : begin + _BLOCK], group[begin : begin + _BLOCK]
            strip = h[block]
            before = values[block]
            moved = before.clone()
            _descend_block(moved, strip @ error, strip[:, block], [steps[g] for g in groups], weight.scheme.dtype)
            values[block] = moved
            error[block] += (moved - before) * steps[groups]
    return replace(weight, stored=to_codes(values.T.contiguous(), weight.scheme.dtype))


def _descend_block(values: Tensor, gradient: Tensor, corner: Tensor, steps: list[Tensor], dtype: str) -> None:
    """One pass over the columns of a block, in place; `gradient` (E H) of the block is kept current."""
    pivots: list[float] = corner.diagonal().tolist()
    for j, pivot in enumerate(pivots):
        # A value moves by steps from where it is, so that the zero point does not enter.
        best = nearest_(torch.div(gradient[j], steps[j]).div_(-pivot).add_(values[j]), dtype)
        move = best - values[j]
        values[j] = best
        gradient[j + 1 :].addr_(corner[j, j + 1 :], move.mul_(steps[j]))


def refit_scales(
    weight: QuantizedTensor, w: Float[Tensor, "out in"], hessian: Float[Tensor, "in in"]
) -> QuantizedTensor:
    """Least-squares scales of every row for fixed codes, rounded to the storage type of the old ones.

    Only for schemes that give each row its own scales, of a float type; others are returned as they are.
    """
    if weight.scheme.strategy not in ("group", "channel") or weight.scheme.scale_type != "float":
        return weight
    h, w = hessian.to(torch.float32), w.to(torch.float32)
    old = weight.scale.to(torch.float32)
    fitted = _ridge(*_normal_equations(weight, w, h), old).to(weight.scale.dtype)
    usable = torch.isfinite(fitted) & (fitted > 0.5 * old) & (fitted < 2 * old)
    candidate = replace(weight, scale=torch.where(usable, fitted, weight.scale))
    better = row_losses(candidate, w, h) < row_losses(weight, w, h)
    return replace(weight, scale=torch.where(better.unsqueeze(1), candidate.scale, weight.scale))


def _normal_equations(weight: QuantizedTensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the matrix [groups, groups] and the right side [groups] of its scales' least squares problem."""
    out, groups = weight.scale.shape
    levels = to_values(weight.codes, weight.scheme.dtype).view(out, groups, -1)
    if weight.zero_point is not None:
        levels = levels - weight.zero_point.to(torch.float32).unsqueeze(-1)
    width = levels.shape[2]
    target = ((w @ h).view(out, groups, width) * levels).sum(-1)
    normal = torch.empty(out, groups, groups, dtype=torch.float32, device=w.device)
    for g in range(groups):
        reached = levels[:, g] @ h[g * width : (g + 1) * width]
        normal[:, g] = (reached.view(out, groups, width) * levels).sum(-1)
    return normal, target


def _ridge(normal: Tensor, target: Tensor, old: Tensor) -> Tensor:
    """Solve `normal x = target`, pulled weakly toward `old`, so that groups without energy keep their scale."""
    diagonal = normal.diagonal(dim1=1, dim2=2)
    pull = _RIDGE * diagonal.mean(-1, keepdim=True) + torch.finfo(torch.float32).tiny
    diagonal.add_(pull)
    solution: Tensor = torch.linalg.solve_ex(normal, (target + pull * old).unsqueeze(-1))[0]
    return solution.squeeze(-1)


def row_losses(
    weight: QuantizedTensor, w: Float[Tensor, "out in"], hessian: Float[Tensor, "in in"]
) -> Float[Tensor, " out"]:
    """`e H eᵀ` of every row."""
    e = weight.dequantize() - w.to(torch.float32)
    return (e @ hessian).mul_(e).sum(-1)
