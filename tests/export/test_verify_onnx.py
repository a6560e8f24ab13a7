"""ONNX outputs: where external data ends, leads to, and whether its numbers are numbers."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cann_llm_quant.export.verify import verify

EXPECTED = torch.arange(12, dtype=torch.float32).view(3, 4)


def save(folder: Path, data: torch.Tensor = EXPECTED, **place: Any) -> Path:
    """One weight `w` [3, 4] in a file of its own."""
    onnx = pytest.importorskip("onnx")
    folder.mkdir()
    (folder / "model.onnx.data").write_bytes(data.numpy().tobytes())
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[3, 4], data_location=onnx.TensorProto.EXTERNAL)
    for key, value in ({"location": "model.onnx.data", "offset": 0, "length": 48} | place).items():
        tensor.external_data.add(key=key, value=str(value))
    output = onnx.helper.make_tensor_value_info("y", 1, [3, 4])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["w"], ["y"])], "g", [], [output], [tensor])
    (folder / "model.onnx").write_bytes(onnx.helper.make_model(graph).SerializeToString())
    return folder


FAULTS = [
    ({"location": "../secret"}, "leads out of the folder"),
    ({"location": "gone"}, "is not there"),
    ({"offset": 8}, "ends at byte 56 of model.onnx.data, which has 48"),
    ({"length": 44}, r"has 44 bytes, its shape [3, 4] needs 48"),
    ({"offset": "x"}, "has a place that is no number"),
    ({"data": torch.full((3, 4), float("nan"))}, "holds NaN"),
]


@pytest.mark.parametrize(("place", "words"), FAULTS, ids=[words for _, words in FAULTS])
def test_external_data_that_lies_is_noticed(tmp_path: Path, place: dict[str, Any], words: str) -> None:
    result = verify(str(save(tmp_path / "m", **place)))
    assert [words in fault.line() for fault in result.findings.faults] == [True]


def test_a_sound_model_passes_and_a_broken_one_does_not(tmp_path: Path) -> None:
    folder = save(tmp_path / "m")
    result = verify(str(folder))
    assert (result.passed, result.layout, result.tensors) == (True, "onnx", 1)
    (folder / "model.onnx").write_bytes(b"\xff" * 50)
    assert any("is no ONNX model" in fault.line() for fault in verify(str(folder)).findings.faults)


def test_without_the_library_it_is_said_that_nothing_was_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.onnx").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = verify(str(tmp_path))
    assert result.passed
    assert any("was not looked into" in remark for remark in result.findings.remarks)


def test_numbers_inside_the_model_are_looked_at_and_a_file_of_nothing_is_no_model(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    folder = save(tmp_path / "m")
    proto = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    weight = onnx.numpy_helper.from_array(torch.tensor([1.0, float("inf")]).numpy(), "v")
    proto.graph.initializer.append(weight)
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    (fault,) = verify(str(folder)).findings.faults
    assert fault.line().split("model.onnx: ")[1].startswith("v: holds NaN or infinity")
    (folder / "model.onnx").write_bytes(b"")
    assert any("it has no nodes" in fault.line() for fault in verify(str(folder)).findings.faults)
