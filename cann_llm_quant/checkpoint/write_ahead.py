"""Units of an output written, hashed and flushed by a thread while the next ones are made.

What waits to be written is bounded by bytes, so that many small units smooth out what a large one takes; a unit that is
larger waits alone.
"""

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

from torch import Tensor

from cann_llm_quant.checkpoint.writer import CheckpointWriter

_WAITING_BYTES = 192 << 20


class WriteAhead:
    """Hands units to `writer` in order; leaving the context waits for the last. Nobody else may use it meanwhile."""

    def __init__(self, writer: CheckpointWriter) -> None:
        self._writer = writer
        self._pool = ThreadPoolExecutor(1)
        self._pending: deque[tuple[int, Future[None]]] = deque()

    def __enter__(self) -> "WriteAhead":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        if kind is None:
            while self._pending:
                self._settle()

    def write_unit(self, unit: str, tensors: Mapping[str, Tensor], record: dict[str, Any]) -> None:
        """As `CheckpointWriter.write_unit`, whose errors this or a later call raises."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        while self._pending and sum(waiting for waiting, _ in self._pending) + size > _WAITING_BYTES:
            self._settle()
        self._pending.append((size, self._pool.submit(self._writer.write_unit, unit, tensors, record)))

    def _settle(self) -> None:
        self._pending.popleft()[1].result()
