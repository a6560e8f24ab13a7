"""Activation-aware scaling (AWQ, Lin et al. 2023, arXiv:2306.00978): channels that carry much get a finer grid.

Candidates for the factor s of a site, per channel, with a = mean |x| and m = max |W| of the channel:

    a^r,  a^r / m^(1-r)      the paper's rule, r on a grid
    balanced^r               see balance.py
    1                        always

They are judged by what quantizing then costs, see scale_search.py. Factors are float32, brought to sqrt(max * min) = 1.
Channels that never carry anything or that no weight reads keep the factor 1, and channels that share a producer row
share their factor. The efforts `fast` and `balanced` try fewer: nearly always `balanced` wins, and a small power of the
activation where it does not (36 sites of a model with 135M parameters).
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cann_llm_quant.quant.balance import RangeTerm, balanced_log_factor, class_mean
from cann_llm_quant.quant.number_formats import INT_BITS
from cann_llm_quant.quant.scale_search import Candidate, Channels, ScaleResult, ScaleSite, SearchEffort, best_scale

_BALANCE_ROWS = 1024
_BALANCE_POWERS = (1.0, 0.75, 0.5)
_POWERS = {"fast": (1 / 3,), "balanced": (1 / 6, 1 / 3, 1 / 2)}


def search_scale(
    site: ScaleSite,
    mean_abs: Float[Tensor, "in"],
    *,
    tie: Int[Tensor, "in"] | None = None,
    effort: SearchEffort = "fast",
    steps: int = 6,
    max_rows: int = 512,
) -> ScaleResult:
    """Find the factor for one site.

    `tie` gives each channel a class whose members share the factor; `steps` and `max_rows` are those of the effort
    `best`. Raises UsageError when a group size does not divide the columns.
    """
    channels = Channels.of(mean_abs.to(torch.float32), site.column_max(), tie)
    return best_scale(site, list(awq_candidates(site, channels, mean_abs, effort, steps)), effort, max_rows)


def awq_candidates(
    site: ScaleSite, channels: Channels, mean_abs: Float[Tensor, "in"], effort: SearchEffort, steps: int = 6
) -> Iterator[Candidate]:
    """Candidates of the module's rules; `steps` powers of the activation under the effort `best`."""
    log_a, log_m = channels.log(mean_abs), channels.log(site.column_max())
    if effort == "best":
        for i in range(1, steps + 1):
            r = i / steps
            yield Candidate("activation", r, channels.factor(r * log_a))
            yield Candidate("activation/weight", r, channels.factor(r * log_a - (1 - r) * log_m))
    else:
        for r in _POWERS[effort]:
            yield Candidate("activation", r, channels.factor(r * log_a))
    start = class_mean(0.5 * (log_a - log_m), channels.live, channels.classes)
    yield from balanced_candidates("balanced", weight_terms(site), channels, start)


def balanced_candidates(
    rule: str, terms: Sequence[RangeTerm], channels: Channels, start: Float[Tensor, "in"]
) -> Iterator[Candidate]:
    """Powers of the factor that balance.py finds from the logarithm `start`."""
    balanced = balanced_log_factor(terms, start, channels.live, channels.classes)
    for r in _BALANCE_POWERS:
        yield Candidate(rule, r, channels.factor(r * balanced))


def weight_terms(site: ScaleSite) -> list[RangeTerm]:
    """What rounding the weights costs, for balance.py; float8 weights, whose errors follow no range, cost nothing."""
    some = site.strided(_BALANCE_ROWS)
    return [
        RangeTerm(
            w, scheme.columns_per_scale(w.shape[1]), site.hessian.diagonal(), weight / steps_of(scheme.dtype) ** 2
        )
        for w, scheme, weight in zip(some.weights, some.schemes, some.row_weights, strict=True)
        if steps_of(scheme.dtype)
    ]


def steps_of(dtype: str) -> int:
    """Steps from one end of a range to the other; 0 for float8, whose steps grow with the number."""
    if dtype in INT_BITS:
        return (1 << INT_BITS[dtype]) - 1
    return 12 if dtype == "fp4_e2m1" else 0
