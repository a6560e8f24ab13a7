"""The head of a GGUF file: metadata and the table of tensors, without touching tensor data.

Layout, little-endian: "GGUF" | u32 version | u64 tensors | u64 pairs | pairs: string key, u32 type, value | tensors:
string name, u32 n, n x u64 sizes (fastest first), u32 type, u64 offset from the data's start | padding to
`general.alignment` | data. A string is a u64 length and UTF-8; an array is u32 element type, u64 count, elements.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The gguf package's reader makes several array objects
per vocabulary entry, which takes many seconds where this takes a fraction of one, and cannot say how long a truncated
file should have been.
"""

import mmap
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from cann_llm_quant.checkpoint.files import read_failure, refuse_lfs_pointer
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.shown import shown

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
# In bytes, by the format. ggml keeps tensor names in 64 bytes with a NUL behind them, so that it refuses the longest.
_LONGEST_NAME, LONGEST_KEY = 64, 65535
LONGEST_LOADED_NAME = _LONGEST_NAME - 1


@dataclass(frozen=True)
class StoredTensor:
    """One entry of the table. `shape` is rows first; `offset` counts from the start of the file."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata by key, tensors by stored name, and the number of bytes before the data."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    nbytes: int


class _DamageError(Exception):
    """The bytes contradict the format; the message says how."""


def read_header(path: Path, *, skip: Collection[str] = ()) -> GgufHeader:
    """Parse the head of a GGUF file; arrays under the keys in `skip` are passed over.

    Raises CheckpointError naming the file, and its expected and real size when it is truncated; UnsupportedError for
    versions, byte orders and tensor types that we do not know.
    """
    refuse_lfs_pointer(path)
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise _DamageError("it does not begin with GGUF")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(data), path, skip)
    except OSError as error:
        raise read_failure(path, error) from error
    except _DamageError as error:
        raise CheckpointError(f"{path} is not a valid GGUF file ({error}); fetch it again") from error


class _Cursor:
    """A position that moves over the file's bytes and never past their end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise _DamageError(f"truncated in its header: it needs at least {end} bytes and has {len(self.data)}")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(f"<{code}")))

    def number(self, code: str) -> int:
        return int(self.numbers(code)[0])

    def string(self) -> str:
        try:
            return self.take(self.number("Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise _DamageError(f"a string before byte {self.position} is not UTF-8") from error

    def value(self, kind: int, keep: bool) -> Any:
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise _DamageError(f"metadata of unknown type {kind}")
        element, count = self.number("I"), self.number("Q")
        if element in _SCALARS:
            values = self.numbers(_SCALARS[element], count)
            return list(values) if keep else None
        if element != _STRING:
            raise _DamageError(f"an array of unknown type {element}")
        if keep:
            return [self.string() for _ in range(count)]
        for _ in range(count):
            self.take(self.number("Q"))
        return None


def _parse(cursor: _Cursor, path: Path, skip: Collection[str]) -> GgufHeader:
    cursor.position = 4
    version = cursor.number("I")
    if version not in (2, 3):
        kind = "big-endian" if version & 0xFFFF == 0 else f"of version {version}"
        raise UnsupportedError(f"{path} is a GGUF file {kind}; convert it to little-endian version 3")
    tensor_count, pair_count = cursor.numbers("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = _name(cursor, "a metadata key", LONGEST_KEY)
        if key in metadata:
            raise _DamageError(f"metadata {shown(key)} occurs twice")
        metadata[key] = cursor.value(cursor.number("I"), key not in skip)
    infos = [_tensor_info(cursor, path) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise _DamageError(f"general.alignment {shown(alignment)} is not a power of two")
    start = -(-cursor.position // alignment) * alignment
    tensors = {
        name: StoredTensor(kind, shape, start + at, _nbytes(name, kind, shape)) for name, kind, shape, at in infos
    }
    if len(tensors) != tensor_count:
        raise _DamageError("a tensor name occurs twice")
    expected = max((t.offset + t.nbytes for t in tensors.values()), default=0)
    if expected > len(cursor.data):
        raise _DamageError(f"truncated: its header describes {expected} bytes, the file has {len(cursor.data)}")
    return GgufHeader({key: value for key, value in metadata.items() if value is not None}, tensors, cursor.position)


def _name(cursor: _Cursor, what: str, longest: int) -> str:
    name = cursor.string()
    problem = name_problem(name, longest)
    if problem is not None:
        raise _DamageError(f"{what} {shown(name)} {problem}")
    return name


def name_problem(name: str, longest: int) -> str | None:
    """Why no reader could be trusted with a key or the name of a tensor; None where it can be stored.

    C programs end a name at its first NUL, and print all of them.
    """
    if not name.isprintable():
        return "holds control characters"
    nbytes = len(name.encode("utf-8"))
    return f"has {nbytes} bytes, more than {longest}" if nbytes > longest else None


def _tensor_info(cursor: _Cursor, path: Path) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
    name = _name(cursor, "the tensor name", _LONGEST_NAME)
    dimensions = cursor.number("I")
    if not 0 < dimensions <= _MAX_DIMENSIONS:
        raise _DamageError(f"tensor {shown(name)} has {dimensions} dimensions")
    sizes = cursor.numbers("Q", dimensions)
    kind, offset = cursor.number("I"), cursor.number("Q")
    try:
        return name, GGMLQuantizationType(kind), tuple(reversed(sizes)), offset
    except ValueError as error:
        raise UnsupportedError(
            f"{path}: tensor {shown(name)} has type number {kind}, which this version cannot read"
        ) from error


def _nbytes(name: str, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> int:
    elements, nbytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % elements:
        raise _DamageError(
            f"tensor {shown(name)} of type {kind.name} has {shape[-1]} columns, no multiple of {elements}"
        )
    return int(prod(shape) // elements * nbytes)
