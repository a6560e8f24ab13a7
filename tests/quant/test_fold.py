"""Every folding leaves the float function unchanged, in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cann_llm_quant.quant.fold import (
    divide_norm_gain,
    divide_rows,
    multiply_columns,
    rescale_hessian,
    spread_rows,
    stored_norm_gain,
    tie_over_repeats,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def positive(count: int, seed: int = 9) -> Tensor:
    return normal(count, seed=seed).mul(2).exp()


def rms_norm(x: Tensor, gain: Tensor, offset: float) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt() * (offset + gain)


@pytest.mark.parametrize("offset", [0.0, 1.0], ids=["gain", "1+gain"])
def test_c09_norm_into_linears(offset: float) -> None:
    x, gain, w, bias, s = normal(5, 16), normal(16, seed=1), normal(7, 16, seed=2), normal(7, seed=3), positive(16)
    before = functional.linear(rms_norm(x, gain, offset), w, bias)
    folded = divide_norm_gain(gain, s, offset)
    after = functional.linear(rms_norm(x, folded, offset), multiply_columns(w, s), bias)
    torch.testing.assert_close(after, before)
    if offset:
        wrong = functional.linear(rms_norm(x, gain / s, offset), multiply_columns(w, s), bias)
        assert float((wrong - before).abs().max()) > 1


@pytest.mark.parametrize("offset", [0.0, 1.0], ids=["gain", "1+gain"])
def test_a_rounded_gain_is_made_up_for(offset: float) -> None:
    x, gain, w, s = normal(5, 16), normal(16, seed=1), normal(7, 16, seed=2), positive(16)
    gain[3] = -offset
    before = rms_norm(x, gain, offset) @ w.T
    stored, exact = stored_norm_gain(gain, s, offset, torch.bfloat16)
    assert stored.dtype == torch.bfloat16
    after = rms_norm(x, stored.double(), offset) @ multiply_columns(w, exact).T
    torch.testing.assert_close(after, before)
    assert exact[3] == s[3]
    torch.testing.assert_close(exact, s, rtol=0.1, atol=0)


def attention(x: Tensor, v: Tensor, v_bias: Tensor, o: Tensor, kv: int, repeat: int, dim: int) -> Tensor:
    """Attention with fixed weights: only what v and o do matters here."""
    tokens = x.shape[0]
    probabilities = torch.softmax(normal(kv * repeat, tokens, tokens, seed=7), -1)
    values = functional.linear(x, v, v_bias).view(tokens, kv, dim).transpose(0, 1)
    mixed = probabilities @ values.repeat_interleave(repeat, dim=0)
    return functional.linear(mixed.transpose(0, 1).reshape(tokens, -1), o)


@pytest.mark.parametrize(("kv", "repeat"), [(2, 3), (3, 1), (1, 4)])
def test_c10_v_into_o_under_grouped_queries(kv: int, repeat: int) -> None:
    dim = 4
    x, v, bias = normal(6, 10), normal(kv * dim, 10, seed=1), normal(kv * dim, seed=2)
    o = normal(9, kv * repeat * dim, seed=3)
    tie = tie_over_repeats(kv, repeat, dim)
    s = positive(kv * dim)[tie]
    rows = spread_rows(s, tie)
    assert rows.shape == (kv * dim,)
    before = attention(x, v, bias, o, kv, repeat, dim)
    new_v, new_bias = divide_rows(v, bias, rows)
    assert new_bias is not None
    after = attention(x, new_v, new_bias, multiply_columns(o, s), kv, repeat, dim)
    torch.testing.assert_close(after, before)


def test_tie_follows_the_formula_of_the_architecture_map() -> None:
    kv, repeat, dim = 2, 3, 4
    expected = [(c // dim // repeat) * dim + c % dim for c in range(kv * repeat * dim)]
    assert tie_over_repeats(kv, repeat, dim).tolist() == expected


def test_up_into_down_of_a_gated_mlp() -> None:
    x, gate, up, down = normal(5, 8), normal(12, 8, seed=1), normal(12, 8, seed=2), normal(8, 12, seed=3)
    up_bias, s = normal(12, seed=4), positive(12)

    def mlp(up: Tensor, up_bias: Tensor, down: Tensor) -> Tensor:
        return (functional.silu(x @ gate.T) * (x @ up.T + up_bias)) @ down.T

    new_up, new_bias = divide_rows(up, up_bias, s)
    assert new_bias is not None
    torch.testing.assert_close(mlp(new_up, new_bias, multiply_columns(down, s)), mlp(up, up_bias, down))


def test_statistics_follow_the_factor() -> None:
    x, s = normal(40, 6), positive(6)
    torch.testing.assert_close(rescale_hessian(x.T @ x, s), (x / s).T @ (x / s))


def test_half_precision_is_computed_in_float32() -> None:
    w = torch.ones(2, 3, dtype=torch.bfloat16)
    factor = torch.tensor([1.0, 3.0, 7.0])
    assert multiply_columns(w, factor).dtype == torch.float32
    assert divide_norm_gain(w[0], factor, 1.0).dtype == torch.float32
    assert divide_rows(w, None, factor[:2])[0].dtype == torch.float32
