"""Routing and mixing against loops written out, and what each expert is given."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cann_llm_quant.models.arch import Moe
from cann_llm_quant.models.moe import mix_experts, route


def moe(experts: int, top_k: int, normalize: bool) -> Moe:
    return Moe(experts, top_k, intermediate_size=8, normalize_top_k=normalize)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.data(), st.booleans(), st.integers(0, 1000))
def test_route_and_mix_equal_the_definition(experts: int, data: st.DataObject, normalize: bool, seed: int) -> None:
    top_k = data.draw(st.integers(1, experts))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, experts, generator=generator)
    x, matrices = torch.randn(7, 5, generator=generator), torch.randn(experts, 5, 5, generator=generator)
    weights, chosen = route(logits, moe(experts, top_k, normalize))
    mixed = mix_experts(x, weights, chosen, lambda expert, tokens: tokens @ matrices[expert])
    for t in range(7):
        exponentials = [math.exp(value) for value in logits[t].tolist()]
        ranked = sorted(range(experts), key=lambda e: -exponentials[e])[:top_k]
        total = sum(exponentials[e] for e in ranked) if normalize else sum(exponentials)
        expected = sum(exponentials[e] / total * (x[t].double() @ matrices[e].double()) for e in ranked)
        assert chosen[t].tolist() == ranked
        torch.testing.assert_close(mixed[t].double(), expected, atol=1e-5, rtol=0)


def test_softmax_is_float32_whatever_the_logits() -> None:
    logits = torch.tensor([[1.0, 0.996, -3.0]]).bfloat16()
    weights, _ = route(logits, moe(3, 2, False))
    assert weights.dtype == torch.float32
    expected = torch.softmax(logits.double(), dim=-1)[0, :2].float()
    torch.testing.assert_close(weights[0], expected, atol=1e-7, rtol=0)


def test_experts_run_in_order_with_their_tokens_in_order_and_idle_ones_do_not_run() -> None:
    chosen = torch.tensor([[4, 1], [1, 0], [4, 0], [1, 4]])
    x = torch.arange(4.0)[:, None].expand(4, 3).contiguous()
    calls: list[tuple[int, list[float]]] = []

    def run(expert: int, tokens: Tensor) -> Tensor:
        calls.append((expert, tokens[:, 0].tolist()))
        return tokens

    mix_experts(x, torch.full((4, 2), 0.5), chosen, run)
    assert calls == [(0, [1.0, 2.0]), (1, [0.0, 1.0, 3.0]), (4, [0.0, 2.0, 3.0])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sum_keeps_the_activations_dtype(dtype: torch.dtype) -> None:
    x = torch.ones(2, 4, dtype=dtype)
    mixed = mix_experts(x, torch.full((2, 2), 0.5), torch.tensor([[0, 1], [1, 0]]), lambda expert, tokens: tokens)
    assert mixed.dtype == dtype
    assert torch.equal(mixed, x)
