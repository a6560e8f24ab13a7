"""Attention against a literal loop in float64: groups, windows, padding, slots behind a cache."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cann_llm_quant.models.attention import CausalAttend, masked_attention


def slow_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, slots: Tensor, padding: Tensor
) -> Tensor:
    """One query at a time, exactly as the docstring of the module says."""
    batch, heads, seq, dim = q.shape
    repeat = heads // k.shape[1]
    out = torch.zeros(batch, heads, seq, dim, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(seq):
                slot = int(slots[b, i])
                seen = [
                    j
                    for j in range(k.shape[2])
                    if j == slot or (j <= slot and (window is None or j > slot - window) and padding[b, j])
                ]
                scores = [float(q[b, h, i].double() @ k[b, h // repeat, j].double()) * scale for j in seen]
                weights = [math.exp(score - max(scores)) for score in scores]
                for j, weight in zip(seen, weights, strict=True):
                    out[b, h, i] += weight / sum(weights) * v[b, h // repeat, j].double()
    return out.float()


def tensors(batch: int, heads: int, kv: int, seq: int, keys: int, dim: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, heads, seq, dim, generator=generator),
        torch.randn(batch, kv, keys, dim, generator=generator),
        torch.randn(batch, kv, keys, dim, generator=generator),
    )


@settings(max_examples=40, deadline=None)
@given(
    groups=st.sampled_from([(1, 1), (4, 4), (6, 2), (3, 1)]),
    keys=st.integers(1, 9),
    data=st.data(),
    seed=st.integers(0, 1000),
)
def test_equals_the_literal_loop(groups: tuple[int, int], keys: int, data: st.DataObject, seed: int) -> None:
    seq = data.draw(st.integers(1, keys), label="seq")
    window = data.draw(st.none() | st.integers(1, 10), label="window")
    ragged = data.draw(st.booleans(), label="ragged")
    padded = data.draw(st.booleans(), label="padded")
    q, k, v = tensors(2, *groups, seq, keys, 4, seed)
    slots = torch.arange(keys - seq, keys).expand(2, -1)
    if ragged:
        slots = torch.stack([slots[0], slots[1] - data.draw(st.integers(0, keys - seq), label="behind")])
    padding = torch.ones(2, keys, dtype=torch.bool)
    if padded:
        padding = torch.rand(2, keys, generator=torch.Generator().manual_seed(seed)) > 0.4
    actual = masked_attention(
        q,
        k,
        v,
        scale=0.3,
        window=window,
        query_slots=slots if ragged else None,
        key_padding=padding if padded else None,
    )
    expected = slow_attention(q, k, v, 0.3, window, slots, padding)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_chunks_behind_older_keys_equal_one_call() -> None:
    """Incremental and full attention agree, with and without a window."""
    q, k, v = tensors(2, 4, 2, 12, 12, 8, seed=1)
    for window in (None, 5):
        whole = masked_attention(q, k, v, scale=0.5, window=window)
        parts = [
            masked_attention(q[:, :, a:b], k[:, :, :b], v[:, :, :b], scale=0.5, window=window)
            for a, b in ((0, 7), (7, 11), (11, 12))
        ]
        torch.testing.assert_close(torch.cat(parts, dim=2), whole, atol=1e-6, rtol=0)


def test_a_window_as_long_as_the_keys_changes_nothing() -> None:
    q, k, v = tensors(1, 2, 2, 6, 6, 4, seed=2)
    assert torch.equal(masked_attention(q, k, v, scale=1.0, window=6), masked_attention(q, k, v, scale=1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_padding_stay_finite(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in tensors(2, 4, 2, 5, 5, 4, seed=3))
    real = torch.tensor([[False, False, False, True, True], [False] * 5])
    assert CausalAttend(real)(0, q, k, v, scale=0.5, window=2).isfinite().all()


def test_padding_values_are_never_read() -> None:
    q, k, v = tensors(1, 2, 2, 4, 4, 4, seed=4)
    real = torch.tensor([[False, True, True, True]])
    expected = CausalAttend(real)(0, q, k, v, scale=0.5, window=None)[:, :, 1:]
    k[:, :, 0], v[:, :, 0] = 1e4, 1e4
    assert torch.equal(CausalAttend(real)(0, q, k, v, scale=0.5, window=None)[:, :, 1:], expected)


def test_a_mask_without_padding_is_no_mask() -> None:
    q, k, v = tensors(2, 4, 2, 5, 5, 4, seed=5)
    masked = CausalAttend(torch.ones(2, 5, dtype=torch.bool))
    assert torch.equal(masked(0, q, k, v, scale=0.5, window=None), CausalAttend()(0, q, k, v, scale=0.5, window=None))
