"""Ranges of keys and values against numpy's quantiles and plain extremes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_llm_quant.calibrate.kv_ranges import BUCKETS, ChannelValues, KvWatch, bucket_edges
from cann_llm_quant.quant.kv import KvScheme, decode, encode, kv_scale


def measured(k: torch.Tensor, chunks: int = 3) -> ChannelValues:
    """`k` [tokens, heads, dim] shown to a watch in several windows."""
    watch = KvWatch()
    for part in k.chunk(chunks):
        x = part.transpose(0, 1)[None]
        watch(0, x, x, x, scale=1.0, window=None)
    found = watch.finish()
    assert found is not None
    return found[0]


def keys(seed: int = 0, tokens: int = 200) -> torch.Tensor:
    x = torch.randn(tokens, 2, 4, generator=torch.Generator().manual_seed(seed))
    return x * torch.tensor([1.0, 0.01, 30.0, 1e-4]) + torch.tensor([0.0, 5.0, 0.0, 0.0])


@pytest.mark.parametrize(("shared", "axes"), [((0, 1), (0, 1, 2)), ((1,), (0, 2)), ((), (0,))])
def test_ranges_are_the_extremes_over_all_windows(shared: tuple[int, ...], axes: tuple[int, ...]) -> None:
    x = keys()
    low, high = measured(x).range(shared, symmetric=True)
    assert low.shape == (1 if 0 in shared else 2, 1, 1 if 1 in shared else 4)
    assert torch.equal(low.flatten(), x.amin(axes).flatten())
    assert torch.equal(high.flatten(), x.amax(axes).flatten())
    wide = measured(x).range(shared, symmetric=True, headroom=1.25)
    torch.testing.assert_close(wide[1], 1.25 * high)
    low_about, high_about = measured(x).range(shared, symmetric=False, headroom=2.0)
    torch.testing.assert_close(high_about - low_about, 2 * (high - low))
    torch.testing.assert_close(high_about + low_about, high + low)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000), percentile=st.sampled_from([90.0, 99.0, 99.5]), tokens=st.integers(20, 300))
def test_percentiles_leave_no_more_than_their_share_outside_and_are_tight(
    seed: int, percentile: float, tokens: int
) -> None:
    x = keys(seed, tokens)
    values = measured(x)
    low, high = values.range((), symmetric=False, percentile=percentile)
    outside = (x > high.squeeze(1)).double().mean(0), (x < low.squeeze(1)).double().mean(0)
    assert all(float(share.max()) <= (100 - percentile) / 200 for share in outside)
    # not wider than the next quantile outwards, by more than a bucket
    tail = (100 - percentile) / 200
    top = np.quantile(x.numpy(), 1 - tail, axis=0, method="higher")
    assert (high.squeeze(1).numpy() <= np.where(top > 0, top * (1 + 1 / 32), top * (1 - 1 / 32)) + 1e-6).all()


def test_the_share_outside_is_counted_to_within_a_bucket() -> None:
    x = keys(tokens=2000)
    values = measured(x)
    limit = torch.nextafter(torch.full((1, 1, 1), 2.0), torch.zeros(()))  # just below an edge of a bucket
    assert values.share_outside(-limit, limit) == pytest.approx(float((x.abs() >= 2).double().mean()), abs=1e-12)
    low, high = values.range((0, 1), symmetric=True)
    assert values.share_outside(low, high) == 0.0


def test_buckets_cover_the_line_without_gaps() -> None:
    below, above = bucket_edges()
    assert len(below) == 2 * BUCKETS
    assert torch.equal(above[:-1], below[1:])
    inner = slice(BUCKETS + 1, 2 * BUCKETS - 1)
    assert float((above[inner] / below[inner]).max()) <= 1 + 1 / 32


@pytest.mark.parametrize("symmetric", [True, False])
def test_c64_a_constant_channel_is_decoded_exactly_whatever_the_headroom(symmetric: bool) -> None:
    x = keys()
    x[:, 0, 2] = 20.0
    x[:, 1, 1] = 0.0
    scheme = KvScheme("int8", symmetric, "channel")
    low, high = measured(x).range((), symmetric=symmetric, headroom=1.3)
    scale, zero = kv_scale(low, high, scheme)
    page = x.transpose(0, 1).contiguous()
    back = decode(encode(page, scheme, scale, zero), scheme, scale, zero)
    assert torch.equal(back[0, :, 2], page[0, :, 2])
    assert torch.equal(back[1, :, 1], page[1, :, 1])
    assert bool(back.isfinite().all())


def test_nothing_seen_is_nothing_measured() -> None:
    assert KvWatch().finish() is None


def turned_keys(positions: range, *, partial: float = 1.0, dim: int = 16, seed: int = 0) -> torch.Tensor:
    """Keys [tokens, 2, dim], float64, as the cache receives them at these positions: with offsets, after RoPE."""
    random = torch.Generator().manual_seed(seed)
    offsets = 8 * torch.randn(2, dim, generator=random, dtype=torch.float64)
    noise = torch.rand(512, 2, dim, generator=random, dtype=torch.float64) - 0.5  # bounded: norms repeat
    x = offsets + noise[torch.tensor(list(positions)) % 512]
    pairs = int(dim * partial) // 2
    for i in range(pairs):
        angles = torch.tensor(list(positions), dtype=torch.float64)[:, None] * 10000.0 ** (-i / pairs)
        first, second = x[..., i].clone(), x[..., i + pairs].clone()
        x[..., i] = first * angles.cos() - second * angles.sin()
        x[..., i + pairs] = second * angles.cos() + first * angles.sin()
    return x


def seen_turning(k: torch.Tensor, turning: int, chunks: int = 3) -> ChannelValues:
    watch = KvWatch(turning)
    for part in k.float().chunk(chunks):
        x = part.transpose(0, 1)[None]
        watch(0, x, x, x, scale=1.0, window=None)
    found = watch.finish()
    assert found is not None
    assert found[1].norms is None
    return found[0]


def literal_range(k: torch.Tensor, turning: int, percentile: float) -> np.ndarray:
    """Reach of each channel [heads, dim]: of the pair's norm where it turns, else of the magnitude."""
    _, heads, dim = k.shape
    reach = np.zeros((heads, dim))
    for head in range(heads):
        for channel in range(dim):
            half = turning // 2
            x = k[:, head, channel].abs().numpy()
            if channel < turning:
                other = channel + half if channel < half else channel - half
                x = np.array([math.sqrt(float(a) ** 2 + float(k[t, head, other]) ** 2) for t, a in enumerate(x)])
            reach[head, channel] = np.quantile(x, percentile / 100, method="higher")
    return reach


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize(("percentile", "headroom"), [(100.0, 1.0), (100.0, 1.25), (95.0, 1.0)])
def test_symmetric_ranges_of_turned_pairs_are_their_largest_norms(
    partial: float, percentile: float, headroom: float
) -> None:
    k, turning = turned_keys(range(150), partial=partial), int(16 * partial)
    low, high = seen_turning(k, turning).range((), symmetric=True, percentile=percentile, headroom=headroom)
    wanted = headroom * literal_range(k, turning, percentile)
    found = torch.maximum(-low, high).squeeze(1).numpy()
    turned = np.arange(16) < turning
    if percentile == 100:
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
        assert torch.equal(low[..., turned], -high[..., turned])
    else:  # within the bucket of the quantile; channels that stay have one end or both
        assert (found[:, turned] >= wanted[:, turned] * (1 - 1e-6)).all()
        assert (found[:, turned] <= wanted[:, turned] * (1 + 1 / 32)).all()
    shared_low, shared_high = seen_turning(k, turning).range((1,), symmetric=True, headroom=headroom)
    np.testing.assert_allclose(
        torch.maximum(-shared_low, shared_high).flatten().numpy(),
        headroom * literal_range(k, turning, 100).max(1),
        1e-6,
    )


def test_percentiles_of_norms_hold_at_every_position() -> None:
    k = turned_keys(range(200), seed=3)
    _, high = seen_turning(k, 16).range((), symmetric=True, percentile=90)
    later = turned_keys(range(512 * 40, 512 * 40 + 200), seed=3)  # the same keys, turned further
    assert float((later.abs() > high.squeeze(1)).double().mean(0).max()) <= 0.10
    assert float((later.abs() > high.squeeze(1)).double().mean()) > 0


@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_keys_far_beyond_the_calibration_s_windows_stay_inside(partial: float) -> None:
    turning = int(16 * partial)
    values = seen_turning(turned_keys(range(512), partial=partial), turning)
    low, high = values.range((), symmetric=True)
    seen = torch.maximum(-values.minimum, values.maximum)
    beyond = []
    for start in (512, 4096, 512 * 60):
        later = turned_keys(range(start, start + 512), partial=partial).abs().amax(0)
        assert bool((later <= torch.maximum(-low, high).squeeze(1) * (1 + 1e-6)).all())
        beyond.append(float((later / seen).max()))
    assert max(beyond) > 1.3  # what the extremes of the windows would have clipped
    scheme = KvScheme("int8", True, "channel")
    scale, _ = kv_scale(low, high, scheme)
    page = turned_keys(range(30000, 30032), partial=partial).transpose(0, 1).float().contiguous()
    back = decode(encode(page, scheme, scale), scheme, scale)
    assert bool(((back - page).abs() <= scale / 2 * (1 + 1e-4)).all())


def test_ranges_about_a_middle_are_of_the_values_as_they_were_seen() -> None:
    k = turned_keys(range(100))
    low, high = seen_turning(k, 16).range((), symmetric=False)
    torch.testing.assert_close(low.squeeze(1), k.amin(0).float())
    torch.testing.assert_close(high.squeeze(1), k.amax(0).float())


def test_a_pair_that_is_always_zero_and_channels_that_stay_constant_are_exact() -> None:
    k = turned_keys(range(64), partial=0.5)
    k[:, 0, [1, 5]] = 0.0
    k[:, 1, 12] = -3.0
    scheme = KvScheme("int8", True, "channel")
    scale, zero = kv_scale(*seen_turning(k, 8).range((), symmetric=True, headroom=1.5), scheme)
    page = k.transpose(0, 1).float().contiguous()
    back = decode(encode(page, scheme, scale, zero), scheme, scale, zero)
    assert torch.equal(back[0, :, [1, 5]], page[0, :, [1, 5]])
    assert torch.equal(back[1, :, 12], page[1, :, 12])
