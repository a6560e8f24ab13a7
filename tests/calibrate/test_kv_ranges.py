"""Ranges of keys and values against numpy's quantiles and plain extremes."""

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
