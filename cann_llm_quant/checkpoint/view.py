"""A checkpoint that shows another one: what a view does not change is the inner one's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from cann_llm_quant.checkpoint.base import Checkpoint, TensorInfo

Same = TypeVar("Same")


class CheckpointView:
    """Everything of `inner`, as it is; implements `base.Checkpoint`. Views override what they show otherwise."""

    def __init__(self, inner: Checkpoint) -> None:
        self.inner = inner

    @property
    def path(self) -> Path:
        """The directory or file."""
        return self.inner.path

    @property
    def config(self) -> dict[str, Any]:
        """The config."""
        return self.inner.config

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Tensors by name."""
        return self.inner.tensors

    def load(self, name: str) -> Tensor:
        """One tensor on the CPU."""
        return self.inner.load(name)

    def companion_files(self) -> dict[str, bytes]:
        """Tokenizer, generation config and the like, byte for byte."""
        return self.inner.companion_files()

    def fingerprint(self) -> str:
        """That of the files: what a view shows follows from them."""
        return self.inner.fingerprint()

    def close(self) -> None:
        """Release file handles."""
        self.inner.close()

    def __enter__(self: Same) -> Same:  # `Self` is not known where each method is type-checked on its own
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
