"""Mixtures through the whole run: routers untouched in every family, and what is reported of experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_quantize import quantize
from tiny_models import our_logits, save_text, save_tiny

from cann_llm_quant.export.inference_config import load_inference_config
from cann_llm_quant.models.arch import Arch, Layer, LinearSpec, Rope
from cann_llm_quant.pipeline.expert_counts import expert_counts
from cann_llm_quant.recipe import WeightScheme

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 48},
    "qwen3_moe": MOE | {"head_dim": 16},
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return save_text(tmp_path / "text.txt")


@pytest.mark.parametrize("family", FAMILIES)
def test_c51_routers_and_gates_are_bit_equal_and_shared_experts_are_quantized(
    tmp_path: Path, text: Path, family: str
) -> None:
    model = save_tiny(tmp_path / "model", family, num_hidden_layers=1, **FAMILIES[family])
    int8 = WeightScheme(bits=8, group_size=-1)
    quantize(model, tmp_path / "out", text, method="awq+gptq", effort="fast", head=int8, embedding=int8)
    source, written = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "out"))
    gates = [name for name in source if name.endswith(("mlp.gate.weight", "moe.gate.weight", "expert_gate.weight"))]
    assert len(gates) == (2 if family == "qwen2_moe" else 1)
    assert all(torch.equal(source[name], written[name]) for name in gates)
    inference = load_inference_config(tmp_path / "out")
    assert sorted(inference.weights.float_) == sorted(name.removesuffix(".weight") for name in gates)
    quantized = {name.removesuffix(".weight") for name, tensor in source.items() if tensor.dim() == 2} - set(
        inference.weights.float_
    )
    assert set(inference.weights.linears) == quantized
    assert bool(torch.isfinite(our_logits(tmp_path / "out", torch.arange(3, 20)[None])).all())


def test_counts_are_of_what_the_router_sent(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model", "qwen3_moe", num_hidden_layers=2, **FAMILIES["qwen3_moe"])
    reports = {
        every: quantize(model, tmp_path / str(every), text, method="awq", moe_all_experts=every)
        for every in (False, True)
    }
    counts = reports[False].experts
    assert counts is not None
    linears = load_inference_config(tmp_path / "False").linears
    routed = sorted(entry.routed or 0 for name, entry in linears.items() if name.endswith("gate_proj"))
    assert (counts.count, counts.min_tokens, counts.max_tokens) == (8, routed[0], routed[-1])
    assert counts.median_tokens == (routed[3] + routed[4]) / 2
    assert sum(routed) == 2 * 2 * 4 * 32
    every = load_inference_config(tmp_path / "True").linears
    assert {entry.tokens for name, entry in every.items() if ".experts." in name} == {4 * 32}
    assert reports[True].experts is not None
    assert reports[True].experts.every_token
    # Layer 0 routes alike in both: the flag changes what is measured, not what is computed.
    layer0 = [name for name in linears if ".layers.0." in name and name.endswith("gate_proj")]
    assert [linears[name].routed for name in layer0] == [every[name].routed for name in layer0]


def test_a_model_without_experts_or_text_has_no_counts(tmp_path: Path, text: Path) -> None:
    dense = save_tiny(tmp_path / "dense", num_hidden_layers=1)
    assert quantize(dense, tmp_path / "out", text).experts is None
    mixture = save_tiny(tmp_path / "moe", "qwen3_moe", num_hidden_layers=1, **FAMILIES["qwen3_moe"])
    assert quantize(mixture, tmp_path / "out2", text, method="rtn").experts is None


def test_counts_by_hand() -> None:
    linears = tuple(LinearSpec(f"experts.{n}.gate", f"m{n}", 8, 8) for n in range(5))
    arch = Arch("x", 9, 8, 1, 1, 8, 8, 9, 1e-5, Rope(), (Layer(0, linears, (), (), ()),))
    seen = {"m0": (0, 8), "m1": (10, 4), "m2": (300, 0), "m3": (50, 1)}
    entries = {module: {"routed": routed, "borrowed": borrowed} for module, (routed, borrowed) in seen.items()}
    found = expert_counts(arch, entries, few_tokens=50, every_token=False)
    assert found is not None
    assert (found.count, found.min_tokens, found.median_tokens, found.max_tokens) == (4, 0, 30.0, 300)
    assert (found.few, found.unseen, found.borrowing) == (2, 1, 3)
