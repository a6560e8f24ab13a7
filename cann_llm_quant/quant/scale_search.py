"""The factor per input channel under which quantizing a site moves its outputs least: how candidates are judged.

All linears of a site take W s while their producer makes x / s (fold.py). Quantizing then moves the outputs by

    E = Q(W s) / s - W        tr(E H Eᵀ)                         with H = sum of xᵀx over all tokens
    D = Q(x / s) - x / s      sum over sample rows of |D (W s)ᵀ|² * tokens / rows,   where inputs are quantized too

so no layer is run again. The product of both errors is left out, and their correlation, which is 0 as far as rounding
errors are independent. Candidates come from the methods (awq.py, smooth.py); 1 is always among them.

`effort` says how carefully they are judged. `best` ranks them on some rows of every linear with a short search for the
grid, ranks the first four again on more rows, and the winner must beat 1 on all rows with the full search. `fast` and
`balanced` rank on 256 or 512 rows with grids that weigh columns one by one, and let 1 and the first two compete on a
quarter of these rows under the full search. Both count errors within blocks of columns only: rounding errors of
different groups are nearly independent, so that mostly noise is left out. Their results' errors are estimates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cann_llm_quant.quant.activation_ranges import RangeMethod, static_range, stored_range
from cann_llm_quant.quant.activations import InputRange, is_nv, needs_range, quantize_input
from cann_llm_quant.quant.balance import class_mean
from cann_llm_quant.quant.error import block_output_error, output_error
from cann_llm_quant.quant.fold import rescale_hessian
from cann_llm_quant.quant.grid import minmax_grid, minmax_scale, quantize_codes, scale_fits, search_grid
from cann_llm_quant.quant.number_formats import FLOAT_MAX
from cann_llm_quant.quant.rtn import Clip
from cann_llm_quant.quant.scheme import ActivationScheme, QuantizedTensor, Scheme
from cann_llm_quant.quant.value_sketch import ValueSketch, bucket_counts

SearchEffort = Literal["fast", "balanced", "best"]
Judge = Literal["quick", "blocks", "coarse", "full"]

_RANKING_ROWS = {"fast": 256, "balanced": 512}
_FINALISTS = 4
_QUICK_FINALISTS = 2


@dataclass(frozen=True)
class Candidate:
    """A factor, the rule that made it and that rule's exponent."""

    rule: str
    ratio: float
    factor: Float[Tensor, "in"]


@dataclass(frozen=True)
class ScaleResult:
    """The chosen factor and what it gains.

    `error` and `identity_error` are the module's sums with the factor and without, over all rows of the site's linears
    (from some rows, scaled up, unless the effort was `best`); `rule` and `ratio` say which candidate it is; `reason`
    is not empty when the factor is 1 for want of a candidate.
    """

    factor: Float[Tensor, "in"]
    identity_error: float
    error: float
    rule: str
    ratio: float
    reason: str


@dataclass(frozen=True)
class SiteInputs:
    """A site's input as far as its own quantization is concerned.

    `sample` are some of its rows, `amax` the largest magnitudes and `tokens` the count of all. Ranges that are stored
    are estimated from these by `method`; `moving`, which follows windows, is taken for `minmax`.
    """

    scheme: ActivationScheme
    sample: Float[Tensor, "rows in"]
    amax: Float[Tensor, "in"]
    tokens: int
    method: RangeMethod = "minmax"
    percentile: float = 99.9

    def errors(self, factor: Float[Tensor, "in"]) -> Float[Tensor, "rows in"]:
        """D of the module's formula, brought to what all tokens sum to."""
        x = self.sample.to(torch.float32) / factor
        stored = self._stored_range(x, factor) if needs_range(self.scheme) else None
        moved = quantize_input(x, self.scheme, stored).dequantize().sub_(x)
        return moved.mul_(math.sqrt(self.tokens / max(1, x.shape[0])))

    def relative_error(self, w: Float[Tensor, "out in"]) -> float:
        """`|D wᵀ|²` relative to `|x wᵀ|²`, for inputs as they are: what quantizing them costs a linear's outputs."""
        moved = self.errors(torch.ones_like(self.amax))
        energy = float((self.sample.to(torch.float32) @ w.T).square().sum(dtype=torch.float64))
        lost = float((moved @ w.T).square().sum(dtype=torch.float64))
        return lost / energy * self.sample.shape[0] / max(1, self.tokens) if energy > 0 else 0.0

    def _stored_range(self, x: Tensor, factor: Tensor) -> InputRange:
        """What calibration would store; of an asymmetric range only the sample's ends are known."""
        high = float((self.amax / factor).amax())
        if is_nv(self.scheme):
            whole = FLOAT_MAX["fp8_e4m3"] * FLOAT_MAX["fp4_e2m1"]
            return InputRange(torch.tensor([whole / max(high, torch.finfo(torch.float32).tiny)], device=x.device))
        if self.method in ("percentile", "mse", "entropy") and x.numel():
            low = -high if self.scheme.symmetric else min(0.0, float(x.amin()))
            sketch = ValueSketch(bucket_counts(x).cpu(), low, high, low, high, self.tokens)
            return static_range(sketch, self.scheme, self.method, percentile=self.percentile)
        if self.scheme.symmetric or not x.numel():
            return stored_range(-high, high, self.scheme)
        return stored_range(min(0.0, float(x.amin())), max(0.0, float(x.amax())), self.scheme)


def _strided(rows: Tensor, most: int) -> Tensor:
    return rows[:: max(1, -(-rows.shape[0] // max(1, most)))]


@dataclass(frozen=True)
class ScaleSite:
    """The linears of one site with everything that judges a factor.

    `weights` are float32, or of a strided site some of their rows, each of which stands for `row_weights` of them.
    `producer_max` is the largest magnitude that the producer stores for each channel. `inputs` is None where inputs
    stay in float.
    """

    weights: list[Float[Tensor, "_ in"]]
    hessian: Float[Tensor, "in in"]
    schemes: list[Scheme]
    scale_dtype: torch.dtype
    storage: torch.dtype = torch.bfloat16
    clip: Clip = "mse"
    producer_max: Float[Tensor, "in"] | None = None
    inputs: SiteInputs | None = None
    row_weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.row_weights:
            object.__setattr__(self, "row_weights", (1.0,) * len(self.weights))

    def strided(self, max_rows: int) -> "ScaleSite":
        """At most `max_rows` rows of every linear and of the input's sample, evenly spread."""
        some = [_strided(w, max_rows) for w in self.weights]
        ratios = tuple(w.shape[0] / s.shape[0] for w, s in zip(self.weights, some, strict=True))
        inputs = None if self.inputs is None else replace(self.inputs, sample=_strided(self.inputs.sample, max_rows))
        return replace(self, weights=some, row_weights=ratios, inputs=inputs)

    def column_max(self) -> Float[Tensor, "in"]:
        """Largest magnitude of every column over all linears."""
        return torch.stack([w.abs().amax(0) for w in self.weights]).amax(0)

    def error(self, factor: Float[Tensor, "in"], judge: Judge) -> float:
        """What the site's outputs move by, squared and summed over tokens: the module's two terms.

        `full` is exact with the grid of the final quantization, `blocks` leaves out what blocks have in common,
        `coarse` searches a shorter grid, `quick` both.
        """
        hessian = None if judge == "quick" else rescale_hessian(self.hessian, factor)
        moved = None if self.inputs is None else self.inputs.errors(factor)
        shared = float((self.column_max() * factor).amax()) if self._shares_scale() else None
        total = 0.0
        for w, scheme, weight in zip(self.weights, self.schemes, self.row_weights, strict=True):
            folded = w * factor
            delta = self._rounding(folded, scheme, factor, hessian, judge, shared)
            if judge in ("quick", "blocks"):
                loss = block_output_error(delta.div_(factor), self.hessian, scheme.columns_per_scale(w.shape[1]))
            else:
                loss = output_error(delta.div_(factor), self.hessian)
            if moved is not None:
                loss += float((moved @ folded.T).square_().sum(dtype=torch.float64))
            total += weight * loss
        return total

    def _shares_scale(self) -> bool:
        return any(scheme.strategy == "tensor" or scheme.scale_type == "e4m3" for scheme in self.schemes)

    def _rounding(
        self, folded: Tensor, scheme: Scheme, factor: Tensor, hessian: Tensor | None, judge: Judge, amax: float | None
    ) -> Tensor:
        """`Q(W s) - W s` on the grid of the final quantization, or on a shorter search's that suffices to rank."""
        if self.clip == "minmax":
            grid = minmax_grid(folded, scheme, self.scale_dtype, amax=amax)
        elif judge in ("full", "blocks"):
            grid = search_grid(folded, scheme, self.scale_dtype, hessian=hessian, amax=amax)
        elif judge == "coarse":
            grid = search_grid(
                folded, scheme, self.scale_dtype, hessian=hessian, amax=amax, steps=5, shrink_to=0.6, refine=()
            )
        else:
            columns = self.hessian.diagonal() / factor.square()
            grid = search_grid(
                folded, scheme, self.scale_dtype, importance=columns, amax=amax, steps=3, shrink_to=0.6, refine=()
            )
        codes = quantize_codes(folded, *grid, scheme)
        return QuantizedTensor(codes, *grid, scheme).dequantize().sub_(folded)

    def holds(self, factor: Float[Tensor, "in"]) -> bool:
        """Whether folding this factor leaves weights, producer and scales representable.

        Nothing overflows `storage`, nothing sinks below its smallest normal number that was above it, and scales keep
        within 1 % in `scale_dtype`.
        """
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


def best_scale(
    site: ScaleSite, candidates: Sequence[Candidate], effort: SearchEffort, max_rows: int = 512
) -> ScaleResult:
    """The best of the candidates and 1; those that `ScaleSite.holds` rejects do not take part.

    `max_rows` of every linear rank the finalists of the effort `best`.
    """
    one = Candidate("identity", 0.0, torch.ones_like(site.hessian[0], dtype=torch.float32))
    usable = [candidate for candidate in candidates if site.holds(candidate.factor)]
    judge: Judge
    if effort == "best":
        deciding, judge = site, "full"
        for rows, count in ((max_rows // 4, _FINALISTS), (max_rows, 1)):
            usable = ranked(site.strided(rows), usable, "coarse")[:count]
    else:
        rows = _RANKING_ROWS[effort]
        deciding, judge = site.strided(rows // 4), "blocks"
        usable = ranked(site.strided(rows), usable, "quick")[:_QUICK_FINALISTS]
    identity_error = deciding.error(one.factor, judge)
    if not usable:
        reason = f"no candidate stays in range of {site.storage} weights and {site.scale_dtype} scales"
        return ScaleResult(one.factor, identity_error, identity_error, "identity", 0.0, reason)
    errors = [deciding.error(candidate.factor, judge) for candidate in usable]
    best = min(range(len(usable)), key=lambda i: (math.isnan(errors[i]), errors[i], i))
    # Written so that NaN, too, leaves the identity in place.
    if not errors[best] < identity_error:
        return ScaleResult(one.factor, identity_error, identity_error, "identity", 0.0, "")
    return ScaleResult(usable[best].factor, identity_error, errors[best], usable[best].rule, usable[best].ratio, "")


def ranked(some: ScaleSite, candidates: Sequence[Candidate], judge: Judge) -> list[Candidate]:
    """Best first, by the rows of `some`; a factor that gives NaN comes last."""
    errors = [some.error(candidate.factor, judge) for candidate in candidates]
    order = sorted(range(len(errors)), key=lambda i: (math.isnan(errors[i]), errors[i], i))
    return [candidates[i] for i in order]


@dataclass(frozen=True)
class Channels:
    """Which channels a factor may move, and which move together.

    `live` ones carry something and are read by some weight; those of one class share their factor.
    """

    live: Bool[Tensor, "in"]
    classes: Int[Tensor, "in"]

    @classmethod
    def of(
        cls, magnitude: Float[Tensor, "in"], column_max: Float[Tensor, "in"], tie: Int[Tensor, "in"] | None
    ) -> "Channels":
        """From the input's magnitudes and the weights'; `tie` gives each channel its class."""
        tiny = torch.finfo(torch.float32).tiny
        alone = torch.arange(magnitude.shape[0], device=magnitude.device)
        return cls((magnitude > tiny) & (column_max > tiny), alone if tie is None else tie)

    def log(self, magnitude: Float[Tensor, "in"]) -> Float[Tensor, "in"]:
        """Natural logarithm in float32, 0 where a channel is not live."""
        wide = magnitude.to(torch.float32).clamp(min=torch.finfo(torch.float32).tiny)
        return torch.where(self.live, wide.log(), 0.0)

    def factor(self, log_factor: Float[Tensor, "in"]) -> Float[Tensor, "in"]:
        """Tied by the geometric mean and brought to sqrt(max * min) = 1; 1 for classes without a live channel."""
        tied = class_mean(log_factor, self.live, self.classes)
        alive = class_mean(self.live.to(torch.float32), torch.ones_like(self.live), self.classes) > 0
        if not bool(alive.any()):
            return torch.ones_like(tied)
        low, high = tied[alive].aminmax()
        return torch.where(alive, tied - (low + high) / 2, 0.0).exp()
