"""Range estimators against numpy, brute force over raw values, and a literal twin of the entropy loop."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_llm_quant.errors import NumericError, UsageError
from cann_llm_quant.quant import activation_ranges as ranges
from cann_llm_quant.quant.scheme import ActivationScheme
from cann_llm_quant.quant.value_sketch import BUCKETS, ValueSketch, bucket_counts, bucket_edges, merged

SYMMETRIC = ActivationScheme("int8", True, False, "tensor")
ASYMMETRIC = ActivationScheme("int8", False, False, "tensor")
FP8 = ActivationScheme("fp8_e4m3", True, False, "tensor")


def sketch_of(x: torch.Tensor) -> ValueSketch:
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    return ValueSketch(bucket_counts(x), low, high, low, high, len(x))


def heavy_tails(seed: int, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(300, 100, generator=generator).pow(3) + shift


def test_every_value_lies_in_its_bucket() -> None:
    x = torch.tensor([0.0, -0.0, 1e-30, 2.0**-30, 1.0, -1.0, 1.999, -3e4, 1e20])
    edges = bucket_edges()
    for value in x:
        counts = bucket_counts(value)
        sign, bucket = counts.nonzero()[0].tolist()
        assert sign == int(value >= 0)
        assert edges[bucket] <= abs(float(value))
        assert abs(float(value)) < edges[bucket + 1] or bucket == BUCKETS - 1
    widths = edges.diff()[1:] / edges[1:-1]
    assert float(widths.max()) <= 1 / 256


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 99))
def test_a_merged_sketch_is_the_sketch_of_all_values(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(size, 3, generator=generator) for size in sizes]
    together, whole = merged([sketch_of(part) for part in parts]), sketch_of(torch.cat(parts))
    assert torch.equal(together.counts, whole.counts)
    assert (together.low, together.high, together.tokens) == (whole.low, whole.high, whole.tokens)


def test_minmax_is_the_extremes() -> None:
    x = heavy_tails(0)
    assert ranges.estimate(sketch_of(x), ASYMMETRIC, "minmax") == (float(x.min()), float(x.max()))
    assert ranges.estimate(sketch_of(x), SYMMETRIC, "minmax") == (-float(x.abs().max()), float(x.abs().max()))


@pytest.mark.parametrize("percentile", [90.0, 99.0, 99.9, 99.99, 100.0])
def test_percentiles_are_numpys_within_a_bucket(percentile: float) -> None:
    # a count that no tail divides into whole numbers, where rounding would decide
    x = heavy_tails(1, shift=0.5).flatten()[:29_993, None]
    raw, end = x.flatten().double().numpy(), 50 + percentile / 2

    def numpys(values: np.ndarray, p: float) -> float:
        return float(np.percentile(values, p, method="inverted_cdf"))

    high = ranges.estimate(sketch_of(x), SYMMETRIC, "percentile", percentile)[1]
    assert high == pytest.approx(numpys(np.abs(raw), percentile), rel=1 / 256)
    low, high = ranges.estimate(sketch_of(x), ASYMMETRIC, "percentile", percentile)
    assert [-low, high] == pytest.approx([numpys(-raw, end), numpys(raw, end)], rel=1 / 256)


def test_an_end_whose_tail_holds_all_of_its_values_is_zero() -> None:
    x = torch.cat([torch.full((1, 1), -1.0), torch.linspace(0.1, 5, 2000)[:, None]])
    assert ranges.estimate(sketch_of(x), ASYMMETRIC, "percentile", 99.0)[0] == 0.0


@pytest.mark.parametrize("scheme", [SYMMETRIC, FP8, ActivationScheme("int4", True, False, "tensor")], ids=str)
def test_mse_is_within_a_hundredth_of_brute_force_over_the_raw_values(scheme: ActivationScheme) -> None:
    x = heavy_tails(2)
    raw, ones = x.flatten().double(), torch.ones(x.numel(), dtype=torch.float64)
    largest = float(x.abs().max())
    tried = [largest * i / 100 for i in range(1, 101)]
    least = min(ranges.squared_error(raw, ones, (-clip, clip), scheme) for clip in tried)
    chosen = ranges.estimate(sketch_of(x), scheme, "mse")
    assert ranges.squared_error(raw, ones, chosen, scheme) <= 1.01 * least
    assert chosen[1] <= largest


def test_mse_of_both_ends_is_within_a_hundredth_of_brute_force() -> None:
    x = heavy_tails(3, shift=1.0).clamp(min=-4)
    scheme = ActivationScheme("int4", False, False, "tensor")
    raw, ones = x.flatten().double(), torch.ones(x.numel(), dtype=torch.float64)
    low, high = float(x.min()), float(x.max())
    shares = [i / 12 for i in range(1, 13)]
    least = min(ranges.squared_error(raw, ones, (low * a, high * b), scheme) for a in shares for b in shares)
    chosen = ranges.estimate(sketch_of(x), scheme, "mse")
    assert ranges.squared_error(raw, ones, chosen, scheme) <= 1.01 * least


def test_squared_error_equals_float64_rounding() -> None:
    x = heavy_tails(4)[:20].flatten().double()
    scale = float(np.float32(8.0) / np.float32(127.5))
    codes = np.clip(np.round(x.numpy().astype(np.float32) / np.float32(scale)), -128, 127)
    expected = float(((codes * scale - x.numpy()) ** 2).sum())
    found = ranges.squared_error(x, torch.ones_like(x), (-8.0, 8.0), SYMMETRIC)
    assert found == pytest.approx(expected, rel=1e-5)


def literal_entropy_threshold(histogram: list[float], levels: int, step: int) -> float:
    """The paper's loop, one bin at a time."""
    bins, best, best_cost = len(histogram), 1.0, math.inf
    histogram = [histogram[1], *histogram[1:]]
    for kept in [*range(levels, bins, step), bins]:
        p = list(histogram[:kept])
        if not any(p):
            continue
        p[max(i for i in range(kept) if p[i] > 0)] += sum(histogram[kept:])
        q = [0.0] * kept
        for level in range(levels):
            members = [i for i in range(kept) if i * levels // kept == level]
            filled = [i for i in members if histogram[i] > 0]
            for i in filled:
                q[i] = sum(histogram[j] for j in members) / len(filled)
        p_sum, q_sum = sum(p), sum(q)
        cost = 0.0
        for i in range(kept):
            if p[i] > 0:
                cost += p[i] / p_sum * math.log((p[i] / p_sum) / (q[i] / q_sum))
        if cost < best_cost:
            best, best_cost = kept / bins, cost
    return best


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 999), st.sampled_from([3, 8, 16]))
def test_entropy_threshold_is_that_of_the_literal_loop(seed: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randn(4000, generator=generator).pow(3).abs().histc(60).double()
    assert ranges.entropy_threshold(counts, levels, step=3) == literal_entropy_threshold(counts.tolist(), levels, 3)


def test_the_sketchs_histogram_gives_a_threshold_as_good_as_the_raw_values_histogram() -> None:
    x = heavy_tails(5)
    sketch = sketch_of(x)
    exact, _ = np.histogram(x.abs().numpy(), bins=ranges.ENTROPY_BINS, range=(0.0, sketch.amax))
    ours = ranges.magnitude_histogram(sketch)
    assert float(ours.sum()) == pytest.approx(x.numel())
    assert np.abs(np.cumsum(ours.numpy()) - np.cumsum(exact)).max() < 0.003 * x.numel()
    counts = torch.from_numpy(exact).double()
    least, found = (ranges.entropy_threshold(histogram, 128) * len(counts) for histogram in (counts, ours))
    assert ranges.divergence(counts, int(found), 128) <= 1.1 * ranges.divergence(counts, int(least), 128)


def test_entropy_cuts_a_lone_outlier() -> None:
    x = torch.randn(200, 100, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 500.0
    assert ranges.estimate(sketch_of(x), SYMMETRIC, "entropy")[1] < 50


@pytest.mark.parametrize("scheme", [ASYMMETRIC, FP8], ids=str)
def test_entropy_of_other_schemes_is_refused(scheme: ActivationScheme) -> None:
    with pytest.raises(UsageError, match="choose percentile or mse"):
        ranges.estimate(sketch_of(heavy_tails(0)), scheme, "entropy")


@pytest.mark.parametrize("method", ["minmax", "moving", "percentile", "mse", "entropy"])
def test_an_input_that_is_always_zero_gets_a_usable_scale(method: ranges.RangeMethod) -> None:
    fixed = ranges.static_range(sketch_of(torch.zeros(4, 4)), SYMMETRIC, method)
    assert float(fixed.scale) > 0
    assert bool(fixed.scale.isfinite().all())


def test_values_that_are_not_finite_are_refused() -> None:
    with pytest.raises(NumericError, match="finite"):
        ranges.static_range(sketch_of(torch.tensor([[1.0, float("inf")]])), SYMMETRIC)


def test_scales_are_rounded_to_the_storage_type_unless_it_loses_them() -> None:
    x = heavy_tails(6)
    stored = ranges.static_range(sketch_of(x), SYMMETRIC, dtype=torch.bfloat16).scale
    assert stored.dtype == torch.bfloat16
    assert float(stored) == pytest.approx(float(x.abs().max()) / 127.5, rel=2**-8)
    tiny = ranges.static_range(sketch_of(x * 1e-6), SYMMETRIC, dtype=torch.float16).scale
    assert tiny.dtype == torch.float32
