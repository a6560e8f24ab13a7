"""One safetensors file, read tensor by tensor without mapping it into memory.

Layout: u64 little-endian n | n bytes of JSON {name: {dtype, shape, data_offsets: [begin, end]}} | data. The
safetensors library validates the header strictly (offsets without holes or overlap, sizes that fit shapes, the end of
the data is the end of the file); this module only reads positions out of a header that the library accepted, and
explains a refusal.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cann_llm_quant.checkpoint.base import TensorInfo
from cann_llm_quant.checkpoint.files import read_failure, read_range, refuse_lfs_pointer
from cann_llm_quant.errors import CheckpointError, UnsupportedError

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}


class SafetensorsShard:
    """The tensors of one safetensors file.

    Raises CheckpointError naming the file when it is unreadable, truncated or malformed, UnsupportedError when a tensor
    has a type that torch cannot hold.
    """

    alone = False

    def __init__(self, path: Path) -> None:
        refuse_lfs_pointer(path)
        try:
            _validate(path)
            self.header = _header_bytes(path)
        except SafetensorError as error:
            raise CheckpointError(_explain(path, str(error))) from error
        except OSError as error:
            raise read_failure(path, error) from error
        self.path = path
        entries: dict[str, Any] = json.loads(self.header[8:])
        entries.pop("__metadata__", None)
        by_offset = sorted(entries.items(), key=lambda item: (item[1]["data_offsets"], item[0]))
        self._begin = {name: len(self.header) + entry["data_offsets"][0] for name, entry in by_offset}
        self.tensors = {name: _tensor_info(path, name, entry) for name, entry in by_offset}

    def load(self, name: str) -> Tensor:
        """The tensor in its stored dtype, owning its memory. `name` must be one of `tensors`."""
        info = self.tensors[name]
        data = read_range(self.path, self._begin[name], info.nbytes)
        return data.view(info.dtype).reshape(info.shape)

    def release(self) -> None:
        """Nothing is kept between loads."""


def _validate(path: Path) -> None:
    """Have the library check the file. It opens UTF-8 paths only; Linux gives any open file such a path."""
    with path.open("rb") as file:
        try:
            os.fsencode(path).decode("utf-8")
            name = str(path)
        except UnicodeDecodeError:
            name = f"/proc/self/fd/{file.fileno()}"
        with safe_open(name, framework="pt"):
            pass


def _header_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        prefix = file.read(8)
        return prefix + file.read(int.from_bytes(prefix, "little"))


def _tensor_info(path: Path, name: str, entry: dict[str, Any]) -> TensorInfo:
    if entry["dtype"] not in DTYPES:
        raise UnsupportedError(f"{path}: tensor {name!r} has dtype {entry['dtype']}, which torch cannot hold")
    begin, end = entry["data_offsets"]
    return TensorInfo(name, DTYPES[entry["dtype"]], tuple(entry["shape"]), path.name, end - begin)


def _explain(path: Path, refusal: str) -> str:
    """One line on why the library refused the file; the expected size where the header still tells it."""
    size = path.stat().st_size
    expected = _expected_size(path, size)
    if expected is not None and expected != size:
        verb = "truncated" if size < expected else "too long"
        return f"{path} is {verb}: its header describes {expected} bytes, the file has {size}; fetch it again"
    reason = refusal.removeprefix("Error while deserializing header: ").splitlines()[0]
    return f"{path} is not a valid safetensors file of {size} bytes ({reason}); fetch it again"


def _expected_size(path: Path, size: int) -> int | None:
    """Size of the file by its header; None when the header is unreadable or describes data with holes or overlap."""
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > size - 8:
            return None
        header = file.read(length)
    try:
        entries = json.loads(header)
        spans = sorted(entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__")
        position = 0
        for begin, end in spans:
            if begin != position or end < begin:
                return None
            position = end
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None
    return 8 + length + position
