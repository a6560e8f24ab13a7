"""Folding inside a layer: statistics follow the weights; and the guard that keeps plain rounding where it is better."""

from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny

from cann_llm_quant.calibrate.statistics import SiteStatistics, StatisticsCollector
from cann_llm_quant.calibrate.stream import run_layer
from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.models.weights import build_layer, load_layer
from cann_llm_quant.pipeline.linear import solve_linear
from cann_llm_quant.pipeline.smoothing import smooth_layer
from cann_llm_quant.quant import rtn
from cann_llm_quant.quant.scheme import ActivationScheme, Scheme, scheme_for
from cann_llm_quant.recipe import Recipe


def site_statistics(features: int, seed: int) -> SiteStatistics:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(200, features, generator=generator)
    x *= torch.empty(features).log_normal_(0.0, 1.5, generator=generator)
    return SiteStatistics(x.T @ x, x.abs().mean(0), x.abs().amax(0), 200)


def energy(weight: torch.Tensor, hessian: torch.Tensor) -> float:
    w, h = weight.double(), hessian.double()
    return float(torch.trace(w @ h @ w.T))


def test_folded_statistics_give_the_same_output_energy_with_folded_weights(tmp_path: Path) -> None:
    with open_checkpoint(str(save_tiny(tmp_path / "model"))) as checkpoint:
        arch = arch_from_checkpoint(checkpoint)
        tensors = load_layer(checkpoint, arch, 0, torch.device("cpu"), torch.float32)
    layer = arch.layers[0]
    statistics = {site.name: site_statistics(layer.linear(site.linears[0]).in_features, 1) for site in layer.sites}
    schemes = {spec.module: Scheme("int4", True, "group", 32) for spec in layer.linears}
    storage = dict.fromkeys(tensors, torch.bfloat16)
    smoothed = smooth_layer(arch, layer, dict(tensors), statistics, schemes, storage, Recipe(method="awq"), {})
    folded = [name for name, result in smoothed.searched.items() if result.rule != "identity"]
    assert {"qkv", "down"} <= set(folded)
    for role, site in (("q", "qkv"), ("down", "down")):
        name = f"{layer.linear(role).module}.weight"
        before = energy(tensors[name], statistics[site].hessian)
        after = energy(smoothed.tensors[name], smoothed.statistics[site].hessian)
        assert abs(after - before) < 1e-4 * before
        assert not torch.equal(smoothed.statistics[site].hessian, statistics[site].hessian)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mixtral"])
@pytest.mark.parametrize("method", ["smoothquant", "smoothquant+awq"])
def test_outliers_migrate_and_the_layer_computes_what_it_did(family: str, method: str, tmp_path: Path) -> None:
    """Channels of the norm thirty times too large, their columns as much smaller: W8A8 recovers, floats stay."""
    config = {"num_local_experts": 3} if family == "mixtral" else {}
    with open_checkpoint(str(save_tiny(tmp_path / "model", family, **config))) as checkpoint:
        arch = arch_from_checkpoint(checkpoint)
        tensors = load_layer(checkpoint, arch, 0, torch.device("cpu"), torch.float32)
    layer = arch.layers[0]
    tensors[next(p.name for p in layer.parameters if p.role == "input_norm")][:3] *= 30
    for role in "qkv":
        tensors[f"{layer.linear(role).module}.weight"][:, :3] /= 30
    x = torch.randn(1, 96, arch.hidden_size, generator=torch.Generator().manual_seed(0))
    collector = StatisticsCollector([site.name for site in layer.sites], sample_rows=64)
    before = next(run_layer(build_layer(arch, 0, tensors), iter([x]), 0, collector.observe))
    schemes = {spec.module: scheme_for(8, -1, symmetric=True) for spec in layer.linears if spec.quantizable}
    storage = dict.fromkeys(tensors, torch.bfloat16)
    smoothed = smooth_layer(
        arch,
        layer,
        dict(tensors),
        collector.finish(),
        schemes,
        storage,
        Recipe.model_validate({"method": method, "effort": "fast"}),
        dict.fromkeys(schemes, ActivationScheme()),
    )
    after = next(run_layer(build_layer(arch, 0, smoothed.tensors), iter([x]), 0))
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4 * float(before.abs().max()))
    result = smoothed.searched["qkv"]
    assert result.error < 0.2 * result.identity_error
    assert all(r.error <= r.identity_error for r in smoothed.searched.values())
    assert ("gate_up" in smoothed.searched) == (family != "mixtral")


def test_smoothquant_leaves_sites_whose_inputs_stay_in_float(tmp_path: Path) -> None:
    with open_checkpoint(str(save_tiny(tmp_path / "model"))) as checkpoint:
        arch = arch_from_checkpoint(checkpoint)
        tensors = load_layer(checkpoint, arch, 0, torch.device("cpu"), torch.float32)
    layer = arch.layers[0]
    statistics = {site.name: site_statistics(layer.linear(site.linears[0]).in_features, 1) for site in layer.sites}
    schemes = {spec.module: Scheme("int4", True, "group", 32) for spec in layer.linears}
    storage = dict.fromkeys(tensors, torch.bfloat16)
    smoothed = smooth_layer(arch, layer, tensors, statistics, schemes, storage, Recipe(method="smoothquant"), {})
    assert not smoothed.searched


def test_plain_rounding_is_kept_where_its_exact_error_is_lower() -> None:
    scheme, kept_plain = Scheme("int4", True, "group", 16), 0
    for seed in range(12):
        # Strong correlation between groups is what the search, optimal within groups only, does not see.
        generator = torch.Generator().manual_seed(seed)
        w = torch.randn(1, 32, generator=generator)
        x = torch.randn(64, 1, generator=generator) + 0.05 * torch.randn(64, 32, generator=generator)
        site = SiteStatistics(x.T @ x, x.abs().mean(0), x.abs().amax(0), 64)
        plain = rtn.solve(w, scheme, torch.float32)
        searched = rtn.solve(w, scheme, torch.float32, clip="mse", hessian=site.hessian)
        losses = [energy(q.dequantize() - w, site.hessian) for q in (searched, plain)]
        solved = solve_linear(w, scheme, torch.float32, site, clip=True, rtn_error=0.0)
        expected = searched if losses[0] <= losses[1] else plain
        assert torch.equal(solved.weight.codes, expected.codes)
        kept_plain += losses[1] < losses[0]
    assert kept_plain > 0
