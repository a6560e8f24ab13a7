"""A GGUF file as a checkpoint: Hugging Face names, dequantized weights, recovered config and tokenizer.

The gguf package dequantizes; tensor bytes are read by position, for an expert only its slab. A float tensor keeps its
type, a quantized one becomes float32. Rows are put back in order (see `gguf_names`) while still
packed, because packing runs along the columns.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from jaxtyping import UInt8
from torch import Tensor

from cann_llm_quant.checkpoint.base import TensorInfo
from cann_llm_quant.checkpoint.companions import companion_files
from cann_llm_quant.checkpoint.files import read_range
from cann_llm_quant.checkpoint.fingerprint import fingerprint
from cann_llm_quant.checkpoint.gguf_config import ArchitectureKeys, recover_config
from cann_llm_quant.checkpoint.gguf_header import StoredTensor, read_header
from cann_llm_quant.checkpoint.gguf_names import ROPE_FREQUENCIES, Source, family, hugging_face_sources
from cann_llm_quant.checkpoint.gguf_tokenizer import recover_tokenizer
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.shown import shown

PLAIN_DTYPES: dict[Kind, torch.dtype] = {
    Kind.F32: torch.float32,
    Kind.F16: torch.float16,
    Kind.BF16: torch.bfloat16,
    Kind.F64: torch.float64,
    Kind.I8: torch.int8,
    Kind.I16: torch.int16,
    Kind.I32: torch.int32,
    Kind.I64: torch.int64,
}
DEQUANTIZED = frozenset(
    {
        *(Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0),
        *(Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K),
        *(Kind.MXFP4, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ3_XXS, Kind.IQ3_S, Kind.IQ4_NL, Kind.IQ4_XS),
    }
)
_VOCABULARY = tuple(f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type", "merges"))


def is_gguf_file(path: Path) -> bool:
    """Whether a file is GGUF by its name or its first bytes."""
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


class GgufCheckpoint:
    """Tensors, config and tokenizer of one GGUF file; implements `base.Checkpoint`.

    With `companions`, a folder, files that lie there win over recovered ones. `TensorInfo.nbytes` is the size after
    loading. Raises CheckpointError for a broken file, UnsupportedError for an architecture or type we do not know.
    """

    def __init__(self, path: Path, *, companions: Path | None = None) -> None:
        header = read_header(path, skip=_VOCABULARY)
        keys = ArchitectureKeys(header.metadata, str(path))
        if keys.metadata.get("split.count", 1) not in (0, 1):
            raise UnsupportedError(
                f"{path} is one part of a split GGUF; join the parts with `llama-gguf-split --merge`"
            )
        heads = keys.count("attention.head_count")
        names = family(keys.architecture, keys.number("expert_count", 0))
        shapes = {name: stored.shape for name, stored in header.tensors.items()}
        for name in shapes:
            if name.endswith((".scale", ".input_scale")):
                raise UnsupportedError(f"{path}: {name} scales a matrix as a whole, which this version cannot read")
        self._path = path
        self._companions = companions
        self._header_length = header.nbytes
        self._metadata = header.metadata
        self._stored = header.tensors
        self._sources = hugging_face_sources(shapes, names, heads, keys.count("attention.head_count_kv", heads))
        self._tensors = {name: self._info(name, source) for name, source in self._sources.items()}
        divisors = self._load(Source(ROPE_FREQUENCIES)) if ROPE_FREQUENCIES in shapes else None
        self._config = recover_config(keys, names, shapes, divisors, _config_dtype(header.tensors))

    @property
    def path(self) -> Path:
        """The GGUF file."""
        return self._path

    @property
    def config(self) -> dict[str, Any]:
        """The config recovered from metadata and shapes."""
        return self._config

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its Hugging Face name, experts separately, in the order of the file."""
        return MappingProxyType(self._tensors)

    def load(self, name: str) -> Tensor:
        """One tensor on the CPU, dequantized to float32 if it is stored quantized. Raises CheckpointError."""
        if name not in self._sources:
            raise CheckpointError(f"{self._path} has no tensor {shown(name)}; it holds {len(self._tensors)} others")
        return self._load(self._sources[name])

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The file's metadata without its vocabulary."""
        return self._metadata

    def kind(self, name: str) -> Kind:
        """The type in which a tensor is stored."""
        return self._stored[self._sources[name].stored].kind

    def rows(self, name: str) -> UInt8[Tensor, "out bytes"]:
        """The bytes of a matrix as they are stored, a row a row, rows in the order of Hugging Face."""
        source = self._sources[name]
        return self._bytes(source).view(self._shape(source)[0], -1)

    def first_row(self, name: str) -> UInt8[Tensor, "1 bytes"]:
        """The bytes of the row of a matrix that lies first in the file."""
        source = self._sources[name]
        stored = self._stored[source.stored]
        offset = stored.offset + (source.expert or 0) * (stored.nbytes // stored.shape[0])
        return read_range(self._path, offset, stored.nbytes // prod(stored.shape[:-1])).view(1, -1)

    def companion_files(self) -> dict[str, bytes]:
        """Tokenizer and generation config recovered from the metadata, or whatever files lie in the folder of its own.

        Raises UnsupportedError when there are none and the tokenizer cannot be rebuilt faithfully.
        """
        beside = companion_files(self._companions) if self._companions else {}
        if "tokenizer.json" in beside or "tokenizer.model" in beside:
            return beside
        return recover_tokenizer(read_header(self._path).metadata, str(self._path)) | beside

    def fingerprint(self) -> str:
        """Hex sha256 of metadata, tensor table and sampled data; see `fingerprint.py`."""
        header = bytes(read_range(self._path, 0, self._header_length).numpy())
        return fingerprint(b"", [(self._path, header)])

    def close(self) -> None:
        """Nothing is held open between loads."""

    def __enter__(self) -> "GgufCheckpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _info(self, name: str, source: Source) -> TensorInfo:
        stored = self._stored[source.stored]
        if stored.kind not in PLAIN_DTYPES and stored.kind not in DEQUANTIZED:
            raise UnsupportedError(
                f"{self._path}: tensor {shown(source.stored)} is stored as {stored.kind.name}, not supported"
            )
        dtype, shape = PLAIN_DTYPES.get(stored.kind, torch.float32), self._shape(source)
        heads = source.interleaved_heads
        if heads and shape[0] % (2 * heads):
            raise CheckpointError(
                f"{self._path}: {shown(source.stored)} has {shape[0]} rows, which do not fit {heads} heads"
            )
        return TensorInfo(name, dtype, shape, self._path.name, prod(shape) * dtype.itemsize)

    def _shape(self, source: Source) -> tuple[int, ...]:
        """Of the tensor as it is loaded."""
        stored = self._stored[source.stored].shape
        shape = stored if source.expert is None else stored[1:]
        return (1, *shape) if source.as_row else shape

    def _bytes(self, source: Source) -> UInt8[Tensor, "bytes"]:
        """What is stored of a tensor, its rows in order."""
        stored = self._stored[source.stored]
        offset, count = stored.offset, stored.nbytes
        if source.expert is not None:
            count //= stored.shape[0]
            offset += source.expert * count
        data = read_range(self._path, offset, count)
        if source.interleaved_heads:
            halves = data.view(source.interleaved_heads, stored.shape[0] // source.interleaved_heads // 2, 2, -1)
            data = halves.transpose(1, 2).reshape(-1)
        return data

    def _load(self, source: Source) -> Tensor:
        kind, shape = self._stored[source.stored].kind, self._shape(source)
        data = self._bytes(source)
        if kind in PLAIN_DTYPES:
            return data.view(PLAIN_DTYPES[kind]).reshape(shape)
        rows = data.view(prod(shape[:-1]), -1).numpy()
        return torch.from_numpy(gguf.quants.dequantize(rows, kind)).reshape(shape)


def _config_dtype(stored: Mapping[str, StoredTensor]) -> str:
    """The type of the model's matrices; bfloat16 when they are quantized, because the file does not say then."""
    kinds = {tensor.kind for tensor in stored.values() if len(tensor.shape) > 1}
    if kinds == {Kind.F32}:
        return "float32"
    return "float16" if kinds <= {Kind.F16, Kind.F32} else "bfloat16"
