"""An ONNX output: its external data against the files, its float weights against NaN.

What the operators ask of their inputs is left to the runtime (`--load`): it knows its own operators, we would guess.
"""

import importlib.util
import math
from pathlib import Path
from typing import Any

import torch

from cann_llm_quant.checkpoint.files import file_names, read_range
from cann_llm_quant.export.verify_files import is_inside
from cann_llm_quant.export.verify_findings import Findings, Tick
from cann_llm_quant.shown import shown

_AGAIN = "write the model again"
_NOT_FINITE = "holds NaN or infinity"
# Element types of onnx.proto: bytes an element, and the torch type of floats.
_ITEM_BYTES = {1: 4, 2: 1, 3: 1, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 16: 2, 17: 1, 21: 0.5, 22: 0.5}
_FLOATS = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}


def onnx_files(path: Path) -> list[Path]:
    """The ONNX models among a folder's files, or the file itself."""
    if path.is_file():
        return [path] if path.suffix == ".onnx" else []
    return [path / name for name in file_names(path) if name.endswith(".onnx")]


def check_onnx(model: Path, findings: Findings, tick: Tick) -> int:
    """One model with its external data; the number of its weights."""
    if importlib.util.find_spec("onnx") is None:
        findings.remark(f"{model.name} was not looked into: pip install 'cann-llm-quant[onnx]'")
        return 0
    import onnx

    try:
        proto = onnx.load(str(model), load_external_data=False)
    except Exception as error:
        findings.add(str(model), f"is no ONNX model: {(str(error).splitlines() or [type(error).__name__])[0]}", _AGAIN)
        return 0
    weights = proto.graph.initializer
    if not proto.graph.node:
        findings.add(str(model), "is no ONNX model: it has no nodes", _AGAIN)
    for number, tensor in enumerate(weights):
        tick(number, len(weights), tensor.name)
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            with findings.caught(f"{model}: {tensor.name}"):
                _check_external(model, tensor, findings)
        elif tensor.data_type in _FLOATS:
            _check_inline(f"{model}: {tensor.name}", tensor, findings)
    return len(weights)


def _check_inline(where: str, tensor: Any, findings: Findings) -> None:
    """A float weight inside the model itself, where it lies as bytes."""
    kind = _FLOATS[tensor.data_type]
    if len(tensor.raw_data) != math.prod(tensor.dims) * kind.itemsize:
        if tensor.raw_data:
            findings.add(where, f"has {len(tensor.raw_data)} bytes, which its shape does not need", _AGAIN)
        return
    values = torch.frombuffer(bytearray(tensor.raw_data), dtype=kind) if tensor.raw_data else torch.zeros(0)
    if not bool(values.isfinite().all()):
        findings.add(where, _NOT_FINITE, "the file is damaged; " + _AGAIN)


def _check_external(model: Path, tensor: Any, findings: Findings) -> None:
    where = f"{model}: {tensor.name}"
    place = {entry.key: entry.value for entry in tensor.external_data}
    location = place.get("location", "")
    if not is_inside(location):
        findings.add(where, f"lies in {shown(location)}, which leads out of the folder", "do not load this model")
        return
    file = model.parent / location
    size = file.stat().st_size if file.is_file() else -1
    try:
        offset, length = int(place.get("offset", 0)), int(place.get("length", -1))
    except ValueError:
        findings.add(where, "has a place that is no number", _AGAIN)
        return
    expected = math.ceil(math.prod(tensor.dims) * _ITEM_BYTES.get(tensor.data_type, 0))
    if size < 0:
        findings.add(where, f"lies in {location}, which is not there", "fetch the file")
    elif offset < 0 or length < 0 or offset + length > size:
        findings.add(where, f"ends at byte {offset + length} of {location}, which has {size}", "fetch the file again")
    elif tensor.data_type in _ITEM_BYTES and length != expected:
        findings.add(where, f"has {length} bytes, its shape {list(tensor.dims)} needs {expected}", _AGAIN)
    elif tensor.data_type in _FLOATS:
        values = read_range(file, offset, length).view(_FLOATS[tensor.data_type])
        if not bool(values.isfinite().all()):
            findings.add(where, _NOT_FINITE, "the file is damaged; " + _AGAIN)
