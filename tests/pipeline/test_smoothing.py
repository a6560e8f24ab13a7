"""Folding inside a layer: statistics follow the weights; and the guard that keeps plain rounding where it is better."""

from pathlib import Path

import torch
from tiny_models import save_tiny

from cann_llm_quant.calibrate.statistics import SiteStatistics
from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.models.weights import load_layer
from cann_llm_quant.pipeline.linear import solve_linear
from cann_llm_quant.pipeline.smoothing import smooth_layer
from cann_llm_quant.quant import rtn
from cann_llm_quant.quant.scheme import Scheme


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
    smoothed = smooth_layer(arch, layer, dict(tensors), statistics, schemes, storage, clip=True)
    folded = [name for name, result in smoothed.searched.items() if result.rule != "identity"]
    assert {"qkv", "down"} <= set(folded)
    for role, site in (("q", "qkv"), ("down", "down")):
        name = f"{layer.linear(role).module}.weight"
        before = energy(tensors[name], statistics[site].hessian)
        after = energy(smoothed.tensors[name], smoothed.statistics[site].hessian)
        assert abs(after - before) < 1e-4 * before
        assert not torch.equal(smoothed.statistics[site].hessian, statistics[site].hessian)


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
