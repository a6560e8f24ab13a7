"""What the server needs of an engine, and no more."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from cann_llm_quant.runner.answer import Chunk


@runtime_checkable
class Handle(Protocol):
    """One submitted request: its chunks as they are made."""

    def __aiter__(self) -> AsyncIterator[Chunk]:
        """Chunks up to the one with a `finish_reason`."""
        ...

    def cancel(self) -> None:
        """End the request and give its pages back; no effect on a finished one."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Runs requests on a thread of its own."""

    tokenizer: PreTrainedTokenizerBase
    max_context: int

    def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt; RequestError for one that cannot be."""
        ...

    def submit(self, prompt: Sequence[int], **settings: Any) -> Handle:
        """Queue a request with the fields of `GenerationSettings`, without waiting for it.

        RequestError if it can never run, OverloadedError if too many wait.
        """
        ...

    def stats(self) -> object:
        """A dataclass of numbers, possibly nested."""
        ...
