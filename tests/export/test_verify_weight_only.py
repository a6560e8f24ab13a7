"""Configs of GPTQ and AWQ folders that say something else than their tensors, which a runtime would follow."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from native_folders import save_native
from tiny_models import save_tiny

from cann_llm_quant.export.layouts import ExportOptions, export_model
from cann_llm_quant.export.verify import verify
from cann_llm_quant.quant.scheme import Scheme

GOLDENS = Path(__file__).resolve().parents[1] / "data/goldens/gptqmodel"
AUTO_ROUND = GOLDENS.with_name("auto_round")
Q, OUT = (f"model.layers.0.self_attn.{name}_proj" for name in "qo")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("weight_only")
    source = save_tiny(folder / "m", num_hidden_layers=1)
    native = save_native(source, folder / "native", Scheme("int4", True, "group", 32))
    return {layout: export_model(native, folder / layout, layout, ExportOptions()).path for layout in ("gptq", "awq")}


CASES = [
    ("gptq", {}, []),
    ("awq", {}, []),
    ("gptq", {"bits": 8}, ["bits or group_size are not those"]),
    ("gptq", {"group_size": 64}, ["bits or group_size are not those"]),
    ("gptq", {"group_size": -1}, ["bits or group_size are not those"]),
    ("gptq", {"dynamic": {f"-:^{Q}$": {}}}, [f"dynamic leaves in float linears that are stored in codes: {Q};"]),
    ("gptq", {"dynamic": {f"+:^{Q}$": {"bits": 8}}}, [f"are not those of the tensors of: {Q} (int4-sym-g32"]),
    ("awq", {"modules_to_not_convert": ["o_proj"]}, [f"names linears that are stored in codes: {OUT};"]),
]


@pytest.mark.parametrize(("layout", "change", "words"), CASES, ids=lambda v: str(v)[:40])
def test_a_config_that_runtimes_would_follow_astray(
    sound: dict[str, Path], tmp_path: Path, layout: str, change: dict[str, Any], words: list[str]
) -> None:
    out = shutil.copytree(sound[layout], tmp_path / "out")
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] |= change
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (out / "SHA256SUMS").unlink()
    (out / "quantize_config.json").unlink(missing_ok=True)  # it would contradict the change
    lines = [fault.line() for fault in verify(str(out)).findings.faults]
    assert [word in line for word, line in zip(words, lines, strict=True)] == [True] * len(words), lines


@pytest.mark.parametrize("name", ["gptq-act-order", "gptq-v2-asym"])
def test_c20_folders_of_gptqmodel_pass_and_scattered_columns_need_desc_act(tmp_path: Path, name: str) -> None:
    out = shutil.copytree(GOLDENS / name, tmp_path / "out")
    assert [line for f in verify(str(out)).findings.faults if "quantization_config" in (line := f.line())] == []
    for file in (out / "config.json", out / "quantize_config.json"):
        if file.is_file():
            file.write_text(file.read_text(encoding="utf-8").replace('"desc_act": true', '"desc_act": false'), "utf-8")
    lines = [fault.line() for fault in verify(str(out)).findings.faults]
    assert any("g_idx scatters the columns" in line for line in lines)


DOWN = "model.layers.0.mlp.down_proj"
AUTO_ROUND_CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("auto-round-mixed", {}, []),
    ("auto-round-v2-w2", {}, []),
    ("auto-round-v2-w5", {}, []),
    ("auto-round-mixed", {"bits": 8}, ["are not those of the tensors of"]),
    (
        "auto-round-mixed",
        {"extra_config": {"down": {"bits": 8}, "o_proj": {"bits": 16}}},
        ["self_attn.k_proj (int4-"],
    ),
    ("auto-round-mixed", {"extra_config": {"down": {"bits": 8}, "k_proj": {"group_size": 16}}}, [f"float: {OUT};"]),
    ("auto-round-v2-w2", {"extra_config": {"model.embed_tokens": {"bits": 8}}}, ["float: model.embed_tokens;"]),
    ("auto-round-v2-w2", {"extra_config": {".*down.*": {"bits": 16}}}, [f"stored in codes: {DOWN};"]),
    ("auto-round-v2-w2", {"group_size": 16}, ["are not those of the tensors of"]),
    ("awq", {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}, []),
]


@pytest.mark.parametrize(("name", "change", "words"), AUTO_ROUND_CASES, ids=lambda v: str(v)[:40])
def test_the_section_of_auto_round(tmp_path: Path, name: str, change: dict[str, Any], words: list[str]) -> None:
    """Its own files pass; what its loader would allocate otherwise is named."""
    out = Path(shutil.copytree(AUTO_ROUND / name, tmp_path / "out"))
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] |= change
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    faults = verify(str(out)).findings.faults
    lines = [line for fault in faults if "quantization_config" in (line := fault.line())]
    assert [word in line for word, line in zip(words, lines, strict=True)] == [True] * len(words), lines
