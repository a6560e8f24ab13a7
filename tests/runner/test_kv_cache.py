"""The cache against attention over everything at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_llm_quant.errors import UsageError
from cann_llm_quant.runner import kv_cache
from cann_llm_quant.runner.kv_cache import KVCache

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 8, 2


def random_qkv(batch: int, tokens: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, tokens, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def new_cache(batch: int, max_length: int) -> KVCache:
    return KVCache(LAYERS, batch, KV_HEADS, DIM, max_length, dtype=torch.float32, device=torch.device("cpu"))


def literal_attention(q, k, v, scale: float, window: int | None):
    """One query and one key at a time, in float64."""
    batch, heads, tokens, _ = q.shape
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b in range(batch):
        for head in range(heads):
            kv = head // (heads // k.shape[1])
            for i in range(tokens):
                first = 0 if window is None else max(0, i - window + 1)
                scores = torch.stack([q[b, head, i].double() @ k[b, kv, j].double() for j in range(first, i + 1)])
                out[b, head, i] = (scores * scale).softmax(0) @ v[b, kv, first : i + 1].double()
    return out


@settings(max_examples=20, deadline=None)
@given(
    pieces=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    window=st.none() | st.integers(1, 12),
    batch=st.integers(1, 2),
    capacity=st.integers(1, 8),
)
def test_any_chunking_equals_literal_attention(pieces, window, batch, capacity) -> None:
    tokens = sum(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "FIRST_CAPACITY", capacity)
        cache = new_cache(batch, tokens)
        layers = [random_qkv(batch, tokens, seed) for seed in range(LAYERS)]
        mixed: list[list[torch.Tensor]] = [[] for _ in layers]
        start = 0
        for piece in pieces:
            part = slice(start, start + piece)
            for layer, (q, k, v) in enumerate(layers):
                mixed[layer].append(cache(layer, q[:, :, part], k[:, :, part], v[:, :, part], scale=0.3, window=window))
            cache.advance(piece)
            start += piece
    for layer, (q, k, v) in enumerate(layers):
        expected = literal_attention(q, k, v, 0.3, window)
        assert (torch.cat(mixed[layer], dim=2).double() - expected).abs().max() < 1e-5


def test_buffers_grow_with_the_text_not_with_the_limit() -> None:
    cache = new_cache(1, 1_000_000)
    q, k, v = random_qkv(1, 3, 0)
    cache(0, q, k, v, scale=1.0, window=None)
    assert cache._keys[0].shape[2] == kv_cache.FIRST_CAPACITY


def test_more_tokens_than_the_limit_are_refused() -> None:
    q, k, v = random_qkv(1, 5, 0)
    with pytest.raises(UsageError, match="context of 4"):
        new_cache(1, 4)(0, q, k, v, scale=1.0, window=None)
