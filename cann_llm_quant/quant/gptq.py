"""Error feedback: quantize column after column and let the columns that are still float make up for each error.

For the objective tr((Q - W) H (Q - W)ᵀ) the best answer of the remaining columns F to an error e in column j is

    w_F <- w_F - e / [H⁻¹]_jj * [H⁻¹]_jF        (optimal brain surgeon; GPTQ, Frantar et al. 2022, arXiv:2210.17323)

With the upper Cholesky factor U of H⁻¹ (UᵀU = H⁻¹) row j of U is exactly that row of the inverse over the columns that
are left, divided by its root diagonal, so one factorization serves all columns. Columns are visited by falling diagonal
of H ("activation order"); the grid of every group is fixed beforehand ("static groups"), so that groups stay contiguous
in the file and no index of groups is stored.

The last columns of a block receive its errors at once, in one product ("lazy batches").
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cann_llm_quant.quant.number_formats import nearest_, to_codes
from cann_llm_quant.quant.scheme import QuantizedTensor, row_scales

_BLOCK = 64
_DAMPING_TRIES = 4


@dataclass(frozen=True)
class Factor:
    """`upper` is U of the module's text for the permuted, damped Hessian; `order[i]` is the column visited i-th.

    `damping` is the share of the mean diagonal that was added in the end.
    """

    upper: Float[Tensor, "in in"]
    order: Int[Tensor, " in"]
    damping: float

    @property
    def broken_pivots(self) -> int:
        """Columns whose diagonal of U cannot be divided by."""
        return sum(pivot is None for pivot in _usable_pivots(self.upper.diagonal()))


def factorize(hessian: Float[Tensor, "in in"], damping: float = 0.01) -> Factor | None:
    """Order and factor of a Hessian plus `damping * mean(diagonal)` on its diagonal.

    Where the factorization fails (fewer tokens than columns, repeated columns) the damping is raised tenfold, up to
    four times. None when there is nothing to factorize: a Hessian of zeros, or one that stays singular.
    """
    h = hessian.to(torch.float32)
    mean = float(h.diagonal().mean(dtype=torch.float64))
    if not mean > 0 or not math.isfinite(mean):
        return None
    order = h.diagonal().argsort(descending=True, stable=True)
    permuted = h[order][:, order]
    for attempt in range(_DAMPING_TRIES + 1):
        share = max(damping, 1e-6) * 10**attempt if attempt else damping
        damped = permuted.clone()
        damped.diagonal().add_(share * mean)
        upper = _inverse_factor(damped)
        if upper is not None:
            return Factor(upper, order, share)
    return None


def _inverse_factor(h: Tensor) -> Tensor | None:
    lower, failed = torch.linalg.cholesky_ex(h)
    if int(failed):
        return None
    upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    return None if int(failed) or not bool(torch.isfinite(upper).all()) else upper


def feed_back(rounded: QuantizedTensor, w: Float[Tensor, "out in"], factor: Factor) -> QuantizedTensor:
    """`w` on the grid of `rounded`, each column's error passed on to the columns that come after it.

    A column whose pivot underflowed is rounded but passes nothing on. Rows do not depend on one another, so matrices of
    one site may be stacked.
    """
    out, columns = w.shape
    dtype = rounded.scheme.dtype
    # Columns lie contiguous: the loop below touches them one by one.
    work = w.to(torch.float32)[:, factor.order].T.contiguous()
    steps, zeros = column_grid(rounded)
    group = (factor.order // rounded.scheme.columns_per_scale(columns)).tolist()
    pivots = _usable_pivots(factor.upper.diagonal())
    values = torch.empty_like(work)
    for begin in range(0, columns, _BLOCK):
        end = min(begin + _BLOCK, columns)
        upper = factor.upper[begin:end]
        errors = torch.zeros(end - begin, out, dtype=torch.float32, device=w.device)
        for j in range(begin, end):
            step, zero, pivot = steps[group[j]], None if zeros is None else zeros[group[j]], pivots[j]
            value = _round_column(work[j], step, zero, dtype)
            values[j] = value
            if pivot is None:
                continue
            if zero is not None:
                value = value - zero
            error = torch.addcmul(work[j], value, step, value=-1.0).div_(pivot)
            errors[j - begin] = error
            work[j + 1 : end].addr_(upper[j - begin, j + 1 : end], error, alpha=-1.0)
        work[end:].addmm_(upper[:, end:].T, errors, alpha=-1.0)
    placed = torch.empty_like(values)
    placed[factor.order] = values
    return replace(rounded, stored=to_codes(placed.T.contiguous(), dtype))


def column_grid(
    weight: QuantizedTensor,
) -> tuple[Float[Tensor, "groups out"], Float[Tensor, "groups out"] | None]:
    """Scale and zero point as float32 with groups first, one entry for each row."""
    out = weight.codes.shape[0]
    steps = row_scales(weight.scale, weight.scheme, out).T.contiguous()
    if weight.zero_point is None:
        return steps, None
    return steps, weight.zero_point.to(torch.float32).expand(out, -1).T.contiguous()


def _round_column(w: Tensor, step: Tensor, zero: Tensor | None, dtype: str) -> Tensor:
    value = torch.div(w, step)
    return nearest_(value if zero is None else value.add_(zero), dtype)


def _usable_pivots(diagonal: Tensor) -> list[float | None]:
    """Diagonal of U; None where dividing by it would leave float32."""
    tiny = torch.finfo(torch.float32).tiny
    return [p if math.isfinite(p) and p > tiny else None for p in diagonal.tolist()]
