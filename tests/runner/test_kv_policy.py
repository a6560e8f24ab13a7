"""The KV policy of a run: the files', or what is asked for instead; foreign folders whose cache alone is quantized."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.cli.main import main
from cann_llm_quant.errors import CheckpointError, UsageError
from cann_llm_quant.kv_recipe import KvRecipe
from cann_llm_quant.quant.kv import KvScheme
from cann_llm_quant.runner import LLMEngine
from cann_llm_quant.runner.kv_policy import KvChoice, resolve_plan

PROMPT = [3, 4, 5, 6, 7]


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Float weights with a calibrated fp8 cache, without what only our runner reads: as llm-compressor writes it."""
    root = tmp_path_factory.mktemp("cache")
    save_tiny(root / "float")
    (root / "text.txt").write_text(" ".join(f"w{i % 90}" for i in range(400)), encoding="utf-8")
    command = ["quantize", str(root / "float"), "-o", str(root / "out"), "--method", "none", "--kv-cache", "fp8_e4m3"]
    assert main([*command, "--data", str(root / "text.txt"), "--samples", "2", "--seq-len", "32"]) == 0
    (root / "out" / "inference_config.json").unlink()
    return root / "out"


def test_a_folder_whose_cache_alone_is_quantized_runs_with_its_scales(cached: Path) -> None:
    with LLMEngine(cached) as engine:
        assert [layer.k for layer in engine.kv_plan.layers] == [KvScheme("fp8_e4m3")] * 2
        stored = load_file(cached / "model.safetensors")
        for index, scales in enumerate(engine.kv_plan.scales):
            assert scales.k_scale is not None
            assert scales.k_scale.item() == stored[f"model.layers.{index}.self_attn.k_scale"].item()
        assert len(engine.generate(PROMPT, 40, ignore_eos=True).token_ids) == 40


def test_scales_that_were_never_measured_stop_the_policy_and_not_the_model(cached: Path, tmp_path: Path) -> None:
    for file in cached.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    ones = {name: torch.ones_like(x) if name.endswith(("k_scale", "v_scale")) else x for name, x in tensors.items()}
    save_file(ones, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1\.0"):
        LLMEngine(tmp_path)
    with LLMEngine(tmp_path, kv_cache="float") as plain, LLMEngine(tmp_path, kv_cache="int8-token") as dynamic:
        assert not plain.kv_plan.quantizes
        assert dynamic.generate(PROMPT, 20, ignore_eos=True).finish_reason == "length"


def test_a_given_scheme_replaces_the_whole_policy(tmp_path: Path) -> None:
    save_tiny(tmp_path / "float")
    command = ["quantize", str(tmp_path / "float"), "-o", str(tmp_path / "out"), "--method", "none"]
    command += ["--kv-cache", "int4-token", "--kv-sink-tokens", "8", "--kv-page-size", "128"]
    assert main(command) == 0
    with LLMEngine(tmp_path / "out") as own:
        assert own.kv_plan.sink_tokens == 8
        assert own.options.page_size == 128
    with LLMEngine(tmp_path / "out", kv_cache="int8-token") as other:
        assert other.kv_plan.sink_tokens == 0
    with LLMEngine(tmp_path / "out", kv_cache=KvChoice(sink_tokens=3)) as changed:
        assert changed.kv_plan.sink_tokens == 3
        assert changed.kv_plan.layers == own.kv_plan.layers


@pytest.mark.parametrize("scale", [float("inf"), 1e-60, 0.0, -1.0, float("nan")])
def test_a_scale_that_float32_does_not_hold_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="scale"):
        KvRecipe(scheme="fp8_e4m3", scale=scale)


def test_tokens_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="recent_tokens -1"):
        KvChoice(recent_tokens=-1)


@pytest.mark.parametrize(
    "choice",
    [
        KvChoice(sink_tokens=4),
        KvChoice("float", recent_tokens=64),
        KvChoice("first 1: float", sensitive=("numbers",)),
    ],
)
def test_tokens_to_keep_in_a_cache_that_is_float_anyway_are_refused(tmp_path: Path, choice: KvChoice) -> None:
    model = save_tiny(tmp_path / "float")
    with open_checkpoint(str(model)) as checkpoint:
        with pytest.raises(UsageError, match=r"float as a whole.* add --kv-cache"):
            resolve_plan(checkpoint, choice, 2)
        assert not resolve_plan(checkpoint, KvChoice("float", 0, 0, ()), 2).quantizes
        plan = resolve_plan(checkpoint, replace(choice, scheme="last 1: int8-token"), 2)
    assert (plan.sink_tokens, plan.recent_tokens) == (choice.sink_tokens or 0, choice.recent_tokens or 0)
