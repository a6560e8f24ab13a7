"""What rounding a linear would cost, from its Fisher statistics: the estimate of `calibrate/backward.py` applied.

    damage(D) = 1/(2 T) sum_r s_r (D H_g Dᵀ)_rr / sum_r s_r      nats per token of the text, T tokens in all

D is the change that the solver really makes. `feedback` rounds with error feedback (gptq), as the calibrated methods
do, on a grid searched under the diagonal of H; `rounding` takes each weight to the nearest code of such a grid. Solvers
differ in how much they save on each kind of linear (q/k/v gain most), so plain rounding would misjudge the kinds.

The same few tokens serve to solve and to judge, and feedback fits itself to them: with the usual damping of 0.01, 4096
tokens of SmolLM2 show 1.3 (q, gate) to 2.3 times (down) more error on other text. Damping by the whole mean diagonal
leaves 1.1 to 1.4, at about the error that a run on many tokens ends with.

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
from cann_llm_quant.models.arch import LinearSpec
from cann_llm_quant.pipeline.units import Choice, Unit
from cann_llm_quant.quant.gptq import Factor, factorize, feed_back
from cann_llm_quant.quant.grid import choose_scale_dtype, quantize_codes, search_grid
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme
from cann_llm_quant.quant.shrinkage import shrink_hessian

Solver = Literal["feedback", "rounding"]
DAMPING = 1.0
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
    """Estimated KL in nats per token of each choice, by name; `weights` by stored name, `fisher` by role.

    Linears that no token reached add nothing.
    """
    damages = {choice.name: 0.0 for choice in choices}
    for specs in _sharing_an_input(unit, fisher):
        seen = fisher[specs[0].role]
        hessian = shrink_hessian(seen.hessian, seen.tokens)
        factor = factorize(hessian, DAMPING) if solver == "feedback" else None
        # Rows are solved apart from one another, so linears of one input are solved as one matrix.
        w = torch.cat([weights[f"{spec.module}.weight"].to(torch.float32) for spec in specs])
        rows = [spec.out_features for spec in specs]
        grams = [shrink_hessian(fisher[spec.role].weighted, fisher[spec.role].tokens) for spec in specs]
        for choice in choices:
            if choice.scheme is None:
                continue
            delta = solve(w, choice.scheme, storage, hessian.diagonal(), factor).sub_(w)
            for spec, part, weighted in zip(specs, delta.split_with_sizes(rows), grams, strict=True):
                damages[choice.name] += expected_divergence(part, weighted, fisher[spec.role].squares) / text_tokens
    return damages


def _sharing_an_input(unit: Unit, fisher: Mapping[str, LinearFisher]) -> list[list[LinearSpec]]:
    """The unit's linears that tokens reached, together where they read the same input (one Gram matrix object)."""
    groups: dict[int, list[LinearSpec]] = {}
    for spec in unit.linears:
        if spec.role in fisher:
            groups.setdefault(id(fisher[spec.role].hessian), []).append(spec)
    return list(groups.values())


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
    rounded = QuantizedTensor(quantize_codes(w, scale, zero_point, scheme), scale, zero_point, scheme)
    return (rounded if factor is None else feed_back(rounded, w, factor)).dequantize()


def expected_divergence(
    delta: Float[Tensor, "out in"], weighted: Float[Tensor, "in in"], squares: Float[Tensor, " out"]
) -> float:
    """KL in nats, summed over the text's tokens, of changing a linear by `delta`; see the module's formula."""
    total = float(squares.sum(dtype=torch.float64))
    if total <= 0:
        return 0.0
    rows = (delta @ weighted).mul_(delta).sum(1, dtype=torch.float64)
    return 0.5 * float((rows * squares).sum()) / total
