"""What experts are measured on: routed tokens, borrowed ones, or all of them; the layer's output is never touched."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny
from torch import Tensor

from cann_llm_quant.calibrate.experts import ENOUGH_PER_COLUMN, ExpertCollector, expert_of
from cann_llm_quant.calibrate.statistics import SiteStatistics, StatisticsCollector
from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.models.attention import CausalAttend
from cann_llm_quant.models.decoder import DecoderLayer, DenseLinear
from cann_llm_quant.models.weights import build_layer, load_layer

EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 1, "hidden_size": 32, "intermediate_size": 16},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "head_dim": 8,
    },
}
SITES = [f"experts.{n}.{kind}" for n in range(4) for kind in ("gate_up", "down")]
TOKENS = 20


@pytest.fixture(scope="module", params=list(EXPERTS))
def layer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DecoderLayer:
    """A layer whose experts 2 and 3 are never chosen: of v x and -v x one is above 0 and above v x / 2."""
    folder = save_tiny(tmp_path_factory.mktemp("moe"), request.param, num_hidden_layers=1, **EXPERTS[request.param])
    with open_checkpoint(str(folder)) as checkpoint:
        arch = arch_from_checkpoint(checkpoint)
        built = build_layer(arch, 0, load_layer(checkpoint, arch, 0, torch.device("cpu"), torch.float32))
    v = torch.randn(32, generator=torch.Generator().manual_seed(5))
    router = DenseLinear(torch.stack([v, -v, v / 2, torch.zeros(32)]))
    return DecoderLayer(built.arch, built.layer, dict(built.linears) | {"router": router}, built.parameters)


def run(layer: DecoderLayer, observe: Callable[[str, Tensor], None] | None = None) -> Tensor:
    """Two windows through the layer."""
    x = torch.randn(2, TOKENS // 2, 32, generator=torch.Generator().manual_seed(6))
    positions = torch.arange(TOKENS // 2)[None]
    return torch.cat([layer(window[None], positions, CausalAttend(), observe) for window in x])


def seen_inputs(layer: DecoderLayer) -> dict[str, Tensor]:
    """Everything that the layer shows, all windows of a site in one tensor."""
    seen: dict[str, list[Tensor]] = {}
    run(layer, lambda site, x: seen.setdefault(site, []).append(x))
    return {site: torch.cat(windows) for site, windows in seen.items()}


def inner(layer: DecoderLayer, expert: int, x: Tensor) -> Tensor:
    """Input of an expert's down projection, written out."""
    gate, up = (layer.linears[f"experts.{expert}.{role}"].weight.double() for role in ("gate", "up"))
    z = x.double() @ gate.T
    return z * torch.sigmoid(z) * (x.double() @ up.T)


def close(measured: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(measured.double(), expected.double(), rtol=2e-5, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("every_token", [False, True])
def test_c52_calibrating_every_expert_leaves_the_output_bit_equal(layer: DecoderLayer, every_token: bool) -> None:
    collector = ExpertCollector(layer, SITES, every_token=every_token)
    assert torch.equal(run(layer, collector.observe), run(layer))
    assert sum(collector.routed) == TOKENS
    assert collector.routed[2:] == [0, 0]


def test_c52_every_expert_is_measured_on_every_token(layer: DecoderLayer) -> None:
    collector = ExpertCollector(layer, [*SITES, "qkv"], every_token=True)
    run(layer, collector.observe)
    found, x = collector.finish(), seen_inputs(layer)
    assert set(found) == {*SITES, "qkv"}
    for expert in range(4):
        for kind, inputs in (("gate_up", x["experts"].double()), ("down", inner(layer, expert, x["experts"]))):
            measured = found[f"experts.{expert}.{kind}"]
            assert measured.tokens == TOKENS
            assert measured.borrowed == 0
            close(measured.hessian, inputs.T @ inputs)
            close(measured.mean_abs, inputs.abs().mean(0))
            close(measured.amax, inputs.abs().amax(0))
    close(found["qkv"].hessian, x["qkv"].double().T @ x["qkv"].double())


def test_experts_borrow_from_all_tokens_by_the_chance_that_the_router_gives_them(layer: DecoderLayer) -> None:
    collector = ExpertCollector(layer, SITES)
    run(layer, collector.observe)
    found, seen = collector.finish(), seen_inputs(layer)
    x = seen["experts"].double()
    chances = torch.softmax(x @ layer.linears["router"].weight.double().T, dim=-1)
    for expert in range(4):
        p = chances[:, expert]
        worth = round(float(p.sum() ** 2 / (p**2).sum()))
        for kind, inputs in (("gate_up", x), ("down", inner(layer, expert, x))):
            columns = inputs.shape[1]
            weighted = torch.zeros(columns, columns, dtype=torch.float64)
            for row, weight in zip(inputs, p, strict=True):
                weighted += weight / p.sum() * row[:, None] * row[None, :]
            diagonal = weighted.diagonal()
            weighted += torch.diag(0.125 * columns / worth * (diagonal + diagonal.mean()) / 2)
            borrowed = min(columns, worth)
            own = seen.get(f"experts.{expert}.{kind}", torch.zeros(0, columns)).double()
            measured = found[f"experts.{expert}.{kind}"]
            assert (measured.tokens, measured.borrowed) == (len(own), borrowed)
            assert measured.evidence == len(own) + borrowed
            close(measured.hessian, own.T @ own + borrowed * weighted)
            close(measured.mean_abs, (own.abs().sum(0) + borrowed * (p / p.sum()) @ inputs.abs()) / measured.evidence)


def test_an_expert_without_tokens_has_statistics_and_one_with_many_keeps_its_own(layer: DecoderLayer) -> None:
    collector, plain = ExpertCollector(layer, SITES, sample_rows=8), StatisticsCollector(SITES)
    for _ in range(2 * ENOUGH_PER_COLUMN):
        run(layer, collector.observe)
        run(layer, plain.observe)
    found, own = collector.finish(), plain.finish()
    for site in SITES:
        measured = found[site]
        if expert_of(site) in (2, 3):
            assert measured.tokens == 0
            assert measured.borrowed > 0
            assert float(measured.hessian.diagonal().min()) > 0
            assert float(measured.amax.min()) > 0
            assert measured.sample is not None
            assert measured.sample.shape == (8, measured.hessian.shape[0])
        elif own[site].tokens >= ENOUGH_PER_COLUMN * own[site].hessian.shape[0]:
            assert torch.equal(measured.hessian, own[site].hessian)
            assert measured.borrowed == 0
        else:
            assert measured.borrowed > 0
    assert any(isinstance(s, SiteStatistics) and not s.borrowed for s in found.values())


def test_an_expert_that_the_router_all_but_excludes_counts_all_tokens_alike(layer: DecoderLayer) -> None:
    v = layer.linears["router"].weight[0]
    shut = DecoderLayer(
        layer.arch,
        layer.layer,
        dict(layer.linears) | {"router": DenseLinear(torch.stack([v, -v, v / 2, torch.zeros(32)]) * 1e4)},
        layer.parameters,
    )
    collector = ExpertCollector(shut, ["experts.3.gate_up"])
    run(shut, collector.observe)
    measured, x = collector.finish()["experts.3.gate_up"], seen_inputs(shut)["experts"]
    assert measured.borrowed == TOKENS
    close(measured.mean_abs, x.abs().mean(0))


def test_a_layer_without_experts_is_measured_as_ever(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama", num_hidden_layers=1, hidden_size=32)
    with open_checkpoint(str(folder)) as checkpoint:
        arch = arch_from_checkpoint(checkpoint)
        dense = build_layer(arch, 0, load_layer(checkpoint, arch, 0, torch.device("cpu"), torch.float32))
    sites = [site.name for site in arch.layers[0].sites]
    collector, plain = ExpertCollector(dense, sites, every_token=True), StatisticsCollector(sites)
    run(dense, collector.observe)
    run(dense, plain.observe)
    found, expected = collector.finish(), plain.finish()
    assert set(found) == set(expected)
    assert all(torch.equal(found[site].hessian, expected[site].hessian) for site in sites)
    assert collector.routed == []
