"""Powers of two between q and k: scores keep every bit, and K's channels come within a factor of two."""

import pytest
import torch

from cann_llm_quant.models.rope import rotate
from cann_llm_quant.quant.kv_smooth import divided_keys, multiplied_queries, pair_factors

KV, GROUP, DIM = 2, 3, 8


def turned(x: torch.Tensor, rotary: int) -> torch.Tensor:
    """[1, heads, tokens, dim] after RoPE of the first `rotary` channels."""
    angles = torch.arange(x.shape[2])[:, None] * torch.tensor([0.7, 0.3, 0.1, 0.05])[: rotary // 2]
    angles = torch.cat((angles, angles), -1)[None]
    return rotate(x, angles.cos(), angles.sin())


@pytest.mark.parametrize("rotary", [8, 4])
@pytest.mark.parametrize("shared", [False, True])
def test_scores_are_bit_equal_and_channels_even(rotary: int, shared: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 40, 16, generator=generator)
    wq, bq = torch.randn(KV * GROUP * DIM, 16, generator=generator), torch.randn(KV * GROUP * DIM, generator=generator)
    wk, bk = torch.randn(KV * DIM, 16, generator=generator), torch.randn(KV * DIM, generator=generator)
    wk *= torch.tensor([1, 9, 0.01, 3, 1, 200, 1, 1.0]).repeat(KV)[:, None]

    def project(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return turned((x @ w.T + b).view(1, 40, -1, DIM).transpose(1, 2), rotary)

    def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q @ k.repeat_interleave(GROUP, 1).transpose(2, 3)

    k = project(wk, bk)
    factor = pair_factors(k.abs().amax((0, 2)), rotary, shared=shared)
    half = rotary // 2
    assert torch.equal(factor[:, :half], factor[:, half:rotary])
    assert torch.equal(factor.log2(), factor.log2().round())
    if shared:
        assert torch.equal(factor[0], factor[1])
    smooth = project(divided_keys(wk, factor), divided_keys(bk, factor))
    queries = project(multiplied_queries(wq, factor), multiplied_queries(bq, factor))
    assert torch.equal(scores(queries, smooth), scores(project(wq, bq), k))
    before, after = k.abs().amax((0, 2)), smooth.abs().amax((0, 2))
    assert float(after.max() / after.median()) < 0.25 * float(before.max() / before.median())


def test_dead_channels_keep_their_factor_and_extremes_are_bounded() -> None:
    amax = torch.tensor([[0.0, 1e-6, 1.0, 1e6]])
    factor = pair_factors(amax, 0)
    assert float(factor[0, 0]) == 1.0
    assert 2**-8 <= float(factor.min()) <= float(factor.max()) <= 2**8
    assert torch.equal(pair_factors(torch.zeros(1, 4), 4), torch.ones(1, 4))
