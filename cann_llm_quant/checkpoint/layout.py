"""The byte layout of a safetensors file, as the writer makes it.

    8 bytes   header length n, little-endian
    n bytes   JSON {"__metadata__": {...}, name: {"dtype", "shape", "data_offsets": [begin, end]}, ...},
              padded with spaces to a multiple of 8
    data      the tensors back to back, widest dtype first, so that each is aligned to its own width

Offsets count from the start of the data. The same tensors in the same order always give the same bytes.
Format: https://github.com/huggingface/safetensors#format
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cann_llm_quant.checkpoint.hashed_file import HashedFile, sync_file
from cann_llm_quant.errors import CheckpointError

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
METADATA = {"format": "pt"}
_ALIGN = 8


@dataclass(frozen=True)
class Span:
    """One tensor of a file: what it is, and its bytes `[begin, end)` counted from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.begin

    @property
    def width(self) -> int:
        """Bytes of one element, the alignment it needs."""
        return TORCH_DTYPES[self.dtype].itemsize


def lay_out(spans: Iterable[Span]) -> list[Span]:
    """The same tensors back to back from offset 0, widest dtype first and otherwise in the given order."""
    placed, offset = [], 0
    for span in sorted(spans, key=lambda span: -span.width):
        placed.append(Span(span.name, span.dtype, span.shape, offset, offset + span.nbytes))
        offset += span.nbytes
    return placed


def encode_header(spans: Sequence[Span], metadata: Mapping[str, str]) -> bytes:
    """Length prefix and JSON header, ready to be followed by the tensors in the order of `spans`."""
    header: dict[str, object] = {"__metadata__": {**METADATA, **metadata}}
    for span in spans:
        offsets = [span.begin, span.end]
        header[span.name] = {"dtype": span.dtype, "shape": list(span.shape), "data_offsets": offsets}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % _ALIGN)
    return struct.pack("<Q", len(text)) + text


def header_bound(spans: Iterable[Span], metadata: Mapping[str, str]) -> int:
    """An upper bound of the bytes of `encode_header` wherever the tensors lie; additive over spans."""
    frame = len(encode_header([], metadata)) + _ALIGN
    return frame + sum(entry_bound(span) for span in spans)


def entry_bound(span: Span) -> int:
    """Header bytes of one tensor, with both offsets at their longest (20 digits)."""
    name = json.dumps(span.name, ensure_ascii=False).encode("utf-8")
    shape = json.dumps(list(span.shape), separators=(",", ":"))
    return len(name) + len(span.dtype) + len(shape) + 2 * 20 + len(',:{"dtype":"","shape":,"data_offsets":[,]}')


def read_header(path: Path) -> tuple[list[Span], int]:
    """`(tensors in the order of their bytes, where the data begins)` of a file that this module laid out.

    Raises CheckpointError when the file's size or header is not what the layout demands.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise CheckpointError(f"{path} is cut off inside its header ({size} bytes): write it again")
        header = json.loads(file.read(length).decode("utf-8"))
    header.pop("__metadata__", None)
    spans = [Span(name, item["dtype"], tuple(item["shape"]), *item["data_offsets"]) for name, item in header.items()]
    spans.sort(key=lambda span: (span.begin, span.end))
    expected = 8 + length + (spans[-1].end if spans else 0)
    if size != expected:
        raise CheckpointError(f"{path} has {size} bytes where its header promises {expected}: write it again")
    return spans, 8 + length


def write_unsynced(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write one safetensors file beside `path`; returns its size and sha256. `settle_file` puts it there.

    The system has its bytes, the disk perhaps not yet. A few tensors at a time are held as copies.
    """
    unplaced = [
        Span(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), 0, tensor.numel() * tensor.element_size())
        for name, tensor in sorted(tensors.items())
    ]
    spans = lay_out(unplaced)
    with HashedFile(_temporary(path)) as file:
        for data in _file_parts(spans, tensors):
            file.write(data)
        digest = file.finish(sync=False)
    return file.nbytes, digest


def settle_file(path: Path) -> None:
    """Wait until what `write_unsynced` wrote is on the disk, then give it its name."""
    temporary = _temporary(path)
    sync_file(temporary)
    os.replace(temporary, path)


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _file_parts(spans: list[Span], tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    yield encode_header(spans, {})
    for span in spans:
        tensor = tensors[span.name].detach().to("cpu").resolve_neg().contiguous()
        yield memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file that `write_unsynced` wrote, each in memory of its own."""
    spans, start = read_header(path)
    tensors: dict[str, Tensor] = {}
    with path.open("rb") as file:
        for span in spans:
            file.seek(start + span.begin)
            flat = torch.empty(span.nbytes, dtype=torch.uint8)
            file.readinto(memoryview(flat.numpy()))  # type: ignore[arg-type]
            tensors[span.name] = flat.view(TORCH_DTYPES[span.dtype]).reshape(span.shape)
    return tensors
