"""One linear: solve it, and judge it by its exact output error against plain rounding.

The grid search is optimal per group only, so its matrix may in the end be worse than plain min-max rounding; then plain
rounding is kept. Errors are relative, `tr(ΔW H ΔWᵀ) / tr(W H Wᵀ)`; each costs a product of `out x in x in`, so none is
computed twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.calibrate.moments import SiteMoments
from cann_llm_quant.calibrate.statistics import SiteStatistics
from cann_llm_quant.models.arch import Layer
from cann_llm_quant.quant import rtn
from cann_llm_quant.quant.error import output_error
from cann_llm_quant.quant.grid import choose_scale_dtype, shared_amax
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
    amax: float | None = None,
) -> SolvedLinear:
    """Quantize a (folded) weight; `rtn_error` is what plain rounding cost before folding, the bar to stay below.

    `amax` is the largest weight of all linears that are fused with this one, where they share a scale: the scale then
    follows from it alone (C24).
    """
    scale_dtype = choose_scale_dtype(weight, scheme, storage)
    clip = clip and not (amax is not None and scheme.strategy == "tensor")
    if site is None:
        clipping: rtn.Clip = "mse" if clip else "minmax"
        return SolvedLinear(rtn.solve(weight, scheme, scale_dtype, clip=clipping, amax=amax), None)
    energy = output_error(weight, site.hessian)
    if not clip:
        return _judged(weight, rtn.solve(weight, scheme, scale_dtype, clip="minmax", amax=amax), site, energy)
    searched = rtn.solve(weight, scheme, scale_dtype, clip="mse", hessian=site.hessian, amax=amax)
    best = _judged(weight, searched, site, energy)
    if best.error is not None and rtn_error is not None and best.error > rtn_error:
        plain = _judged(weight, rtn.solve(weight, scheme, scale_dtype, clip="minmax", amax=amax), site, energy)
        best = min(best, plain, key=lambda solved: solved.error or 0.0)
    return best


def shares_scale(scheme: Scheme) -> bool:
    """Whether the scheme has a scale of the whole matrix, which linears that runtimes fuse must then share."""
    return scheme.strategy == "tensor" or scheme.scale_type == "e4m3"


def fused_amax(layer: Layer, schemes: Mapping[str, Scheme], tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """For every linear (by module) whose scheme has a scale of the whole matrix, the amax of its fusion group."""
    found: dict[str, float] = {}
    alone = [(spec.role,) for spec in layer.linears]
    for roles in (*alone, *layer.fusion_groups):
        modules = [layer.linear(role).module for role in roles]
        sharing = [module for module in modules if module in schemes and shares_scale(schemes[module])]
        if sharing:
            found |= dict.fromkeys(sharing, shared_amax(tensors[f"{module}.weight"] for module in sharing))
    return found


def rounding_error(
    weight: Float[Tensor, "out in"],
    scheme: Scheme,
    storage: torch.dtype,
    site: SiteStatistics | SiteMoments | None,
    amax: float | None = None,
) -> float | None:
    """Relative output error of plain min-max rounding, `amax` as in `solve_linear`; None without statistics."""
    if site is None:
        return None
    rounded = rtn.solve(weight, scheme, choose_scale_dtype(weight, scheme, storage), clip="minmax", amax=amax)
    return _judged(weight, rounded, site, output_error(weight, site.hessian)).error


def _judged(
    weight: Float[Tensor, "out in"], quantized: QuantizedTensor, site: SiteStatistics | SiteMoments, energy: float
) -> SolvedLinear:
    lost = output_error(quantized.dequantize().sub_(weight), site.hessian)
    return SolvedLinear(quantized, lost / energy if energy > 0 else 0.0)
