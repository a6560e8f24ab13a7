"""One site: its linears solved together by error feedback, each judged against plain rounding.

Errors are relative to the energy of the linear's outputs, `tr((Q - T) H (Q - T)ᵀ) / tr(W H Wᵀ)` with T what the linear
should compute (see quant/drift.py; W itself without a float partner). Plain rounding is min-max rounding of the
source's weight, held against the same T; what feedback leaves worse is rounded plainly, together with all linears that
share a scale with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.calibrate.moments import SiteMoments
from cann_llm_quant.pipeline.linear import SolvedLinear, shares_scale
from cann_llm_quant.quant import rtn
from cann_llm_quant.quant.descent import descend_codes, refit_scales
from cann_llm_quant.quant.drift import drift_target
from cann_llm_quant.quant.error import output_error
from cann_llm_quant.quant.gptq import factorize, feed_back
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme
from cann_llm_quant.recipe import EffortPlan

DAMPING = 0.02


@dataclass(frozen=True)
class FloatLinear:
    """One linear of a site before it is solved.

    `weight` is folded; `plain` is what min-max rounding makes of the source's weight, in the same (folded) coordinates.
    `amax` is the largest (folded) weight of all linears that share a scale with this one (C24), where there is one.
    """

    weight: Float[Tensor, "out in"]
    plain: Float[Tensor, "out in"]
    scheme: Scheme
    scale_dtype: torch.dtype
    amax: float | None = None


@dataclass(frozen=True)
class SolvedSite:
    """Solved linears by module, what plain rounding would have cost each, and sentences for the user."""

    linears: dict[str, SolvedLinear]
    plain: dict[str, float]
    warnings: tuple[str, ...]


def solve_site(
    linears: Mapping[str, FloatLinear], moments: SiteMoments, effort: EffortPlan, *, clip: bool = True
) -> SolvedSite:
    """Solve the linears (by module) that read one site; those of equal scheme share one factorization and one loop.

    `clip`: each group's range is searched; otherwise it spans the extremes, until the effort's rounds refit scales.
    """
    stacks: dict[object, list[str]] = {}
    for module, linear in linears.items():
        # Tiles of rows must not reach over two matrices; one scale for the matrix must, since runtimes fuse them (C24).
        alone = linear.scheme.strategy == "tile"
        stacks.setdefault(module if alone else (linear.scheme, linear.scale_dtype), []).append(module)
    solved: dict[str, SolvedLinear] = {}
    plain: dict[str, float] = {}
    warnings: tuple[str, ...] = ()
    for modules in stacks.values():
        found = _solve_stack({module: linears[module] for module in modules}, moments, effort, clip)
        solved |= found.linears
        plain |= found.plain
        warnings += found.warnings
    return SolvedSite({module: solved[module] for module in linears}, plain, warnings)


def _solve_stack(
    linears: Mapping[str, FloatLinear], moments: SiteMoments, effort: EffortPlan, clip: bool
) -> SolvedSite:
    one = next(iter(linears.values()))
    w = torch.cat([linear.weight for linear in linears.values()])
    missing = moments.missing(w)
    target = w if missing is None else drift_target(w, moments.hessian, missing)
    # Feedback spreads errors over all columns, so that the columns' own weights make as good a grid as whole blocks do.
    importance = moments.hessian.diagonal()
    ranges: rtn.Clip = "mse" if clip else "minmax"
    rounded = rtn.solve(target, one.scheme, one.scale_dtype, clip=ranges, importance=importance)
    result, warnings = _feed_back(rounded, target, moments, effort, next(iter(linears)))
    solved: dict[str, SolvedLinear] = {}
    simple: dict[str, SolvedLinear] = {}
    plain: dict[str, float] = {}
    begin = 0
    for module, linear in linears.items():
        end = begin + linear.weight.shape[0]
        judge = _Judge(linear, target[begin:end], moments.hessian)
        solved[module] = judge(result if len(linears) == 1 else result.rows(begin, end))
        plain[module] = judge.relative(linear.plain)
        if _error(solved[module]) > plain[module] or shares_scale(linear.scheme):
            simple[module] = judge(_rounded(linear))
        begin = end
    return SolvedSite(_better(linears, solved, simple, plain), plain, warnings)


def _better(
    linears: Mapping[str, FloatLinear],
    solved: Mapping[str, SolvedLinear],
    simple: Mapping[str, SolvedLinear],
    plain: Mapping[str, float],
) -> dict[str, SolvedLinear]:
    """Plain rounding where feedback lost more than it; of linears that share a scale for all or for none."""
    if shares_scale(next(iter(linears.values())).scheme):
        worse = [sum(_error(found[m]) > plain[m] for m in linears) for found in (solved, simple)]
        return dict(simple if worse[1] < worse[0] else solved)
    return {m: min(solved[m], simple.get(m, solved[m]), key=_error) for m in linears}


def _rounded(linear: FloatLinear) -> QuantizedTensor:
    return rtn.solve(linear.weight, linear.scheme, linear.scale_dtype, clip="minmax", amax=linear.amax)


def _error(solved: SolvedLinear) -> float:
    assert solved.error is not None
    return solved.error


def _feed_back(
    rounded: QuantizedTensor, target: Tensor, moments: SiteMoments, effort: EffortPlan, module: str
) -> tuple[QuantizedTensor, tuple[str, ...]]:
    h = moments.hessian
    factor = factorize(h, DAMPING)
    if factor is None:
        low, high = (float(end) for end in h.diagonal().aminmax())
        return rounded, (
            f"{module}: Hessian of {moments.evidence} tokens cannot be factorized, diagonal {low:.2g} to {high:.2g}; "
            "rounded without error feedback",
        )
    warnings: tuple[str, ...] = ()
    if factor.damping > DAMPING:
        warnings += (f"{module}: singular Hessian ({moments.evidence} tokens), damping raised to {factor.damping:g}",)
    if factor.broken_pivots:
        warnings += (f"{module}: {factor.broken_pivots} columns passed no error on, their pivots left float32",)
    weight = feed_back(rounded, target, factor)
    for _ in range(effort.rounds):
        weight = refit_scales(descend_codes(weight, target, h), target, h)
    return weight, warnings


class _Judge:
    """Errors of one linear: its distance to the aim, relative to the energy of its outputs."""

    def __init__(self, linear: FloatLinear, aim: Tensor, hessian: Tensor) -> None:
        self._aim, self._hessian = aim, hessian
        energy = output_error(linear.weight, hessian)
        self._scale = 1 / energy if energy > 0 else 0.0

    def __call__(self, weight: QuantizedTensor) -> SolvedLinear:
        return SolvedLinear(weight, self.relative(weight.dequantize()))

    def relative(self, weight: Float[Tensor, "out in"]) -> float:
        return output_error(weight - self._aim, self._hessian) * self._scale
