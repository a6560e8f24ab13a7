"""What every kind of checkpoint looks like to the rest of the project: named tensors, read lazily, and a config."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what it is, known without reading it. `file` is relative to the checkpoint's folder."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    nbytes: int


@runtime_checkable
class Checkpoint(Protocol):
    """A model's files, opened: a directory of safetensors or `.bin` shards, or a GGUF file.

    Opening validates everything that can be checked without reading tensor data; `load` reads one tensor.
    Implementations may hold file handles, so a checkpoint is a context manager.
    """

    @property
    def path(self) -> Path:
        """The directory or file on this machine."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """The parsed `config.json` (for GGUF: recovered from the metadata)."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every stored tensor by name, in a stable order."""
        ...

    def load(self, name: str) -> Tensor:
        """One tensor on the CPU in its stored dtype, owning its memory. Raises CheckpointError when it is not there."""
        ...

    def companion_files(self) -> dict[str, bytes]:
        """Files that travel with the weights, by relative name, byte for byte.

        Tokenizer, chat template, generation config, licence and model card; for GGUF those recovered from the metadata.
        No `config.json`, no weights, no code.
        """
        ...

    def fingerprint(self) -> str:
        """Hex sha256 that changes when config, tensor layout or (sampled) tensor bytes change."""
        ...

    def close(self) -> None:
        """Release file handles."""
        ...

    def __enter__(self) -> "Checkpoint": ...

    def __exit__(self, *_: object) -> None: ...
