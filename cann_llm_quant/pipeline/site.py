"""One site: its linears solved together by error feedback, each judged against plain rounding.

Errors are relative to the energy of the linear's outputs, `tr((Q - T) H (Q - T)ᵀ) / tr(W H Wᵀ)` with T what the linear
should compute (see quant/drift.py; W itself without a float partner). Plain rounding is min-max rounding of the
source's weight, held against the same T.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

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

    `weight` is folded; `plain_error` is what min-max rounding of the source's weight adds to it, in the same (folded)
    coordinates.
    """

    weight: Float[Tensor, "out in"]
    plain_error: Float[Tensor, "out in"]
    scheme: Scheme
    scale_dtype: torch.dtype


@dataclass(frozen=True)
class SolvedSite:
    """Solved linears by module, what plain rounding would have cost each, and sentences for the user."""

    linears: dict[str, SolvedLinear]
    plain: dict[str, float]
    warnings: tuple[str, ...]


def solve_site(linears: Mapping[str, FloatLinear], moments: SiteMoments, effort: EffortPlan) -> SolvedSite:
    """Solve the linears (by module) that read one site; those of equal scheme share one factorization and one loop."""
    stacks: dict[object, list[str]] = {}
    for module, linear in linears.items():
        # Tiles of rows must not reach over two matrices; one scale for the matrix must, since runtimes fuse them (C24).
        alone = linear.scheme.strategy == "tile"
        stacks.setdefault(module if alone else (linear.scheme, linear.scale_dtype), []).append(module)
    solved: dict[str, SolvedLinear] = {}
    plain: dict[str, float] = {}
    warnings: tuple[str, ...] = ()
    for modules in stacks.values():
        found = _solve_stack({module: linears[module] for module in modules}, moments, effort)
        solved |= found.linears
        plain |= found.plain
        warnings += found.warnings
    return SolvedSite({module: solved[module] for module in linears}, plain, warnings)


def _solve_stack(linears: Mapping[str, FloatLinear], moments: SiteMoments, effort: EffortPlan) -> SolvedSite:
    one = next(iter(linears.values()))
    w = torch.cat([linear.weight for linear in linears.values()])
    missing = moments.missing(w)
    target = w if missing is None else drift_target(w, moments.hessian, missing)
    # Feedback spreads errors over all columns, so that the columns' own weights make as good a grid as whole blocks do.
    importance = moments.hessian.diagonal()
    rounded = rtn.solve(target, one.scheme, one.scale_dtype, clip="mse", importance=importance)
    result, warnings = _feed_back(rounded, target, moments, effort, next(iter(linears)))
    solved: dict[str, SolvedLinear] = {}
    plain: dict[str, float] = {}
    begin = 0
    for module, linear in linears.items():
        end = begin + linear.weight.shape[0]
        aim = target[begin:end]
        weight = result if len(linears) == 1 else _rows(result, begin, end)
        solved[module], plain[module] = _judged(linear, weight, aim, moments.hessian)
        begin = end
    return SolvedSite(solved, plain, warnings)


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


def _judged(linear: FloatLinear, weight: QuantizedTensor, aim: Tensor, hessian: Tensor) -> tuple[SolvedLinear, float]:
    """The linear with its relative error and plain rounding's; rounded plainly where that is closer to the aim."""
    energy = output_error(linear.weight, hessian)
    scale = 1 / energy if energy > 0 else 0.0
    lost = output_error(weight.dequantize().sub_(aim), hessian)
    plain_lost = output_error(linear.weight + linear.plain_error - aim, hessian)
    if lost > plain_lost and not shares_scale(linear.scheme):
        simple = rtn.solve(linear.weight, linear.scheme, linear.scale_dtype, clip="minmax")
        simple_lost = output_error(simple.dequantize().sub_(aim), hessian)
        if simple_lost < lost:
            weight, lost = simple, simple_lost
    return SolvedLinear(weight, lost * scale), plain_lost * scale


def _rows(weight: QuantizedTensor, begin: int, end: int) -> QuantizedTensor:
    zeros = weight.zero_point
    return replace(
        weight,
        codes=weight.codes[begin:end],
        scale=weight.scale if weight.scale.shape[0] == 1 else weight.scale[begin:end],
        zero_point=None if zeros is None else zeros[begin:end],
    )
