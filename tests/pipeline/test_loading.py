"""What transformers makes of outputs with several schemes and experts: the logits of our reader, or a warning first."""

from pathlib import Path

import pytest
import torch
from tiny_models import our_logits, save_text, save_tiny
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from cann_llm_quant.export.inference_config import load_inference_config
from cann_llm_quant.pipeline import RunOptions, quantize_model
from cann_llm_quant.recipe import Calibration, Recipe, Rule, WeightScheme

IDS = torch.randint(3, 128, (1, 24), generator=torch.Generator().manual_seed(3))
SIZES = {"num_hidden_layers": 2, "num_experts_per_tok": 2, "hidden_size": 64}
EXPERTS = {
    "qwen3_moe": SIZES | {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16},
    "mixtral": SIZES | {"num_local_experts": 4, "intermediate_size": 96},
}
ATTENTION_IN_INT8 = (Rule(match=("re:.*self_attn.*",), scheme=WeightScheme(bits=8)),)


def agree(out: Path, **options: object) -> None:
    """transformers' logits equal ours; experts are held in bf16 there, which is the tolerance."""
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, **options)
    with torch.inference_mode():
        expected = theirs(IDS).logits
    assert float((our_logits(out, IDS) - expected).abs().max()) < 0.02 * float(expected.abs().max())


@pytest.mark.parametrize("rules", [(), ATTENTION_IN_INT8], ids=["default", "int8 attention"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_beside_other_schemes_load(tmp_path: Path, family: str, rules: tuple[Rule, ...]) -> None:
    model = save_tiny(tmp_path / "model", family, **EXPERTS[family])
    report = quantize_model(str(model), tmp_path / "out", Recipe(method="rtn", rules=rules), options=RunOptions())
    assert len(report.formats) == 2
    assert report.warnings == []
    agree(tmp_path / "out")


def test_asymmetric_output_of_linears_with_different_widths_loads_dequantized(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "llama")  # 64 and 96 columns: symmetric groups would be 64 and 32
    recipe = Recipe(method="rtn", scheme=WeightScheme(symmetric=False))
    report = quantize_model(str(model), tmp_path / "out", recipe, options=RunOptions())
    assert list(report.formats) == ["int4-asym-g32-bfloat16"]
    agree(tmp_path / "out", quantization_config=CompressedTensorsConfig(dequantize=True))


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (Recipe(method="rtn", scheme=WeightScheme(symmetric=False)), "asymmetric experts"),
        (Recipe(method="rtn", rules=(Rule(match=("glob:*.experts.1.*",), scheme="skip"),)), "stay in float"),
    ],
)
def test_what_transformers_cannot_load_is_said_before_the_work(tmp_path: Path, recipe: Recipe, words: str) -> None:
    model = save_tiny(tmp_path / "model", "qwen3_moe", **EXPERTS["qwen3_moe"])
    report = quantize_model(str(model), tmp_path / "out", recipe, options=RunOptions())
    assert any(words in warning for warning in report.warnings)


@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize("every", [False, True])
def test_c52_experts_without_tokens_borrow_and_are_reported(tmp_path: Path, method: str, every: bool) -> None:
    model = save_tiny(tmp_path / "model", "qwen3_moe", **EXPERTS["qwen3_moe"] | {"num_experts": 16})
    calibration = Calibration(data=(str(save_text(tmp_path / "t.txt")),), samples=1, length=4)
    recipe = Recipe.model_validate({"method": method, "calibration": calibration, "moe_all_experts": every})
    report = quantize_model(str(model), tmp_path / "out", recipe, options=RunOptions())
    assert any("saw no calibration token" in warning for warning in report.warnings) is not every
    experts = {m: e for m, e in load_inference_config(tmp_path / "out").linears.items() if ".experts." in m}
    assert all(entry.error is not None for entry in experts.values())
    assert all((entry.borrowed > 0) is not every for entry in experts.values())
    gates = [entry for module, entry in experts.items() if module.endswith("gate_proj")]
    assert [sum(entry.routed or 0 for entry in gates[begin : begin + 16]) for begin in (0, 16)] == [8, 8]
    assert all(entry.tokens == (4 if every else entry.routed) for entry in gates)
    assert report.experts is not None
    assert (report.experts.count, report.experts.median_tokens) == (32, 0)
    assert bool(torch.isfinite(our_logits(tmp_path / "out", IDS)).all())
