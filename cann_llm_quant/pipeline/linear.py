"""One linear: solve it, and judge it by its exact output error against plain rounding.

The grid search is optimal per group only, so its matrix may in the end be worse than plain min-max rounding; then plain
rounding is kept. Errors are relative, `tr(ΔW H ΔWᵀ) / tr(W H Wᵀ)`, plus what quantizing the input costs where it is
quantized (see `linear_inputs`); each costs a product of `out x in x in`, so none is computed twice. Outputs are those
of the source's linear: where folding divided them, they are multiplied back before they are compared.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.calibrate.input_samples import InputSample
from cann_llm_quant.calibrate.moments import SiteMoments
from cann_llm_quant.calibrate.statistics import SiteStatistics
from cann_llm_quant.models.arch import Layer
from cann_llm_quant.quant import rtn
from cann_llm_quant.quant.error import output_error
from cann_llm_quant.quant.grid import choose_scale_dtype, shared_amax
from cann_llm_quant.quant.scale_search import SiteInputs
from cann_llm_quant.quant.scheme import ActivationScheme, QuantizedTensor, Scheme
from cann_llm_quant.recipe import ActivationFormat


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
    rows: Float[Tensor, "out"] | None = None,
    inputs: SiteInputs | None = None,
) -> SolvedLinear:
    """Quantize a (folded) weight; `rtn_error` is what plain rounding cost before folding, the bar to stay below.

    `amax` is the largest weight of all linears that are fused with this one, where they share a scale: the scale then
    follows from it alone (C24). `rows` is what folding divided the rows by; `inputs` are the folded ones, where they
    are quantized.
    """
    scale_dtype = choose_scale_dtype(weight, scheme, storage)
    clip = clip and not (amax is not None and scheme.strategy == "tensor")
    if site is None:
        clipping: rtn.Clip = "mse" if clip else "minmax"
        return SolvedLinear(rtn.solve(weight, scheme, scale_dtype, clip=clipping, amax=amax), None)
    judge = _Judge(weight, site.hessian, rows, inputs)
    if not clip:
        return judge(rtn.solve(weight, scheme, scale_dtype, clip="minmax", amax=amax))
    best = judge(rtn.solve(weight, scheme, scale_dtype, clip="mse", hessian=site.hessian, amax=amax))
    if best.error is not None and rtn_error is not None and best.error > rtn_error:
        plain = judge(rtn.solve(weight, scheme, scale_dtype, clip="minmax", amax=amax))
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
    inputs: SiteInputs | None = None,
) -> float | None:
    """Relative output error of plain min-max rounding, the rest as in `solve_linear`; None without statistics."""
    if site is None:
        return None
    rounded = rtn.solve(weight, scheme, choose_scale_dtype(weight, scheme, storage), clip="minmax", amax=amax)
    return _Judge(weight, site.hessian, None, inputs)(rounded).error


def linear_inputs(
    seen: SiteStatistics | InputSample | None, scheme: ActivationScheme | None, wanted: ActivationFormat | None
) -> SiteInputs | None:
    """What a linear's input loses by its own quantization is measured on; None where it stays in float or was not seen.

    The error of a linear is then the sum of two relative ones, its weights' through the Gram matrix and its input's on
    the sample; their product is left out, as in quant/scale_search.py. `wanted` says how a stored range is estimated.
    """
    if seen is None or scheme is None or seen.sample is None:
        return None
    inputs = SiteInputs(scheme, seen.sample, seen.amax, seen.evidence)
    return inputs if wanted is None else replace(inputs, method=wanted.range, percentile=wanted.percentile)


def sites_to_unfold(layer: Layer, folded: Collection[str], linears: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Folded sites to be left alone because a recorded linear ended worse than plain rounding.

    That is the linear's own site; where that is not folded, those whose fold divided rows of a linear beside it, for
    which a scale may be shared.
    """
    found: set[str] = set()
    for site in layer.sites:
        entries = [linears.get(layer.linear(role).module, {}) for role in site.linears]
        if not any(entry.get("error") and entry["error"] > entry["rtn_error"] for entry in entries):
            continue
        beside = [s.name for s in layer.sites if s.producer is not None and s.producer.role in site.linears]
        found.update([site.name] if site.name in folded else [name for name in beside if name in folded])
    return found


class _Judge:
    """Gives a quantized weight its relative error, in the source's coordinates."""

    def __init__(self, weight: Tensor, hessian: Tensor, rows: Tensor | None, inputs: SiteInputs | None) -> None:
        self._weight, self._hessian = weight, hessian
        self._rows = None if rows is None else rows.unsqueeze(1)
        source = self._in_source(weight)
        self._energy = output_error(source, hessian)
        self._input_error = 0.0 if inputs is None else inputs.relative_error(source)

    def __call__(self, quantized: QuantizedTensor) -> SolvedLinear:
        lost = output_error(self._in_source(quantized.dequantize().sub_(self._weight)), self._hessian)
        return SolvedLinear(quantized, self._input_error + (lost / self._energy if self._energy > 0 else 0.0))

    def _in_source(self, folded: Tensor) -> Tensor:
        return folded if self._rows is None else folded * self._rows
