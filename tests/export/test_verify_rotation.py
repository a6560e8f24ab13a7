"""Rotated outputs against the float source: recognised by the embedding, compared in the same rotation."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from native_folders import save_native
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny
from torch import Tensor

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.export.verify import Verification, verify
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.models.rotated_checkpoint import RotatedCheckpoint
from cann_llm_quant.quant.scheme import Scheme

INT4 = Scheme("int4", True, "group", 32)
FOUND, UNKNOWN = 7, 100_000  # seeds: one of those that are tried, one that is not
ALIKE = "rotated: compared with the source in the same rotation"
LENGTHS = "rotated by what is recorded nowhere: only lengths of rows were compared"


@pytest.fixture(scope="module", params=["qwen2", "qwen3_moe"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With gains that differ, so that a rotation moves them and unties the head."""
    folder = save_tiny(
        tmp_path_factory.mktemp("rotation") / "m", request.param, num_hidden_layers=1, tie_word_embeddings=True
    )
    edit(folder, shake)
    return folder


def shake(tensors: dict[str, Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    for name in (n for n in tensors if n.endswith("norm.weight")):
        tensors[name].uniform_(0.5, 1.5, generator=generator)


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def rotated(source: Path, folder: Path, seed: int) -> Path:
    """A quantized output of the source in rotated channels, which nothing in it speaks of."""
    shutil.copytree(source, folder / "float")
    with open_checkpoint(str(source)) as opened:
        view = RotatedCheckpoint(opened, arch_from_checkpoint(opened), seed)
        tensors = {name: view.load(name).contiguous() for name in view.tensors}
        (folder / "float/config.json").write_text(json.dumps(view.config), encoding="utf-8")
    save_file(tensors, folder / "float/model.safetensors", metadata={"format": "pt"})
    return save_native(folder / "float", folder / "out", INT4)


def lines(result: Verification) -> list[str]:
    return [fault.line() for fault in result.findings.faults]


def louder_gate(tensors: dict[str, Tensor]) -> None:
    name = next(n for n in tensors if n.endswith("gate_proj.weight_scale"))
    tensors[name][3] *= 3


def test_an_unrecorded_rotation_is_found_and_undone(source: Path, tmp_path: Path) -> None:
    out = rotated(source, tmp_path, FOUND)
    result = verify(str(out), str(source))
    assert lines(result) == []
    assert ALIKE in result.findings.remarks
    assert max(error.error for error in result.errors) < 0.2
    assert result.stages[-1] == "weights"
    edit(out, louder_gate)
    assert any("gate_proj" in line and "no multiple near 1" in line for line in lines(verify(str(out), str(source))))


def test_a_recorded_seed_is_used(source: Path, tmp_path: Path) -> None:
    out = rotated(source, tmp_path, UNKNOWN)
    path = out / "inference_config.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document["provenance"]["recipe"] = {"rotate": True, "calibration": {"seed": UNKNOWN}}
    path.write_text(json.dumps(document), encoding="utf-8")
    result = verify(str(out), str(source))
    assert lines(result) == []
    assert ALIKE in result.findings.remarks


def test_of_another_rotation_lengths_are_compared(source: Path, tmp_path: Path) -> None:
    out = rotated(source, tmp_path, UNKNOWN)
    result = verify(str(out), str(source))
    assert lines(result) == []
    assert LENGTHS in result.findings.remarks
    assert "weights" not in result.stages
    edit(out, louder_gate)
    (line,) = lines(verify(str(out), str(source)))
    assert "gate_proj: 1 of" in line
    assert "rows have another length (row 3)" in line
