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
