"""Folders that AutoRound wrote, in AWQ's layout and its own: our readers against its own unpacking."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.export.packed import open_packed

GOLDENS = Path(__file__).parents[1] / "data" / "goldens" / "auto_round"
K, DOWN, OUT = (f"model.layers.0.{name}" for name in ("self_attn.k_proj", "mlp.down_proj", "self_attn.o_proj"))
# Layout, and the schemes of k and down.
FOLDERS = {
    "awq": ("awq", "int4-asym-g32", "int4-asym-g32"),
    "auto-round-mixed": ("gptq", "int4-asym-g16", "int8-sym-g32"),
    "auto-round-v2-w2": ("gptq_v2", "int2-asym-g32", "int2-asym-g32"),
    "auto-round-v2-w5": ("gptq_v2", "int5-asym-g32", "int5-asym-g32"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_weights_are_those_that_auto_round_unpacks(name: str) -> None:
    layout, *labels = FOLDERS[name]
    expected = load_file(GOLDENS / name / "expected.safetensors")
    with open_packed(GOLDENS / name) as checkpoint:
        assert checkpoint.reader.layout == layout
        for module, label in zip((K, DOWN), labels, strict=True):
            weight = checkpoint.quantized(module)
            assert weight is not None
            assert weight.scheme.label() == label
            assert torch.equal(weight.dequantize(torch.float16), expected[f"{module}.weight"])


def test_a_linear_of_16_bits_is_in_float() -> None:
    with open_packed(GOLDENS / "auto-round-mixed") as checkpoint:
        assert OUT not in checkpoint.modules
        assert len(checkpoint.modules) == 6


def changed(tmp_path: Path, name: str, **section: Any) -> Path:
    """A golden with fields of its section replaced; None takes one out."""
    folder = Path(shutil.copytree(GOLDENS / name, tmp_path / name))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    merged = config["quantization_config"] | section
    config["quantization_config"] = {key: value for key, value in merged.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_an_override_by_pattern_counts_as_one_by_name(tmp_path: Path) -> None:
    by_pattern = {"k_proj": {"group_size": 16, "sym": False}, "down": {"bits": 8}, "o_proj": {"bits": 16}}
    folder = changed(tmp_path, "auto-round-mixed", extra_config=by_pattern)
    with open_packed(folder) as found, open_packed(GOLDENS / "auto-round-mixed") as expected:
        assert {m: found.quantized(m).scheme for m in found.modules} == {
            m: expected.quantized(m).scheme for m in expected.modules
        }


def test_patterns_that_auto_round_puts_dots_around_are_read(tmp_path: Path) -> None:
    """Whoever asks AutoRound for `self.*attn.*k_proj` finds `.*self.*attn.*k_proj.*` in the config."""
    extra = {".*self.*attn.*k_proj.*": {"group_size": 16, "sym": False}, r".*mlp\.down.*": {"bits": 8}}
    with open_packed(changed(tmp_path, "auto-round-mixed", extra_config=extra)) as checkpoint:
        assert checkpoint.quantized(K).scheme.label() == "int4-asym-g16"
        assert checkpoint.quantized(DOWN).scheme.label() == "int8-sym-g32"


@pytest.mark.parametrize("pattern", [r"k_proj\.*", ".*?k_proj", "x|.*"])
def test_dots_that_are_no_frame_stay(tmp_path: Path, pattern: str) -> None:
    """Full stops that are meant, a lazy repeat, and a choice of anything."""
    extra = {pattern: {"group_size": 16, "sym": False}}
    with open_packed(changed(tmp_path, "auto-round-mixed", extra_config=extra)) as checkpoint:
        assert checkpoint.quantized(K).scheme.label() == "int4-asym-g16"


def test_a_pattern_that_says_nothing_is_passed_over(tmp_path: Path) -> None:
    extra = {".*self_attn.*": {}, ".*k_proj.*": {"group_size": 16, "sym": False}, DOWN: {"bits": 8}}
    with open_packed(changed(tmp_path, "auto-round-mixed", extra_config=extra)) as checkpoint:
        assert checkpoint.quantized(K).scheme.label() == "int4-asym-g16"


@pytest.mark.parametrize(
    ("name", "backend", "layout"),
    [
        ("auto-round-mixed", "auto_round:gptq:exllamav2", "gptq"),
        ("auto-round-mixed", "auto_gptq", "gptq"),
        ("auto-round-mixed", None, "gptq"),
        ("auto-round-v2-w2", "auto_round:exllamav2", "gptq_v2"),
        ("awq", "auto_round:awq", "awq"),
    ],
)
def test_before_there_was_a_packing_format_the_backend_told_it(
    tmp_path: Path, name: str, backend: str | None, layout: str
) -> None:
    """As AutoRound 0.2 to 0.4.7 wrote it, under another name of the method."""
    folder = changed(tmp_path, name, quant_method="intel/auto-round", backend=backend, packing_format=None)
    expected = load_file(GOLDENS / name / "expected.safetensors")
    with open_packed(folder) as checkpoint:
        assert checkpoint.reader.layout == layout
        assert torch.equal(checkpoint.quantized(K).dequantize(torch.float16), expected[f"{K}.weight"])


def test_a_backend_beside_a_packing_format_asks_for_a_kernel_only(tmp_path: Path) -> None:
    with open_packed(changed(tmp_path, "auto-round-v2-w2", backend="gptq:exllamav2")) as checkpoint:
        assert checkpoint.reader.layout == "gptq_v2"


def test_a_name_wins_over_a_pattern(tmp_path: Path) -> None:
    extra = {".*k_proj": {"sym": True}, K: {"group_size": 16, "sym": False}, DOWN: {"bits": 8}}
    with open_packed(changed(tmp_path, "auto-round-mixed", extra_config=extra)) as checkpoint:
        assert checkpoint.quantized(K).scheme.label() == "int4-asym-g16"


def test_awq_tensors_in_auto_rounds_section(tmp_path: Path) -> None:
    """AutoRound writes the same tensors for its own format as for AutoAWQ's, only the section differs."""
    folder = changed(tmp_path, "awq", quant_method="auto-round", packing_format="auto_round:auto_awq", version=None)
    expected = load_file(GOLDENS / "awq" / "expected.safetensors")
    with open_packed(folder) as checkpoint:
        assert torch.equal(checkpoint.quantized(K).dequantize(torch.float16), expected[f"{K}.weight"])


@pytest.mark.parametrize(
    ("section", "error", "words"),
    [
        ({"packing_format": "auto_round:llm_compressor"}, UnsupportedError, "packing_format"),
        ({"packing_format": 3}, CheckpointError, "packing_format"),
        ({"rotation_config": {"kind": "hadamard"}}, UnsupportedError, "rotation_config"),
        ({"spinquant_config": {"algorithm": "spinquant", "r4": True}}, UnsupportedError, "spinquant_config"),
        ({"extra_config": {K: {"rotation_config": {"kind": "hadamard"}}}}, UnsupportedError, "rotation_config"),
        ({"quant_method": "intel/auto-round", "backend": "ark", "packing_format": None}, UnsupportedError, "'ark'"),
        ({"group_size": [128, 128]}, CheckpointError, "group_size"),
        ({"data_type": "mx_fp"}, UnsupportedError, "data_type"),
        ({"act_bits": 8}, UnsupportedError, "act_bits"),
        ({"extra_config": {K: {"data_type": "mx_fp"}}}, UnsupportedError, "data_type"),
        ({"extra_config": {K: 4}}, CheckpointError, "extra_config"),
        ({"extra_config": {"(": {"sym": False}}}, CheckpointError, "regular expression"),
        ({"extra_config": {"(a*)*b": {"sym": False}}}, UnsupportedError, "repeats"),
    ],
)
def test_other_forms_are_refused(tmp_path: Path, section: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words), open_packed(changed(tmp_path, "auto-round-mixed", **section)):
        pass
