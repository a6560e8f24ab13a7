"""What rounding a linear would cost, from its Fisher statistics: the estimate of `calibrate/backward.py` applied.

    damage(D) = 1/(2 T) sum_r s_r (D H_g Dᵀ)_rr / sum_r s_r      nats per token of the text, T tokens in all

D is the change that the solver really makes. `feedback` rounds with error feedback (gptq), as the calibrated methods
do, on a grid searched under the diagonal of H; `rounding` takes each weight to the nearest code of such a grid. Solvers
differ in how much they save on each kind of linear (q/k/v gain most), so plain rounding would misjudge the kinds.

The estimate has a floor, taken from the Hessian: H_g is shrunk toward its diagonal as `quant/shrinkage.py` shrinks H.
Errors that a solver moved into directions which the few tokens of a seldom used expert did not show count as at least
that share of the trace, instead of as nothing.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.calibrate.backward import LinearFisher
from cann_llm_quant.pipeline.units import Choice, Unit
from cann_llm_quant.quant.gptq import Factor, factorize, feedback_codes
from cann_llm_quant.quant.grid import choose_scale_dtype, quantize_codes, search_grid
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme
from cann_llm_quant.quant.shrinkage import shrink_hessian

Solver = Literal["feedback", "rounding"]
_GRID_STEPS = 8


def unit_damages(
    unit: Unit,
    choices: Iterable[Choice],
    weights: Mapping[str, Tensor],
    fisher: Mapping[str, LinearFisher],
    solver: Solver,
    storage: torch.dtype,
    text_tokens: int,
) -> dict[str, float]:
    """Estimated KL in nats per token of each choice, by name; `weights` by module, `fisher` by role.

    Linears that no token reached add nothing.
    """
    damages = {choice.name: 0.0 for choice in choices}
    for spec in unit.linears:
        seen = fisher.get(spec.role)
        if seen is None:
            continue
        w = weights[f"{spec.module}.weight"].to(torch.float32)
        hessian = shrink_hessian(seen.hessian, seen.tokens)
        weighted = shrink_hessian(seen.weighted, seen.tokens)
        factor = factorize(hessian) if solver == "feedback" else None
        for choice in choices:
            if choice.scheme is not None:
                solved = solve(w, choice.scheme, storage, hessian.diagonal(), factor)
                damages[choice.name] += expected_divergence(solved.sub_(w), weighted, seen.squares) / text_tokens
    return damages


def solve(
    w: Float[Tensor, "out in"],
    scheme: Scheme,
    storage: torch.dtype,
    importance: Float[Tensor, " in"],
    factor: Factor | None,
) -> Float[Tensor, "out in"]:
    """The rounded matrix in float32; `factor` None rounds to the nearest code, else errors are fed back."""
    scale_dtype = choose_scale_dtype(w, scheme, storage)
    scale, zero_point = search_grid(w, scheme, scale_dtype, importance=importance, steps=_GRID_STEPS, refine=())
    if factor is None:
        codes = quantize_codes(w, scale, zero_point, scheme)
    else:
        codes = feedback_codes(w, factor, scale, zero_point, scheme)
    return QuantizedTensor(codes, scale, zero_point, scheme).dequantize()


def expected_divergence(
    delta: Float[Tensor, "out in"], weighted: Float[Tensor, "in in"], squares: Float[Tensor, " out"]
) -> float:
    """KL in nats, summed over the text's tokens, of changing a linear by `delta`; see the module's formula."""
    total = float(squares.sum(dtype=torch.float64))
    if total <= 0:
        return 0.0
    rows = (delta @ weighted).mul_(delta).sum(1, dtype=torch.float64)
    return 0.5 * float((rows * squares).sum()) / total
