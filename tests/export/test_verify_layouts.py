"""A sound export of every layout passes `verify` against its quantized source, code for code; a damaged one fails."""

import json
from pathlib import Path

import pytest
import torch
from native_folders import save_native
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny

from cann_llm_quant.export.layouts import ExportOptions, export_model
from cann_llm_quant.export.verify import verify
from cann_llm_quant.quant.scheme import ActivationScheme, Scheme

INT4 = Scheme("int4", True, "group", 32)
W8A8 = Scheme("int8", True, "channel", None)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("layouts") / "m", "qwen2", num_hidden_layers=1)


@pytest.fixture(scope="module")
def sources(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("layouts")
    return {
        "int4": save_native(tiny, folder / "int4", INT4),
        "w8a8": save_native(tiny, folder / "w8a8", W8A8, ActivationScheme("int8")),
    }


LAYOUTS = [
    ("compressed-tensors", "int4"),
    ("compressed-tensors", "w8a8"),
    ("awq", "int4"),
    ("gptq", "int4"),
    ("gptq_v2", "int4"),
    ("ascend", "w8a8"),
    ("gguf", "int4"),
    ("mlx", "int4"),
]


@pytest.mark.parametrize(("layout", "kind"), LAYOUTS, ids=["-".join(row) for row in LAYOUTS])
def test_an_export_has_the_codes_of_its_source(
    tiny: Path, sources: dict[str, Path], tmp_path: Path, layout: str, kind: str
) -> None:
    options = ExportOptions(tokenizer=layout != "gguf")
    out = export_model(sources[kind], tmp_path / "out", layout, options).path
    result = verify(str(out), str(sources[kind]))
    assert [fault.line() for fault in result.findings.faults] == []
    assert result.linears == 7
    assert result.sums >= 3
    assert sum(error.codes is True for error in result.errors) == 7
    assert [fault.line() for fault in verify(str(out), str(tiny)).findings.faults] == []
    damage(out)
    assert not verify(str(out)).passed


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_an_export_of_an_export_has_the_type_of_what_stays_in_float(tmp_path: Path, layout: str) -> None:
    """float16 scales outweigh a small bfloat16 embedding, but the config's dtype is that of the embedding."""
    source = save_tiny(tmp_path / "m", "qwen2", num_hidden_layers=2)
    first = export_model(save_native(source, tmp_path / "native", INT4), tmp_path / "first", layout, ExportOptions())
    second = export_model(first.path, tmp_path / "second", "gptq_v2", ExportOptions())
    for path in (first.path, second.path):
        assert json.loads((path / "config.json").read_text(encoding="utf-8"))["torch_dtype"] == "bfloat16"
        assert load_file(path / "model.safetensors")["model.embed_tokens.weight"].dtype == torch.bfloat16
        assert [fault.line() for fault in verify(str(path)).findings.faults] == []


def damage(folder: Path) -> None:
    """The last byte of the weights, turned around."""
    (file,) = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf")]
    data = bytearray(file.read_bytes())
    data[-1] ^= 0xFF
    file.write_bytes(data)


def test_a_float_export_is_compared_with_the_dequantized_source(sources: dict[str, Path], tmp_path: Path) -> None:
    out = export_model(sources["int4"], tmp_path / "out", "float", ExportOptions()).path
    result = verify(str(out), str(sources["int4"]))
    assert result.passed
    assert result.layout == "float"
    (out / "SHA256SUMS").unlink()
    tensors = load_file(out / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    tensors[f"{name}.weight"][::2] *= torch.tensor(1.1, dtype=tensors[f"{name}.weight"].dtype)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    lines = [fault.line() for fault in verify(str(out), str(sources["int4"])).findings.faults]
    assert len(lines) == 1
    assert name in lines[0]
    assert "is stored in float" in lines[0]


def test_a_float_export_may_differ_from_the_float_source_by_rounding(
    tiny: Path, sources: dict[str, Path], tmp_path: Path
) -> None:
    out = export_model(sources["int4"], tmp_path / "out", "float", ExportOptions()).path
    result = verify(str(out), str(tiny))
    assert [fault.line() for fault in result.findings.faults] == []
    assert any("was dequantized from codes" in remark for remark in result.findings.remarks)


def test_a_matrix_under_a_foreign_name_is_no_linear_of_a_gguf_file(sources: dict[str, Path], tmp_path: Path) -> None:
    out = export_model(sources["int4"], tmp_path / "out", "gguf", ExportOptions(tokenizer=False)).path
    (file,) = out.glob("*.gguf")
    file.write_bytes(file.read_bytes().replace(b"blk.0.attn_k.weight", b"blk.0.attn_k.wei~ht"))
    assert not verify(str(file)).passed
