"""Static ranges of activations, estimated from a sketch of the whole calibration set.

    minmax      the extremes seen
    moving      m += 0.01 (extreme of the window - m), window after window (as TensorFlow's and torch's observers)
    percentile  symmetric: the p-th percentile of |x|; asymmetric: (100 - p) / 2 percent are left out at each end
    mse         the range whose quantized values have the least squared error, by the quantizer itself
    entropy     the threshold that keeps most information (Migacz, "8-bit inference with TensorRT", GTC 2017)

Entropy in detail: of a histogram of |x| with 2048 bins the first i are kept. P are their counts, with everything beyond
added to the last nonempty one (an empty one has no Q that could explain it); Q are the same counts without that,
averaged over the nonempty bins of each of 128 levels (2^(b-1)). The i with the least sum P log(P / Q) wins. Values of 0
are exact under every threshold; so that they do not outweigh everything else, the first bin takes the count of the
second.
"""

from typing import Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from cann_llm_quant.errors import NumericError, UsageError
from cann_llm_quant.quant.activations import InputRange, code_range, grid_of, is_nv, quantize_input
from cann_llm_quant.quant.number_formats import FLOAT_MAX, INT_BITS
from cann_llm_quant.quant.scheme import ActivationScheme
from cann_llm_quant.quant.value_sketch import ValueSketch, bucket_edges

RangeMethod = Literal["minmax", "moving", "percentile", "mse", "entropy"]

ENTROPY_BINS, ENTROPY_STEP = 2048, 8
_POINTS = 8
# a factor of 2^(1/4) at a time, then within it
_SHRINK = [2.0 ** (-step / 4) for step in range(37)]
_REFINE = [2.0 ** (step / 64) for step in range(-8, 9)]
_FLOAT32 = torch.finfo(torch.float32)


def static_range(
    sketch: ValueSketch,
    scheme: ActivationScheme,
    method: RangeMethod = "minmax",
    *,
    percentile: float = 99.9,
    dtype: torch.dtype = torch.float32,
) -> InputRange:
    """The range to store for an input with these values; the scale is rounded to `dtype`, float32 where that loses 1 %.

    NV groups always store their factor in float32, from the extremes. Raises UsageError for `entropy` on a scheme that
    is not symmetric integer, NumericError when the values are not finite.
    """
    if not abs(sketch.low) + abs(sketch.high) < float("inf"):
        raise NumericError(f"activations span {sketch.low} to {sketch.high}; a range needs finite values")
    if is_nv(scheme):
        whole = FLOAT_MAX["fp8_e4m3"] * FLOAT_MAX["fp4_e2m1"]
        return InputRange(torch.tensor([min(whole / max(sketch.amax, _FLOAT32.tiny), _FLOAT32.max)]))
    return stored_range(*estimate(sketch, scheme, method, percentile), scheme, dtype)


def stored_range(low: float, high: float, scheme: ActivationScheme, dtype: torch.dtype = torch.float32) -> InputRange:
    """Scale and zero point of a range that holds 0; the zero point is chosen against the rounded scale."""
    scale, zero_point = grid_of(torch.tensor([low]), torch.tensor([high]), scheme)
    rounded = scale.to(dtype)
    if not bool((rounded.to(torch.float32) / scale - 1).abs().le(0.01).all()):
        rounded = scale
    if zero_point is None:
        return InputRange(rounded)
    least, most = code_range(scheme)
    zero_point = (least - torch.tensor([low]) / rounded.to(torch.float32)).clamp(least, most).round()
    return InputRange(rounded, zero_point.to(torch.int8))


def estimate(
    sketch: ValueSketch, scheme: ActivationScheme, method: RangeMethod, percentile: float = 99.9
) -> tuple[float, float]:
    """Low and high end, symmetric for a symmetric scheme; never wider than the extremes. Raises as `static_range`."""
    low, high = sketch.low, sketch.high
    if method == "moving":
        low, high = sketch.moving_low, sketch.moving_high
    elif method == "percentile":
        low, high = _percentiles(sketch, scheme.symmetric, percentile)
    elif method == "mse":
        low, high = _least_squares(sketch, scheme)
    elif method == "entropy":
        if scheme.dtype not in INT_BITS or not scheme.symmetric:
            raise UsageError("entropy ranges are of symmetric integer activations; choose percentile or mse")
        high = entropy_threshold(magnitude_histogram(sketch), 1 << (INT_BITS[scheme.dtype] - 1)) * sketch.amax
        low = -high
    if scheme.symmetric:
        high = max(-low, high)
        low = -high
    return low, high


def _percentiles(sketch: ValueSketch, symmetric: bool, percentile: float) -> tuple[float, float]:
    share = percentile / 100
    if symmetric:
        high = _quantile(sketch.counts.sum(0), share, sketch.amax)
        return -high, high
    tail = (1 - share) / 2
    negative, positive = (int(n) for n in sketch.counts.sum(1))
    total = negative + positive
    # of the sorted values, `tail` lies beyond each end; counted from 0 outwards on the side that the end falls on
    above, below = positive - tail * total, negative - tail * total
    high = _quantile(sketch.counts[1], above / positive, sketch.high) if above > 0 else 0.0
    low = -_quantile(sketch.counts[0], below / negative, -sketch.low) if below > 0 else 0.0
    return low, high


def _quantile(counts: Tensor, share: float, largest: float) -> float:
    """Value below which `share` of the counted magnitudes lie, linear within its bucket."""
    cumulated = counts.cumsum(0).to(torch.float64)
    wanted = share * float(cumulated[-1])
    bucket = min(int(torch.searchsorted(cumulated, wanted)), len(counts) - 1)
    edges = bucket_edges()
    before = float(cumulated[bucket] - counts[bucket])
    inside = (wanted - before) / max(float(counts[bucket]), 1.0)
    return min(float(edges[bucket] + (edges[bucket + 1] - edges[bucket]) * inside), largest)


def _least_squares(sketch: ValueSketch, scheme: ActivationScheme) -> tuple[float, float]:
    """Ends that cost least: first the whole range shrinks, then each end (of a symmetric scheme both) is refined."""
    values, weights = _points(sketch)
    low, high = (-sketch.amax, sketch.amax) if scheme.symmetric else (sketch.low, sketch.high)

    def cost(ends: tuple[float, float]) -> float:
        return squared_error(values, weights, ends, scheme)

    best = min(((low * factor, high * factor) for factor in _SHRINK), key=cost)
    if scheme.symmetric:
        return min(((max(best[0] * f, low), min(best[1] * f, high)) for f in _REFINE), key=cost)
    best = min(((low * factor, best[1]) for factor in _SHRINK), key=cost)
    best = min(((best[0], high * factor) for factor in _SHRINK), key=cost)
    best = min(((max(best[0] * f, low), best[1]) for f in _REFINE), key=cost)
    return min(((best[0], min(best[1] * f, high)) for f in _REFINE), key=cost)


def squared_error(
    values: Float64[Tensor, " values"],
    weights: Float64[Tensor, " values"],
    ends: tuple[float, float],
    scheme: ActivationScheme,
) -> float:
    """Weighted squared error of quantizing `values` with the static range from `ends[0]` to `ends[1]`."""
    rounded = quantize_input(values.to(torch.float32)[None], scheme, stored_range(*ends, scheme)).dequantize()[0]
    return float((weights * (rounded.to(torch.float64) - values).square()).sum())


def _points(sketch: ValueSketch) -> tuple[Float64[Tensor, " values"], Float64[Tensor, " values"]]:
    """Evenly spread values of every nonempty bucket, with their weights: a bucket may be wider than a code."""
    edges = bucket_edges()
    offsets = (torch.arange(_POINTS, dtype=torch.float64) + 0.5) / _POINTS
    values, weights = [], []
    for sign, counts in zip((-1.0, 1.0), sketch.counts, strict=True):
        filled = counts.nonzero()[:, 0]
        spread = edges[filled, None] + (edges[filled + 1] - edges[filled])[:, None] * offsets
        values.append(sign * spread.clamp(max=sketch.amax).flatten())
        weights.append((counts[filled].to(torch.float64) / _POINTS).repeat_interleave(_POINTS))
    return torch.cat(values), torch.cat(weights)


def magnitude_histogram(sketch: ValueSketch, bins: int = ENTROPY_BINS) -> Float64[Tensor, " bins"]:
    """Counts of |x| in equal bins from 0 to the largest; a bucket's count is spread evenly over its width."""
    counts = sketch.counts.sum(0).to(torch.float64)
    edges = bucket_edges()
    if sketch.amax == 0:
        return torch.zeros(bins, dtype=torch.float64)
    below = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    wanted = torch.linspace(0, 1, bins + 1, dtype=torch.float64) * sketch.amax
    bucket = (torch.searchsorted(edges, wanted, right=True) - 1).clamp(0, len(counts) - 1)
    inside = (wanted - edges[bucket]) / (edges[bucket + 1] - edges[bucket])
    cumulated = below[bucket] + counts[bucket] * inside.clamp(max=1)
    cumulated[-1] = below[-1]
    return cumulated.diff()


def entropy_threshold(histogram: Float64[Tensor, " bins"], levels: int, step: int = ENTROPY_STEP) -> float:
    """Share of the histogram's span, in (0, 1], that keeps most information; see the module."""
    bins = len(histogram)
    counts = histogram.clone()
    counts[0] = counts[1]
    if bins <= levels or float(counts.sum()) == 0:
        return 1.0
    best = min([*range(levels, bins, step), bins], key=lambda kept: divergence(counts, kept, levels))
    return float(best / bins)


def divergence(counts: Float64[Tensor, " bins"], kept: int, levels: int) -> float:
    """`sum P log(P / Q)` when the first `kept` bins are kept; infinite when they are all empty."""
    inner = counts[:kept]
    filled = inner.nonzero()[:, 0]
    if len(filled) == 0:
        return float("inf")
    level = filled * levels // kept
    mass = torch.zeros(levels, dtype=torch.float64).index_add_(0, level, inner[filled])
    members = torch.bincount(level, minlength=levels)
    q = (mass / members.clamp(min=1))[level]
    p = inner[filled]
    p[-1] += counts[kept:].sum()
    return float((p * (p / p.sum() / (q / q.sum())).log()).sum() / p.sum())
