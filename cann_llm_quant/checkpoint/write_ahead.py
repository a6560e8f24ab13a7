"""Units of an output written, hashed and flushed by threads while the next ones are made.

One thread hands a unit's bytes to the system, another waits until the disk has them and enters the unit in the journal:
so the disk is never idle, neither while a unit is made nor while one is waited for. What waits to be written is bounded
by bytes, so that many small units smooth out what a large one takes; a unit that is larger waits alone.
"""

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

from torch import Tensor

from cann_llm_quant.checkpoint.writer import CheckpointWriter

_WAITING_BYTES = 192 << 20
_STAGED_BYTES = 256 << 20  # that the system has and the disk may not: as much is made again after a kill


class WriteAhead:
    """Hands units to `writer` in order; leaving the context waits for the last. Nobody else may use it meanwhile."""

    def __init__(self, writer: CheckpointWriter) -> None:
        self._writer = writer
        self._stager, self._committer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._pending: deque[tuple[int, Future[None]]] = deque()
        self._staged: deque[tuple[int, Future[None]]] = deque()

    def __enter__(self) -> "WriteAhead":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in (self._stager, self._committer):
            pool.shutdown(cancel_futures=kind is not None)
        if kind is None:
            while self._pending:
                self._settle()
            for _, committed in self._staged:
                committed.result()

    def write_unit(self, unit: str, tensors: Mapping[str, Tensor], record: dict[str, Any]) -> None:
        """As `CheckpointWriter.write_unit`, whose errors this or a later call raises."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        while self._pending and sum(waiting for waiting, _ in self._pending) + size > _WAITING_BYTES:
            self._settle()
        self._pending.append((size, self._stager.submit(self._stage, unit, tensors, record)))

    def _stage(self, unit: str, tensors: Mapping[str, Tensor], record: dict[str, Any]) -> None:
        entry = self._writer.stage_unit(unit, tensors, record)
        self._staged.append((entry.bytes, self._committer.submit(self._writer.commit_unit, entry)))
        while sum(size for size, _ in self._staged) > _STAGED_BYTES:
            self._staged.popleft()[1].result()

    def _settle(self) -> None:
        self._pending.popleft()[1].result()
