"""AWQ's promises: never worse than nothing, nothing infinite, ties kept; and that it finds what it should."""

import math

import pytest
import torch
from torch import Tensor

from cann_llm_quant.quant import awq
from cann_llm_quant.quant.balance import RangeTerm, balanced_log_factor, class_mean
from cann_llm_quant.quant.error import output_error
from cann_llm_quant.quant.fold import rescale_hessian, tie_over_repeats
from cann_llm_quant.quant.rtn import Clip, solve
from cann_llm_quant.quant.scale_search import ScaleResult, ScaleSite, SearchEffort
from cann_llm_quant.quant.scheme import Scheme, scheme_for

SCHEME = scheme_for(4, 16, symmetric=False)
TINY = torch.finfo(torch.float16).tiny


def site(rows: int = 48, width: int = 64, seed: int = 0) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Two linears, tokens with channels of very different size, their Gram matrix and mean |x|."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(400, width, generator=generator) * torch.randn(width, generator=generator).mul(1.5).exp()
    ws = [torch.randn(n, width, generator=generator) for n in (rows, rows // 2)]
    return ws, x, x.T @ x, x.abs().mean(0)


def search_scale(
    ws: list[Tensor],
    hessian: Tensor,
    mean_abs: Tensor,
    schemes: Scheme | list[Scheme],
    scale_dtype: torch.dtype,
    *,
    storage: torch.dtype = torch.bfloat16,
    clip: Clip = "mse",
    producer_max: Tensor | None = None,
    tie: Tensor | None = None,
    effort: SearchEffort = "best",
    steps: int = 6,
    max_rows: int = 512,
) -> ScaleResult:
    """One site's search under the effort that judges all rows exactly."""
    schemes = [schemes] * len(ws) if isinstance(schemes, Scheme) else schemes
    judged = ScaleSite([w.float() for w in ws], hessian, schemes, scale_dtype, storage, clip, producer_max)
    return awq.search_scale(judged, mean_abs, tie=tie, effort=effort, steps=steps, max_rows=max_rows)


def float64_error(ws: list[Tensor], x: Tensor, factor: Tensor, clip: Clip, dtype: torch.dtype) -> float:
    """Run the tokens through the site: (x / s) Q(W s)ᵀ against x Wᵀ, in float64."""
    total = 0.0
    hessian = rescale_hessian(x.T @ x, factor)
    for w in ws:
        q = solve(w * factor, SCHEME, dtype, clip=clip, hessian=hessian).dequantize()
        moved = (x.double() / factor.double()) @ q.double().T - x.double() @ w.double().T
        total += float(moved.square().sum())
    return total


@pytest.mark.parametrize("clip", ["minmax", "mse"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_errors_are_those_of_the_outputs_and_smaller_than_without(clip: Clip, symmetric: bool) -> None:
    ws, x, hessian, mean_abs = site()
    global_scheme = scheme_for(4, 16, symmetric)
    result = search_scale(ws, hessian, mean_abs, global_scheme, torch.bfloat16, clip=clip)
    assert result.error < 0.8 * result.identity_error
    assert math.isclose(math.sqrt(float(result.factor.max() * result.factor.min())), 1.0, rel_tol=1e-5)
    if not symmetric:
        expected = float64_error(ws, x, result.factor, clip, torch.bfloat16)
        assert math.isclose(result.error, expected, rel_tol=1e-3)
        identity = float64_error(ws, x, torch.ones(64), clip, torch.bfloat16)
        assert math.isclose(result.identity_error, identity, rel_tol=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_c12_never_worse_than_no_factor(seed: int) -> None:
    """One channel a thousand times larger, half of the rows huge: whatever is chosen, all rows are judged."""
    ws, x, _, _ = site(seed=seed)
    x[:, 5] *= 1000
    ws[0][::2] *= 30
    result = search_scale(ws, x.T @ x, x.abs().mean(0), SCHEME, torch.bfloat16, max_rows=4)
    assert result.error <= result.identity_error


def test_c03_dead_channels_and_zero_rows() -> None:
    ws, x, _, _ = site()
    x[:, 3] = 0
    for w in ws:
        w[:, 7] = 0
        w[1] = 0
    result = search_scale(ws, x.T @ x, x.abs().mean(0), SCHEME, torch.bfloat16)
    assert bool(torch.isfinite(result.factor).all())
    assert bool((result.factor > 0).all())
    assert float(result.factor[3]) == float(result.factor[7]) == 1.0
    assert result.error < result.identity_error
    assert result.reason == ""


@pytest.mark.parametrize("dead", ["weights", "activations", "both"])
def test_c03_c04_a_site_without_any_live_channel(dead: str) -> None:
    ws, x, _, _ = site()
    if dead != "activations":
        ws = [torch.zeros_like(w) for w in ws]
    if dead != "weights":
        x = torch.zeros_like(x)
    result = search_scale(ws, x.T @ x, x.abs().mean(0), SCHEME, torch.bfloat16)
    assert torch.equal(result.factor, torch.ones(64))
    assert result.error == result.identity_error == 0.0


def test_c04_a_dead_channel_follows_the_class_that_it_shares() -> None:
    ws, x, _, _ = site()
    x[:, 2] = 0
    tie = tie_over_repeats(2, 2, 16)
    result = search_scale(ws, x.T @ x, x.abs().mean(0), SCHEME, torch.bfloat16, tie=tie)
    assert result.rule != "identity"
    for row in range(32):
        assert len(result.factor[tie == row].unique()) == 1
    assert float(result.factor[2]) == float(result.factor[18]) != 1.0


def test_c08_candidates_outside_the_storage_range_are_rejected() -> None:
    """Weights near fp16's end: a factor that lifts any column further would make it infinite."""
    ws, _, hessian, mean_abs = site()
    big = [w * (60000 / float(w.abs().max())) for w in ws]
    wide = search_scale(big, hessian, mean_abs, SCHEME, torch.float16, storage=torch.bfloat16)
    assert float((big[0] * wide.factor).abs().max()) > 65504
    narrow = search_scale(big, hessian, mean_abs, SCHEME, torch.float16, storage=torch.float16)
    assert all(float((w * narrow.factor).abs().max()) <= 65504 for w in big)
    assert narrow.rule == "identity" or narrow.error <= narrow.identity_error


def test_c08_no_candidate_is_said() -> None:
    ws, _, hessian, mean_abs = site()
    producer = torch.full((64,), 65000.0)
    result = search_scale(ws, hessian, mean_abs, SCHEME, torch.float16, storage=torch.float16, producer_max=producer)
    assert torch.equal(result.factor, torch.ones(64))
    assert "float16" in result.reason
    # Scales, too: groups whose scale fp16 cannot hold leave no candidate.
    small = search_scale([w * 1e-6 for w in ws], hessian, mean_abs, SCHEME, torch.float16)
    assert "float16" in small.reason


def test_the_paper_rules_factor_is_activation_power_over_weight_power() -> None:
    """Weights with large and small columns, where a^r / m^(1-r) wins: that formula, brought to sqrt(max * min) = 1."""
    ws, _, hessian, mean_abs = site(seed=9)
    columns = torch.randn(64, generator=torch.Generator().manual_seed(109)).exp()
    ws = [w * columns for w in ws]
    result = search_scale(ws, hessian, mean_abs, SCHEME, torch.bfloat16, clip="minmax", steps=2)
    assert (result.rule, result.ratio) == ("activation/weight", 0.5)
    largest = torch.cat(ws).abs().amax(0).double()
    expected = mean_abs.double().sqrt() / largest.sqrt()
    expected /= (expected.max() * expected.min()).sqrt()
    torch.testing.assert_close(result.factor.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
def test_c08_no_weight_column_sinks_below_the_storage_range(scale_dtype: torch.dtype) -> None:
    """Columns just above fp16's smallest normal number: a factor well below 1 would make them subnormal."""
    ws, _, hessian, mean_abs = site()
    low = [w * (1.5 * TINY / w.abs().amax(0)) for w in ws]

    def largest(factor: Tensor) -> Tensor:
        return torch.cat(low).mul(factor).abs().amax(0)

    wide = search_scale(low, hessian, mean_abs, SCHEME, scale_dtype, storage=torch.bfloat16)
    assert bool((largest(wide.factor) < TINY).any())
    narrow = search_scale(low, hessian, mean_abs, SCHEME, scale_dtype, storage=torch.float16)
    assert bool((largest(narrow.factor) >= TINY).all())


def test_c08_no_producer_row_sinks_below_the_storage_range() -> None:
    ws, _, hessian, mean_abs = site()
    producer = torch.full((64,), 1.5 * TINY)
    wide = search_scale(ws, hessian, mean_abs, SCHEME, torch.bfloat16, producer_max=producer)
    assert bool((producer / wide.factor < TINY).any())
    narrow = search_scale(ws, hessian, mean_abs, SCHEME, torch.bfloat16, storage=torch.float16, producer_max=producer)
    assert bool((producer / narrow.factor >= TINY).all())
    # What is below the range before already does not count: it cannot be lost.
    below = search_scale(
        ws, hessian, mean_abs, SCHEME, torch.bfloat16, storage=torch.float16, producer_max=producer * 0.1
    )
    assert below.rule != "identity"


@pytest.mark.parametrize("storage", [torch.float32, torch.float64])
def test_c08_a_float64_source_is_bounded_by_float32(storage: torch.dtype) -> None:
    """Folding divides float32 rows: what would make one infinite is rejected though float64 could store it."""
    ws, _, hessian, mean_abs = site()
    free = search_scale(ws, hessian, mean_abs, SCHEME, torch.float32, storage=storage)
    assert float(free.factor.min()) < 0.9
    producer = torch.full((64,), 3.4e38)
    bound = search_scale(ws, hessian, mean_abs, SCHEME, torch.float32, storage=storage, producer_max=producer)
    assert bool(torch.isfinite(producer / bound.factor).all())


def test_schemes_may_differ_between_the_linears_of_a_site() -> None:
    ws, _, hessian, mean_abs = site()
    schemes = [scheme_for(8, -1, symmetric=True), scheme_for(4, 32, symmetric=False)]
    result = search_scale(ws, hessian, mean_abs, schemes, torch.bfloat16)
    total = 0.0
    rescaled = rescale_hessian(hessian, result.factor)
    for w, scheme in zip(ws, schemes, strict=True):
        q = solve(w * result.factor, scheme, torch.bfloat16, clip="mse", hessian=rescaled).dequantize()
        total += output_error(q / result.factor - w, hessian)
    assert math.isclose(result.error, total, rel_tol=1e-3)


def test_arguments_are_left_alone_and_half_weights_are_taken() -> None:
    ws, _, hessian, mean_abs = site()
    half = [w.to(torch.bfloat16) for w in ws]
    copies = [w.clone() for w in half], hessian.clone(), mean_abs.clone()
    result = search_scale(half, hessian, mean_abs, SCHEME, torch.bfloat16)
    assert isinstance(result, ScaleResult)
    assert all(torch.equal(a, b) for a, b in zip(half, copies[0], strict=True))
    assert torch.equal(hessian, copies[1])
    assert torch.equal(mean_abs, copies[2])


def test_c16_same_factor_twice_and_with_two_threads() -> None:
    ws, _, hessian, mean_abs = site(rows=512, width=128)
    threads = torch.get_num_threads()
    factors = []
    try:
        for count in (1, 1, 2):
            torch.set_num_threads(count)
            result = search_scale(ws, hessian, mean_abs, SCHEME, torch.bfloat16, steps=1, max_rows=64, clip="minmax")
            factors.append(result.factor)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(factors[0], factors[1])
    assert torch.equal(factors[0], factors[2])


def surrogate(w: Tensor, width: int, h: Tensor, log_s: Tensor) -> Tensor:
    """The loss that balancing minimizes, literally, in float64."""
    s = log_s.exp()
    total = torch.zeros((), dtype=torch.float64)
    for g in range(0, w.shape[1], width):
        columns = slice(g, g + width)
        ranges = (w[:, columns] * s[columns]).abs().pow(8).sum(1).pow(1 / 8)
        total = total + ranges.square().sum() * (h[columns] / s[columns].square()).sum()
    return total


@pytest.mark.parametrize("tied", [False, True])
def test_balancing_reaches_a_stationary_point_of_its_loss(tied: bool) -> None:
    ws, _, hessian, _ = site()
    w, h = ws[0].double(), hessian.diagonal().double()
    classes = tie_over_repeats(2, 2, 16) if tied else torch.arange(64)
    live = torch.ones(64, dtype=torch.bool)
    log_s = torch.zeros(64)
    for _ in range(8):
        terms = [RangeTerm(part, 16, hessian.diagonal(), 1.0) for part in (ws[0][:20], ws[0][20:])]
        log_s = balanced_log_factor(terms, log_s, live, classes)
    start = torch.zeros(64, dtype=torch.float64)
    free = class_mean(log_s, live, classes).double().requires_grad_()
    tracked = surrogate(w, 16, h, free)
    (gradient,) = torch.autograd.grad(tracked, free)
    loss = float(tracked.detach())
    by_class = torch.zeros(64, dtype=torch.float64).index_add_(0, classes, gradient)
    assert loss < 0.7 * float(surrogate(w, 16, h, start))
    assert float(by_class.abs().max()) < 1e-3 * loss


def test_class_mean_by_hand() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 5.0])
    live = torch.tensor([True, True, True, False])
    assert class_mean(values, live, torch.tensor([0, 1, 0, 2])).tolist() == [2.0, 2.0, 2.0, 0.0]
