"""Activation-aware scaling: the factor per input channel under which rounding hurts a site's outputs least.

All linears of a site take W s while their producer makes x / s (fold.py), so quantizing moves the outputs by

    E = Q(W s) / s - W,    tr(E H Eᵀ)    with H = sum of xᵀx

which needs no layer to be run again. Candidates for s, per channel, with a = mean |x| and m = max |W| of the
channel:

    a^r,  a^r / m^(1-r)      the activation-aware rule (AWQ, Lin et al. 2023, arXiv:2306.00978), r on a grid
    balanced^r               see balance.py
    1                        always

Candidates are ranked on some rows of every linear with a short search for the grid, and the winner must beat
1 on all rows with the full one. Factors are float32, brought to sqrt(max * min) = 1. Channels that never
carry anything or that no weight reads keep the factor 1, and channels that share a producer row share their
factor.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cann_llm_quant.quant.balance import balanced_log_factor, class_mean
from cann_llm_quant.quant.error import output_error
from cann_llm_quant.quant.fold import rescale_hessian
from cann_llm_quant.quant.grid import minmax_grid, minmax_scale, quantize_codes, scale_fits, search_grid
from cann_llm_quant.quant.rtn import Clip
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme

_BALANCE_ROWS = 1024
_BALANCE_POWERS = (1.0, 0.75, 0.5)


@dataclass(frozen=True)
class AwqResult:
    """The chosen factor and what it gains.

    `error` and `identity_error` are `tr(E H Eᵀ)` over all rows of the site's linears, with the factor and
    without; `rule` and `ratio` say which candidate it is; `reason` is not empty when the factor is 1 for want
    of a candidate.
    """

    factor: Float[Tensor, "in"]
    identity_error: float
    error: float
    rule: str
    ratio: float
    reason: str


@dataclass(frozen=True)
class _Candidate:
    rule: str
    ratio: float
    factor: Tensor


def search_scale(
    weights: Sequence[Float[Tensor, "_ in"]],
    hessian: Float[Tensor, "in in"],
    mean_abs: Float[Tensor, "in"],
    schemes: Scheme | Sequence[Scheme],
    scale_dtype: torch.dtype,
    *,
    tie: Int[Tensor, "in"] | None = None,
    steps: int = 6,
    clip: Clip = "mse",
    max_rows: int = 512,
    storage: torch.dtype = torch.bfloat16,
    producer_max: Float[Tensor, "in"] | None = None,
) -> AwqResult:
    """Find the factor for one site; `schemes` is one for all linears or one for each.

    `tie` gives each channel a class whose members share the factor. `producer_max` is the largest magnitude
    that the producer stores for each channel. A candidate must keep folded weights, producer and scales
    inside `storage` and `scale_dtype` (no overflow, nothing below the smallest normal number that was above
    it, scales within 1 %). Raises UsageError when a group size does not divide the columns.
    """
    site = _Site(
        [w.to(torch.float32) for w in weights],
        hessian,
        [schemes] * len(weights) if isinstance(schemes, Scheme) else list(schemes),
        scale_dtype,
        storage,
        producer_max,
    )
    identity = _Candidate("identity", 0.0, torch.ones_like(mean_abs, dtype=torch.float32))
    identity_error = site.error(identity.factor, clip)
    usable = [c for c in _candidates(site, mean_abs, tie, steps) if site.holds(c.factor)]
    if not usable:
        reason = f"no candidate stays in range of {storage} weights and {scale_dtype} scales"
        return AwqResult(identity.factor, identity_error, identity_error, "identity", 0.0, reason)
    best = _ranked(site.strided(max_rows), _ranked(site.strided(max_rows // 4), usable, clip)[:4], clip)[0]
    error = site.error(best.factor, clip)
    # Written so that NaN, too, leaves the identity in place.
    if not error < identity_error:
        return AwqResult(identity.factor, identity_error, identity_error, "identity", 0.0, "")
    return AwqResult(best.factor, identity_error, error, best.rule, best.ratio, "")


def _ranked(some: "_Site", candidates: Sequence[_Candidate], clip: Clip) -> list[_Candidate]:
    """Best first, by a coarse search on the rows of `some`; a factor that gives NaN comes last."""
    errors = [some.error(candidate.factor, clip, coarse=True) for candidate in candidates]
    order = sorted(range(len(errors)), key=lambda i: (math.isnan(errors[i]), errors[i], i))
    return [candidates[i] for i in order]


@dataclass(frozen=True)
class _Site:
    """The linears of one site with everything that judges a factor."""

    weights: list[Tensor]
    hessian: Tensor
    schemes: list[Scheme]
    scale_dtype: torch.dtype
    storage: torch.dtype
    producer_max: Tensor | None

    def strided(self, max_rows: int) -> "_Site":
        """At most `max_rows` rows of every linear, evenly spread."""
        some = [w[:: -(-w.shape[0] // max(1, max_rows))] for w in self.weights]
        return _Site(some, self.hessian, self.schemes, self.scale_dtype, self.storage, self.producer_max)

    def column_max(self) -> Tensor:
        return torch.stack([w.abs().amax(0) for w in self.weights]).amax(0)

    def error(self, factor: Tensor, clip: Clip, *, coarse: bool = False) -> float:
        """`tr(E H Eᵀ)` with the grid of the final quantization, or a `coarse` one that suffices to rank factors."""
        hessian = rescale_hessian(self.hessian, factor)
        total = 0.0
        for w, scheme in zip(self.weights, self.schemes, strict=True):
            folded = w * factor
            grid = self._grid(folded, scheme, hessian, clip, coarse)
            codes = quantize_codes(folded, *grid, scheme)
            delta = QuantizedTensor(codes, *grid, scheme).dequantize().sub_(folded)
            total += output_error(delta, hessian)
        return total

    def _grid(
        self, folded: Tensor, scheme: Scheme, hessian: Tensor, clip: Clip, coarse: bool
    ) -> tuple[Tensor, Tensor | None]:
        if clip == "minmax":
            return minmax_grid(folded, scheme, self.scale_dtype)
        if coarse:
            return search_grid(folded, scheme, self.scale_dtype, hessian=hessian, steps=5, shrink_to=0.6, refine=())
        return search_grid(folded, scheme, self.scale_dtype, hessian=hessian)

    def holds(self, factor: Tensor) -> bool:
        """Whether folding this factor leaves weights, producer and scales representable."""
        # Folding computes in float32, so that nothing wider can be stored either.
        limits = torch.finfo(torch.float32 if self.storage == torch.float64 else self.storage)
        if not bool(torch.isfinite(factor).all()) or not bool((factor > 0).all()):
            return False
        stored = [self.column_max() * factor]
        if self.producer_max is not None:
            stored.append(self.producer_max.to(torch.float32) / factor)
        before = [self.column_max(), self.producer_max]
        for after, original in zip(stored, before, strict=False):
            if not bool((after <= limits.max).all()):
                return False
            if original is not None and bool(((after < limits.tiny) & (original >= limits.tiny)).any()):
                return False
        pairs = zip(self.weights, self.schemes, strict=True)
        return all(scale_fits(minmax_scale(w * factor, scheme), self.scale_dtype) for w, scheme in pairs)


def _candidates(site: _Site, mean_abs: Tensor, tie: Tensor | None, steps: int) -> Iterator[_Candidate]:
    a, m = mean_abs.to(torch.float32), site.column_max()
    tiny = torch.finfo(torch.float32).tiny
    live = (a > tiny) & (m > tiny)
    classes = torch.arange(a.shape[0], device=a.device) if tie is None else tie
    log_a, log_m = (torch.where(live, x.clamp(min=tiny).log(), 0.0) for x in (a, m))
    for i in range(1, steps + 1):
        r = i / steps
        yield _Candidate("activation", r, _factor(r * log_a, live, classes))
        yield _Candidate("activation/weight", r, _factor(r * log_a - (1 - r) * log_m, live, classes))
    start = class_mean(0.5 * (log_a - log_m), live, classes)
    some = site.strided(_BALANCE_ROWS)
    widths = [scheme.columns_per_scale(a.shape[0]) for scheme in site.schemes]
    balanced = balanced_log_factor(some.weights, widths, site.hessian.diagonal(), start, live, classes)
    for r in _BALANCE_POWERS:
        yield _Candidate("balanced", r, _factor(r * balanced, live, classes))


def _factor(log_factor: Tensor, live: Tensor, classes: Tensor) -> Tensor:
    """Tie by the geometric mean, bring sqrt(max * min) to 1, leave classes without a live channel at 1."""
    tied = class_mean(log_factor, live, classes)
    alive = class_mean(live.to(torch.float32), torch.ones_like(live), classes) > 0
    if not bool(alive.any()):
        return torch.ones_like(tied)
    low, high = tied[alive].aminmax()
    return torch.where(alive, tied - (low + high) / 2, 0.0).exp()
