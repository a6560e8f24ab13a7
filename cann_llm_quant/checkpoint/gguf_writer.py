"""Writes a GGUF file: its head at once, then each tensor's bytes in the order of the table, hashed on the way.

The layout is in `gguf_header`. Sizes are known beforehand, so that no more than what is handed over is ever in memory.
Metadata values: str, bool, int (u32, u64 where it must be), float (f32), and lists of str, int (i32) or float (f32).
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from jaxtyping import Shaped
from torch import Tensor

from cann_llm_quant.checkpoint.gguf_header import LONGEST_KEY, LONGEST_LOADED_NAME, name_problem
from cann_llm_quant.checkpoint.hashed_file import HashedFile
from cann_llm_quant.checkpoint.journal import utf8
from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.shown import shown

_VERSION = 3
_ALIGNMENT = 32
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U64 = 4, 5, 6, 7, 8, 9, 10


@dataclass(frozen=True)
class TensorEntry:
    """One tensor to come: name, type, shape with rows first (the last dimension is a whole number of blocks)."""

    name: str
    kind: Kind
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        elements, size = GGML_QUANT_SIZES[self.kind]
        return int(prod(self.shape) // elements * size)


@dataclass(frozen=True)
class WrittenFile:
    """A file that is whole on disk."""

    path: Path
    nbytes: int
    sha256: str


class GgufWriter:
    """A GGUF file in the making; `finish` makes it whole, leaving the context without it leaves a torn file."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], entries: Sequence[TensorEntry]) -> None:
        self._path = path
        self._entries = list(entries)
        head = encode_head(metadata, entries)
        self._file = HashedFile(path)
        self._file.write(head)

    def __enter__(self) -> "GgufWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)

    def append(self, entry: TensorEntry, parts: Iterable[Shaped[Tensor, "..."]]) -> None:
        """The next tensor of the table, as contiguous tensors whose bytes follow each other."""
        assert self._entries.pop(0) == entry, "tensors come in the order of the table"
        start = self._file.nbytes
        for part in parts:
            self._file.write(part.reshape(-1).view(torch.uint8).numpy().data)
        assert self._file.nbytes - start == entry.nbytes, f"{entry.name} has another size than its table says"
        self._file.write(b"\0" * (-self._file.nbytes % _ALIGNMENT))

    def finish(self) -> WrittenFile:
        """Sync the file; all tensors must have come."""
        assert not self._entries, "tensors are missing"
        digest = self._file.finish()
        return WrittenFile(self._path, self._file.nbytes, digest)


def encode_head(metadata: Mapping[str, Any], entries: Sequence[TensorEntry]) -> bytes:
    """Everything before the tensors' data, padded to where it begins.

    Raises UnsupportedError for keys and names of tensors that a reader would refuse or mistake for others.
    """
    _check_names("key", metadata, LONGEST_KEY)
    _check_names("tensor name", [entry.name for entry in entries], LONGEST_LOADED_NAME)
    parts = [b"GGUF", struct.pack("<IQQ", _VERSION, len(entries), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), _value(value)]
    offset = 0
    for entry in entries:
        sizes = entry.shape[::-1]
        parts += [_string(entry.name), struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, entry.kind, offset)]
        offset += entry.nbytes + -entry.nbytes % _ALIGNMENT
    head = b"".join(parts)
    return head + b"\0" * (-len(head) % _ALIGNMENT)


def _check_names(what: str, names: Iterable[str], longest: int) -> None:
    for name in names:
        problem = name_problem(name, longest)
        if problem is not None:
            raise UnsupportedError(f"the {what} {shown(name)} {problem}, which GGUF cannot hold; export another layout")


def _string(text: str) -> bytes:
    data = utf8(text)
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        return struct.pack("<I", _ARRAY) + _array(value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    return struct.pack("<II", _U32, value) if value < 1 << 32 else struct.pack("<IQ", _U64, value)


def _array(values: list[Any]) -> bytes:
    if not values or isinstance(values[0], str):
        return struct.pack("<IQ", _STRING, len(values)) + b"".join(map(_string, values))
    kind, code = (_F32, "f") if isinstance(values[0], float) else (_I32, "i")
    return struct.pack(f"<IQ{len(values)}{code}", kind, len(values), *values)
