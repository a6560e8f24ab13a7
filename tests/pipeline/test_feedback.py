"""Error feedback as a whole run: better than rounding on every linear, and what it says where it cannot work."""

import json
from pathlib import Path

import pytest
import torch
from tiny_models import save_text, save_tiny

from cann_llm_quant.errors import UsageError
from cann_llm_quant.pipeline import QuantizeReport, RunOptions, quantize_model
from cann_llm_quant.recipe import Calibration, Recipe, WeightScheme, validate_recipe


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text(tmp_path_factory.mktemp("text") / "text.txt")


def quantize(model: Path, out: Path, text: Path, samples: int = 8, **fields: object) -> QuantizeReport:
    calibration = Calibration(data=(str(text),), samples=samples, length=32)
    recipe = Recipe.model_validate({"scheme": WeightScheme(group_size=32), "calibration": calibration} | fields)
    return quantize_model(str(model), out, recipe, options=RunOptions())


def linears(out: Path) -> dict[str, dict[str, float]]:
    return dict(json.loads((out / "inference_config.json").read_text(encoding="utf-8"))["linears"])


@pytest.mark.parametrize(
    ("family", "method"), [("llama", "awq+gptq"), ("qwen3", "gptq"), ("qwen2_moe", "gptq"), ("mixtral", "awq+gptq")]
)
def test_no_linear_is_worse_than_plain_rounding(tmp_path: Path, text: Path, family: str, method: str) -> None:
    model = save_tiny(tmp_path / "model", family)
    report = quantize(model, tmp_path / "out", text, method=method)
    found = linears(tmp_path / "out")
    assert len(found) == report.quantized_linears
    for module, entry in found.items():
        assert entry["error"] <= entry["rtn_error"], module
    assert report.mean_error is not None
    assert report.mean_rtn_error is not None
    assert report.mean_error < 0.7 * report.mean_rtn_error


def test_more_effort_leaves_less_error(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model")
    errors = {}
    for effort in ("balanced", "best"):
        errors[effort] = quantize(model, tmp_path / effort, text, method="gptq", effort=effort).mean_error
    assert errors["best"] < errors["balanced"]


def test_c05_few_tokens_are_quantized_and_said(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model")
    report = quantize(model, tmp_path / "out", text, samples=1, method="gptq")
    assert report.mean_error is not None


def test_c05_a_site_that_carries_nothing_is_rounded_with_a_warning(tmp_path: Path, text: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = save_tiny(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"].zero_()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    report = quantize(model, tmp_path / "out", text, method="gptq")
    said = [warning for warning in report.warnings if "down_proj" in warning]
    assert said
    assert "cannot be factorized" in said[0]
    assert "tokens" in said[0]


def test_no_clip_keeps_the_whole_range_of_each_group(tmp_path: Path, text: Path) -> None:
    from safetensors.torch import load_file

    model = save_tiny(tmp_path / "model")
    for name, clip in (("searched", True), ("spanned", False)):
        quantize(model, tmp_path / name, text, method="gptq", effort="fast", clip=clip)
    q = "model.layers.0.self_attn.q_proj.weight"
    groups = load_file(model / "model.safetensors")[q].float().view(64, 2, 32)
    scales = {n: load_file(tmp_path / n / "model.safetensors")[f"{q}_scale"].float() for n in ("searched", "spanned")}
    assert torch.allclose(scales["spanned"], groups.abs().amax(-1) / 7.5, rtol=0.01)
    assert scales["searched"].mean() < 0.98 * scales["spanned"].mean()


@pytest.mark.parametrize("fields", [{"method": "awq"}, {"method": "gptq", "effort": "fast"}])
def test_tuning_where_nothing_can_be_tuned_is_refused(fields: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="tuning_steps"):
        validate_recipe({"tuning_steps": 5, **fields}, "the command line")


def test_tuning_beside_quantized_inputs_is_refused_before_the_work(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model")
    with pytest.raises(UsageError, match="inputs are quantized"):
        quantize(model, tmp_path / "out", text, method="gptq", tuning_steps=5, scheme="W8A8")
    assert not list(tmp_path.glob("out*"))
