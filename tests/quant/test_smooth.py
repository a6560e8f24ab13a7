"""SmoothQuant and its union with AWQ: the factor by hand, the objective in float64, dead channels, storage range."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cann_llm_quant.quant.awq import search_scale, weight_terms
from cann_llm_quant.quant.balance import balanced_log_factor
from cann_llm_quant.quant.fold import tie_over_repeats
from cann_llm_quant.quant.rtn import solve
from cann_llm_quant.quant.scale_search import Channels, ScaleSite, SearchEffort, SiteInputs
from cann_llm_quant.quant.scheme import ActivationScheme, Scheme, scheme_for
from cann_llm_quant.quant.smooth import (
    _input_term,
    jointly_balanced_candidates,
    migration_candidates,
    search_migration,
    search_migration_and_protection,
)

W8, W4 = scheme_for(8, -1, symmetric=True), scheme_for(4, 16, symmetric=True)
TOKEN, STATIC = ActivationScheme(), ActivationScheme("int8", True, False, "tensor")
ROWS, WIDTH = 200, 64


def outliers(seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Two linears and their input, of which three channels are forty times as large as the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    x[:, [3, 17, 40]] *= 40
    return [torch.randn(n, WIDTH, generator=generator) for n in (48, 24)], x


def make_site(
    ws: list[Tensor],
    x: Tensor,
    scheme: Scheme,
    activation: ActivationScheme | None,
    storage: torch.dtype = torch.bfloat16,
) -> ScaleSite:
    inputs = None if activation is None else SiteInputs(activation, x, x.abs().amax(0), x.shape[0])
    return ScaleSite(ws, x.T @ x, [scheme] * len(ws), storage, storage, "minmax", None, inputs)


def rounded_input(x: Tensor, per_token: bool) -> Tensor:
    """Symmetric int8 by its definition, in float64: 255 steps from -max to max."""
    largest = x.abs().amax(1, keepdim=True) if per_token else x.abs().amax()
    step = largest.double() / 127.5
    return (x.double() / step).round().clamp(-128, 127) * step


@pytest.mark.parametrize(("scheme", "activation"), [(W8, TOKEN), (W8, STATIC), (W4, TOKEN)])
def test_the_objective_is_what_the_outputs_move_by(scheme: Scheme, activation: ActivationScheme) -> None:
    """Against the quantized product itself, in float64: equal but for the product of both errors."""
    ws, x = outliers()
    factor = x.abs().amax(0).sqrt()
    found = make_site(ws, x, scheme, activation).error(factor, "full")
    moved_in = rounded_input(x / factor, activation.dynamic) - (x / factor).double()
    apart = together = 0.0
    for w in ws:
        q = solve(w * factor, scheme, torch.bfloat16).dequantize().double()
        exact = x.double() @ w.double().T
        apart += float((moved_in @ (w * factor).double().T).square().sum())
        apart += float(((x / factor).double() @ (q - (w * factor).double()).T).square().sum())
        together += float((rounded_input(x / factor, activation.dynamic) @ q.T - exact).square().sum())
    assert math.isclose(found, apart, rel_tol=1e-3)
    assert math.isclose(found, together, rel_tol=0.05)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_the_factor_is_the_papers(alpha: float) -> None:
    """x^alpha / m^(1-alpha) by hand: x = 8, 2, 1, 1 and m = 1, 4, 1, 2; brought to sqrt(max * min) = 1."""
    x = torch.tensor([[8.0, 1.0, 1.0, -1.0], [1.0, -2.0, 0.5, 1.0]]).repeat(20, 1)
    w = torch.tensor([[1.0, 4.0, -1.0, 1.0], [0.5, 1.0, 1.0, -2.0]])
    by_hand = {0.0: [1, 1 / 4, 1, 1 / 2], 0.5: [8**0.5, 0.5**0.5, 1, 0.5**0.5], 1.0: [8, 2, 1, 1]}[alpha]
    expected = torch.tensor(by_hand) / math.sqrt(max(by_hand) * min(by_hand))
    site = make_site([w], x, W8, STATIC)
    (candidate,) = migration_candidates(site, Channels.of(x.abs().amax(0), site.column_max(), None), [alpha])
    torch.testing.assert_close(candidate.factor, expected)
    result = search_migration(site, alpha=alpha)
    assert result.rule == "identity" or torch.equal(result.factor, candidate.factor)
    assert alpha != 0.5 or (result.rule, result.ratio) == ("smoothquant", 0.5)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_c04_dead_channels_keep_the_factor_one(alpha: float) -> None:
    """A channel that carries nothing, and one that no weight reads: 1 for both, and the product stays what it was."""
    ws, x = outliers()
    x[:, 5] = 0
    for w in ws:
        w[:, 9] = 0
    site = make_site(ws, x, W8, STATIC)
    factor = search_migration(site, alpha=alpha).factor
    assert float(factor[5]) == float(factor[9]) == 1.0
    assert bool(torch.isfinite(factor).all() and (factor > 0).all())
    for w in ws:
        torch.testing.assert_close((x / factor) @ (w * factor).T, x @ w.T, rtol=1e-5, atol=1e-3)
    hybrid = search_migration_and_protection(site, x.abs().mean(0)).factor
    assert float(hybrid[5]) == float(hybrid[9]) == 1.0


@pytest.mark.parametrize("effort", ["fast", "balanced", "best"])
@pytest.mark.parametrize(("scheme", "activation"), [(W8, TOKEN), (W8, STATIC), (W4, TOKEN)])
def test_outliers_migrate_and_the_hybrid_is_best(
    effort: SearchEffort, scheme: Scheme, activation: ActivationScheme
) -> None:
    ws, x = outliers()
    site, mean_abs = make_site(ws, x, scheme, activation), x.abs().mean(0)
    migrated = search_migration(site, effort=effort)
    protected = search_scale(replace(site, inputs=None), mean_abs, effort=effort)
    hybrid = search_migration_and_protection(site, mean_abs, effort=effort)
    errors = [site.error(r.factor, "full") for r in (migrated, protected, hybrid)]
    plain = site.error(torch.ones(WIDTH), "full")
    assert errors[0] < (0.3 if scheme == W8 else 0.7) * plain
    assert errors[2] <= 1.02 * min(errors)
    if scheme == W8:
        assert errors[2] < 0.9 * errors[1]


def test_floats_in_leave_awqs_search() -> None:
    ws, x = outliers()
    site, mean_abs = make_site(ws, x, W4, None), x.abs().mean(0)
    hybrid = search_migration_and_protection(site, mean_abs, effort="balanced")
    alone = search_scale(site, mean_abs, effort="balanced")
    assert torch.equal(hybrid.factor, alone.factor)
    assert hybrid.rule == alone.rule != "identity"
    with pytest.raises(ValueError, match="inputs that are quantized"):
        search_migration(site)


@pytest.mark.parametrize("seed", range(3))
def test_never_worse_than_no_factor(seed: int) -> None:
    """Inputs without outliers, where every alpha loses."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, generator=generator).sign()
    ws = [torch.randn(40, WIDTH, generator=generator).sign() * torch.randn(WIDTH, generator=generator).exp()]
    for alpha in (None, 0.0, 1.0):
        result = search_migration(make_site(ws, x, W8, TOKEN), alpha=alpha)
        assert result.error <= result.identity_error


@pytest.mark.parametrize("activation", [TOKEN, STATIC])
@pytest.mark.parametrize("tied", [False, True])
def test_joint_balance_is_a_stationary_point_of_both_losses(activation: ActivationScheme, tied: bool) -> None:
    """The sum of both terms, literally, in float64; its gradient by autograd."""
    ws, x = outliers()
    site = make_site(ws, x, W4, activation)
    tie = tie_over_repeats(2, 2, 16) if tied else None
    channels = Channels.of(x.abs().mean(0), site.column_max(), tie)
    assert site.inputs is not None
    terms = [*weight_terms(site), _input_term(site, site.inputs, 255)]
    log_s = torch.zeros(WIDTH)
    for _ in range(40):
        log_s = balanced_log_factor(terms, log_s, channels.live, channels.classes)
    free = log_s.double().requires_grad_()
    s = free.exp()

    def norm8(matrix: Tensor) -> Tensor:
        return matrix.abs().pow(8).sum(-1).pow(1 / 8)

    loss = torch.zeros((), dtype=torch.float64)
    for w in ws:
        for g in range(0, WIDTH, 16):
            part = slice(g, g + 16)
            energy = (x.double()[:, part].square().sum(0) / s[part].square()).sum()
            loss = loss + norm8(w.double()[:, part] * s[part]).square().sum() * energy / 15**2
    reads = torch.cat(ws).double().square().sum(0) * s.square()
    rows = x.double() if activation.dynamic else x.double().abs().amax(0, keepdim=True)
    repeats = 1 if activation.dynamic else ROWS
    loss = loss + repeats * norm8(rows / s).square().sum() * reads.sum() / 255**2
    (gradient,) = torch.autograd.grad(loss, free)
    by_class = torch.zeros(WIDTH, dtype=torch.float64).index_add_(0, channels.classes, gradient)
    assert float(by_class.abs().max()) < 1e-3 * float(loss.detach())


def test_float8_inputs_follow_no_range_and_empty_samples_cost_nothing() -> None:
    ws, x = outliers()
    channels = Channels.of(x.abs().mean(0), make_site(ws, x, W8, TOKEN).column_max(), None)
    assert not list(jointly_balanced_candidates(make_site(ws, x, W8, ActivationScheme("fp8_e4m3")), channels))
    empty = ScaleSite(ws, x.T @ x, [W8, W8], torch.bfloat16, inputs=SiteInputs(TOKEN, x[:0], x.abs().amax(0), 0))
    floats = ScaleSite(ws, x.T @ x, [W8, W8], torch.bfloat16)
    assert empty.error(torch.ones(WIDTH), "full") == floats.error(torch.ones(WIDTH), "full")
    assert search_migration_and_protection(empty, x.abs().mean(0)).error > 0


def test_c08_a_migration_keeps_the_storage_range() -> None:
    """Outliers of 3e4 moved into weights near fp16's end would make them infinite."""
    ws, x = outliers()
    big = [w * (60000 / float(w.abs().max())) for w in ws]
    wide = search_migration(make_site(big, x, W8, STATIC))
    assert float((big[0] * wide.factor).abs().max()) > 65504
    narrow = search_migration_and_protection(make_site(big, x, W8, STATIC, torch.float16), x.abs().mean(0))
    assert all(float((w * narrow.factor).abs().max()) <= 65504 for w in big)


@pytest.mark.parametrize("effort", ["fast", "balanced"])
def test_a_quick_search_finds_nearly_what_the_full_one_finds(effort: SearchEffort) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(400, WIDTH, generator=generator) * torch.randn(WIDTH, generator=generator).mul(1.5).exp()
    ws = [torch.randn(n, WIDTH, generator=generator) for n in (600, 300)]
    site, mean_abs = ScaleSite(ws, x.T @ x, [W4, W4], torch.bfloat16), x.abs().mean(0)
    full = search_scale(site, mean_abs, effort="best")
    quick = search_scale(site, mean_abs, effort=effort)
    assert site.error(quick.factor, "full") < 1.03 * full.error
    assert math.isclose(quick.identity_error, full.identity_error, rel_tol=0.25)


def test_fused_matrices_share_their_scale_when_judged() -> None:
    """One scale for the tensor: both linears are rounded with the larger one's."""
    ws, x = outliers()
    ws[1] = ws[1] * 0.1
    scheme = Scheme("int8", True, "tensor", None)
    site = ScaleSite(ws, x.T @ x, [scheme, scheme], torch.float32, clip="minmax")
    step = max(float(w.abs().max()) for w in ws) / 127.5
    expected = 0.0
    for w in ws:
        moved = (w.double() / step).round().clamp(-128, 127) * step - w.double()
        expected += float((x.double() @ moved.T).square().sum())
    assert math.isclose(site.error(torch.ones(WIDTH), "full"), expected, rel_tol=1e-3)
