"""Whole runs with quantized inputs: transformers, which quantizes them as compressed-tensors does, gives our logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import our_logits, save_text, save_tiny
from transformers import AutoModelForCausalLM

from cann_llm_quant.export.inference_config import load_inference_config
from cann_llm_quant.pipeline import Event, RunOptions, quantize_model
from cann_llm_quant.recipe import ActivationFormat, Calibration, Recipe, WeightScheme
from cann_llm_quant.runner.engine import LLMEngine

IDS = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(3))
STATIC = ActivationFormat(dynamic=False)


def scheme(activations: ActivationFormat, **weights: Any) -> WeightScheme:
    return WeightScheme(**({"bits": 8, "group_size": -1} | weights), activations=activations)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float32)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    path = save_text(tmp_path_factory.mktemp("text") / "text.txt")
    return Calibration(data=(str(path),), samples=8, length=32)


def quantized(model: Path, out: Path, recipe: Recipe) -> Path:
    quantize_model(str(model), out, recipe, options=RunOptions())
    return out


CASES = {
    "W8A8": scheme(ActivationFormat()),
    "W8A8 asymmetric": scheme(ActivationFormat(symmetric=False)),
    "W8A8 static": scheme(STATIC),
    "W8A8 static asymmetric": scheme(ActivationFormat(dynamic=False, symmetric=False, range="percentile")),
    "W4A8 groups": scheme(ActivationFormat(), bits=4, group_size=32),
    "FP8": scheme(ActivationFormat(type="fp8"), type="fp8"),
    "FP8 static": scheme(ActivationFormat(type="fp8", dynamic=False, range="mse"), type="fp8"),
    "MXFP4": WeightScheme(type="mxfp4", activations=ActivationFormat(type="mxfp4")),
    "NVFP4": WeightScheme(type="nvfp4", activations=ActivationFormat(type="nvfp4")),
}


@pytest.mark.parametrize("name", [name for name in CASES if "FP4" not in name])
def test_transformers_gives_our_logits(name: str, model: Path, text: Calibration, tmp_path: Path) -> None:
    """To 1e-4 of what quantizing changed, for most tokens: a value between two codes may fall to either side, which
    changes this token and those that attend to it.
    """
    out = quantized(model, tmp_path / "out", Recipe(method="rtn", scheme=CASES[name], calibration=text))
    expected = logits(out)
    changed = (logits(model) - expected).square().mean(-1).sqrt()
    for ours in (our_logits(out, IDS), torch.stack(list(LLMEngine(out).logits(IDS)))):
        apart = (ours - expected).square().mean(-1).sqrt() / changed
        assert float(apart.median()) < 1e-4
        assert float(apart.mean()) < 0.3


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(IDS).logits


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
def test_transformers_linears_give_what_ours_give(name: str, model: Path, text: Calibration, tmp_path: Path) -> None:
    """compressed-tensors decompresses the 4-bit floats to bfloat16 alone, so linears are compared one by one."""
    out = quantized(model, tmp_path / "out", Recipe(method="rtn", scheme=CASES[name], calibration=text))
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for module, linear in theirs.model.layers[1].named_modules():
        if isinstance(linear, torch.nn.Linear):
            role = module.split(".")[-1].removesuffix("_proj")
            linear.register_forward_hook(lambda _, x, y, role=role: seen.update({role: (x[0], y)}))
    with torch.inference_mode():
        theirs(IDS)
        torch.nn.Module.float(theirs)
        theirs(IDS)
    engine = LLMEngine(out)
    assert len(seen) == 7
    for role, (x, expected) in seen.items():
        found = engine.model.layers[1].linears[role](x)
        assert float((found - expected).norm()) < 0.01 * float(expected.norm()), role


def test_static_ranges_are_those_of_the_values_that_the_linears_read(
    model: Path, text: Calibration, tmp_path: Path
) -> None:
    """Observed by a hook on transformers' copy of the first layer, whose input no quantization has touched."""
    from cann_llm_quant.corpus import load_windows, parse_source
    from cann_llm_quant.tokenizer import load_tokenizer

    recipe = Recipe(method="rtn", scheme=scheme(STATIC), calibration=text)
    out = quantized(model, tmp_path / "out", recipe)
    stored = load_file(out / "model.safetensors")
    windows = load_windows(
        [parse_source(text.data[0])], load_tokenizer(model), samples=text.samples, length=text.length, seed=text.seed
    ).ids
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    seen: list[float] = []
    theirs.model.layers[0].self_attn.q_proj.register_forward_hook(lambda _, x, y: seen.append(float(x[0].abs().max())))
    with torch.inference_mode():
        for window in windows:
            theirs(window[None])
    name = "model.layers.0.self_attn.{}_proj.input_scale"
    scales = [float(stored[name.format(part)]) for part in "qkv"]
    assert scales == pytest.approx([max(seen) / 127.5] * 3, rel=1e-5)


@pytest.mark.parametrize("method", ["rtn", "awq", "gptq", "awq+gptq"])
def test_every_method_stores_the_ranges(method: str, model: Path, text: Calibration, tmp_path: Path) -> None:
    recipe = Recipe(method=method, scheme=scheme(STATIC), calibration=text)
    out = quantized(model, tmp_path / "out", recipe)
    stored = load_file(out / "model.safetensors")
    scales = {name: float(value) for name, value in stored.items() if name.endswith(".input_scale")}
    config = load_inference_config(out)
    assert {f"{module}.input_scale" for module in config.inputs.linears} == set(scales)
    assert len(scales) == 14
    assert all(0 < value < 10 and value != 1.0 for value in scales.values())
    assert set(config.inputs.schemes) == {"int8-static"}
    for layer in (0, 1):
        of = {n: scales[f"model.layers.{layer}.{n}_proj.input_scale"] for n in ("mlp.gate", "mlp.up", "mlp.down")}
        assert of["mlp.gate"] == of["mlp.up"] != of["mlp.down"]


@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize("activations", [ActivationFormat(), STATIC], ids=["dynamic", "static"])
def test_a_stopped_run_ends_bit_identical(
    method: str, activations: ActivationFormat, model: Path, text: Calibration, tmp_path: Path
) -> None:
    """States are held in memory, so that the resumed run replays the stored layers with their quantized inputs."""
    recipe = Recipe(method=method, scheme=scheme(activations), calibration=text)
    whole = quantized(model, tmp_path / "whole", recipe)

    def stop(event: Event) -> None:
        if event.layer == "layer 2/2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(str(model), tmp_path / "out", recipe, options=RunOptions(), progress=stop)
    out = quantized(model, tmp_path / "out", recipe)
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_rounding_without_stored_ranges_reads_no_text(model: Path, tmp_path: Path) -> None:
    recipe = Recipe(method="rtn", scheme=scheme(ActivationFormat()))
    report = quantize_model(str(model), tmp_path / "out", recipe, options=RunOptions())
    assert report.calibration is None
    assert report.formats == {"int8-sym-channel-float32 with int8-token inputs": 14}


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_c52_no_expert_has_a_placeholder_for_a_range(tmp_path: Path, method: str, every: bool) -> None:
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    model = save_tiny(tmp_path / "model", "qwen3_moe", dtype=torch.float32, **sizes)
    calibration = Calibration(data=(str(save_text(tmp_path / "t.txt")),), samples=4, length=4)
    recipe = Recipe(method=method, scheme=scheme(STATIC), calibration=calibration, moe_all_experts=every)
    report = quantize_model(str(model), tmp_path / "out", recipe, options=RunOptions())
    stored = load_file(tmp_path / "out" / "model.safetensors")
    scales = {name: float(value) for name, value in stored.items() if name.endswith(".input_scale")}
    experts = {name: value for name, value in scales.items() if ".experts." in name}
    assert len(experts) == 2 * 8 * 3
    assert all(0 < value < 10 and value != 1.0 for value in experts.values())
    downs = [value for name, value in experts.items() if "layers.0" in name and "down" in name]
    assert (len(set(downs)) == 8) == every, "on every token each expert has a range of its own"
    assert any("fewer than 128 calibration tokens" in warning for warning in report.warnings) != every
