"""Damages of an output beside its matrices, which only its source can tell."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from native_folders import save_native
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny
from torch import Tensor

from cann_llm_quant.export.layouts import ExportOptions, export_model
from cann_llm_quant.export.verify import verify
from cann_llm_quant.quant.scheme import Scheme

QKV = ("q_proj", "k_proj", "v_proj")
LAYER = "model.layers.0.self_attn"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Qwen2 (biases) and Qwen3 (norms of q and k): the source with vectors of random numbers, and a sound output."""
    folder = tmp_path_factory.mktemp("origin")
    found = {}
    for family in ("qwen2", "qwen3"):
        source = save_tiny(folder / family, family, num_hidden_layers=1)
        edit(source, shake)
        (source / "tokenizer.json").write_text("{}", encoding="utf-8")
        out = save_native(source, folder / f"{family}-out", Scheme("int4", False, "group", 32))
        found[family] = (source, out)
    return found


def shake(tensors: dict[str, Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            noise = torch.empty(tensor.shape).uniform_(0.5, 1.5, generator=generator)
            tensors[name] = noise.to(tensor.dtype)


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def faults(models: dict[str, tuple[Path, Path]], family: str, tmp_path: Path, change: Any = None) -> list[str]:
    source, sound = models[family]
    out = shutil.copytree(sound, tmp_path / "out")
    if change is not None:
        edit(out, change)
    return [fault.line() for fault in verify(str(out), str(source)).findings.faults]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_sound_output_has_no_fault(models: dict[str, tuple[Path, Path]], tmp_path: Path, family: str) -> None:
    assert faults(models, family, tmp_path) == []


def scaled(name: str, factor: float) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors[name].mul_(factor)


def one(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors[name].__setitem__(3, -tensors[name][3])


DAMAGES = [
    ("qwen2", scaled("model.norm.weight", 2), "model.norm.weight: is not the source's tensor"),
    ("qwen2", one("model.norm.weight"), "model.norm.weight: is not the source's tensor"),
    ("qwen2", one(f"{LAYER}.k_proj.bias"), f"{LAYER}.k_proj.bias: is not the source's bias"),
    ("qwen2", scaled(f"{LAYER}.v_proj.bias", 0), f"{LAYER}.v_proj.bias: is not the source's bias"),
    ("qwen3", scaled(f"{LAYER}.q_norm.weight", 3), "q_norm.weight and model.layers.0.self_attn.k_norm.weight: are tog"),
    ("qwen3", lambda t: t[f"{LAYER}.k_norm.weight"][3].mul_(1.1), "k_norm.weight: are together not the source's"),
]


@pytest.mark.parametrize(("family", "change", "words"), DAMAGES, ids=[words for *_, words in DAMAGES])
def test_a_damaged_vector_is_named(
    models: dict[str, tuple[Path, Path]], tmp_path: Path, family: str, change: Any, words: str
) -> None:
    (line,) = faults(models, family, tmp_path, change)
    assert words in line


def test_powers_of_two_that_k_gives_to_q_are_no_fault(models: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    def even_out(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.q_norm.weight"].mul_(4)
        tensors[f"{LAYER}.k_norm.weight"].div_(4)

    assert faults(models, "qwen3", tmp_path, even_out) == []


CONFIGS = [
    ({"rms_norm_eps": 0.01}, "rms_norm_eps is 0.01, the source's 1e-06"),
    ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "rope theta is 500000.0"),
    ({"num_attention_heads": 8, "head_dim": 8, "num_key_value_heads": 4}, "num_heads is 8, the source's 4"),
]


@pytest.mark.parametrize(("change", "words"), CONFIGS, ids=[words for _, words in CONFIGS])
def test_a_config_of_another_model_is_noticed(
    models: dict[str, tuple[Path, Path]], tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    source, sound = models["qwen2"]
    out = shutil.copytree(sound, tmp_path / "out")
    config = json.loads((out / "config.json").read_text(encoding="utf-8")) | change
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    lines = [fault.line() for fault in verify(str(out), str(source)).findings.faults]
    assert any(words in line for line in lines), lines


def test_c30_another_tokenizer_and_a_missing_one_are_noticed(
    models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    source, sound = models["qwen2"]
    out = shutil.copytree(sound, tmp_path / "out")
    (out / "tokenizer.json").write_text('{"a": 1}', encoding="utf-8")
    (fault,) = verify(str(out), str(source)).findings.faults
    assert "differs from the source's in tokenizer.json" in fault.line()
    (out / "tokenizer.json").unlink()
    lines = [fault.line() for fault in verify(str(out), str(source)).findings.faults]
    assert len(lines) == 2
    assert "tokenizer_config.json: has no vocabulary beside it" in lines[0]
    assert "lacks the source's tokenizer.json" in lines[1]


def test_c17_zero_points_read_one_off_are_noticed_against_the_float_source(
    models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """Version 2 of GPTQ read as version 1: every weight lies one step beside the source's."""
    source, sound = models["qwen2"]
    out = export_model(sound, tmp_path / "out", "gptq_v2", ExportOptions()).path
    assert verify(str(out), str(source)).passed
    for name in ("config.json", "quantize_config.json"):
        text = (out / name).read_text(encoding="utf-8")
        (out / name).write_text(text.replace('"gptq_v2"', '"gptq"'), encoding="utf-8")
    (out / "SHA256SUMS").unlink()
    lines = [fault.line() for fault in verify(str(out), str(source)).findings.faults]
    assert len(lines) == 7
    assert all("most groups lie -1.0 steps beside the source's" in line for line in lines)


def test_a_zero_point_far_off_is_noticed_against_the_float_source(
    models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    name = f"{LAYER}.q_proj.weight_zero_point"
    (line,) = faults(models, "qwen2", tmp_path, lambda tensors: tensors[name][0].zero_())
    assert "q_proj" in line
    assert "farther from the source's than zeros are" in line or "no multiple near 1" in line


def test_a_norm_that_a_router_reads_must_be_equal(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "m", "qwen3_moe", num_hidden_layers=1)
    edit(source, shake)
    out = save_native(source, tmp_path / "out", Scheme("int4", True, "group", 32))
    assert verify(str(out), str(source)).passed
    edit(out, lambda tensors: tensors["model.layers.0.post_attention_layernorm.weight"][3].mul_(1.1))
    (fault,) = verify(str(out), str(source)).findings.faults
    assert "post_attention_layernorm.weight: is not the source's tensor" in fault.line()
