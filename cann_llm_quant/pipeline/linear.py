"""One linear: solve it, and judge it by its exact output error against plain rounding.

The grid search is optimal per group only, so its matrix may in the end be worse than plain min-max rounding; then plain
rounding is kept. Errors are relative, `tr(ΔW H ΔWᵀ) / tr(W H Wᵀ)`; each costs a product of `out x in x in`, so none is
computed twice.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.calibrate.moments import SiteMoments
from cann_llm_quant.calibrate.statistics import SiteStatistics
from cann_llm_quant.quant import rtn
from cann_llm_quant.quant.error import output_error
from cann_llm_quant.quant.grid import choose_scale_dtype
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme


@dataclass(frozen=True)
class SolvedLinear:
    """A quantized linear and its relative output error (None without statistics)."""

    weight: QuantizedTensor
    error: float | None


def solve_linear(
    weight: Float[Tensor, "out in"],
    scheme: Scheme,
    storage: torch.dtype,
    site: SiteStatistics | SiteMoments | None,
    *,
    clip: bool,
    rtn_error: float | None,
) -> SolvedLinear:
    """Quantize a (folded) weight; `rtn_error` is what plain rounding cost before folding, the bar to stay below."""
    scale_dtype = choose_scale_dtype(weight, scheme, storage)
    if site is None:
        return SolvedLinear(rtn.solve(weight, scheme, scale_dtype, clip="mse" if clip else "minmax"), None)
    energy = output_error(weight, site.hessian)
    if not clip:
        return _judged(weight, rtn.solve(weight, scheme, scale_dtype, clip="minmax"), site, energy)
    searched = rtn.solve(weight, scheme, scale_dtype, clip="mse", hessian=site.hessian)
    best = _judged(weight, searched, site, energy)
    if best.error is not None and rtn_error is not None and best.error > rtn_error:
        plain = _judged(weight, rtn.solve(weight, scheme, scale_dtype, clip="minmax"), site, energy)
        best = min(best, plain, key=lambda solved: solved.error or 0.0)
    return best


def rounding_error(
    weight: Float[Tensor, "out in"],
    scheme: Scheme,
    storage: torch.dtype,
    site: SiteStatistics | SiteMoments | None,
) -> float | None:
    """Relative output error of plain min-max rounding; None without statistics."""
    if site is None:
        return None
    rounded = rtn.solve(weight, scheme, choose_scale_dtype(weight, scheme, storage), clip="minmax")
    return _judged(weight, rounded, site, output_error(weight, site.hessian)).error


def _judged(
    weight: Float[Tensor, "out in"], quantized: QuantizedTensor, site: SiteStatistics | SiteMoments, energy: float
) -> SolvedLinear:
    lost = output_error(quantized.dequantize().sub_(weight), site.hessian)
    return SolvedLinear(quantized, lost / energy if energy > 0 else 0.0)
