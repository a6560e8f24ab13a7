"""A file that is written and hashed by two threads while its content is made by another.

Hashing takes as long as writing, and both let other threads run; so does flushing to the disk, which the system is
asked to begin as soon as bytes are there. A disk takes its time to empty its own cache, too: a thread has it do so now
and then, so that little is left to wait for at the end.
"""

import hashlib
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

_PIECE_BYTES = 4 << 20
_AHEAD_BYTES = 24 << 20  # that may be in work
_SYNC_BYTES = 128 << 20


class HashedFile:
    """The file at `path`, made anew; leaving the context without `finish` leaves a torn one."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self._writer, self._hasher, self._syncer = (ThreadPoolExecutor(1) for _ in range(3))
        self._pending: deque[tuple[int, Future[Any], Future[Any]]] = deque()
        self._waiting = 0
        self._synced = 0
        self._sync: Future[None] | None = None
        self.nbytes = 0

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in (self._writer, self._hasher, self._syncer):
            pool.shutdown(cancel_futures=kind is not None)
        self._file.close()

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`, which must not change afterwards. Raises the OSError of an earlier piece."""
        whole = memoryview(data).cast("B")
        for begin in range(0, len(whole), _PIECE_BYTES):
            self._append(whole[begin : begin + _PIECE_BYTES])

    def _append(self, piece: memoryview) -> None:
        while self._pending and self._waiting + len(piece) > _AHEAD_BYTES:
            self._settle()
        start, self.nbytes = self.nbytes, self.nbytes + len(piece)
        self._waiting += len(piece)
        written = self._writer.submit(self._write, piece, start)
        hashed = self._hasher.submit(self._digest.update, piece)
        self._pending.append((len(piece), written, hashed))

    def finish(self, *, sync: bool = True) -> str:
        """Flush the file to the disk; returns the hex sha256 of all of it. Raises OSError.

        Without `sync` its bytes are with the system only, on their way to the disk: `sync_file` waits for them.
        """
        while self._pending:
            self._settle()
        if self._sync is not None:
            self._sync.result()  # an error that it met is not told again
        self._file.flush()
        if sync:
            os.fsync(self._file.fileno())
        return self._digest.hexdigest()

    def _settle(self) -> None:
        size, *futures = self._pending.popleft()
        self._waiting -= size
        for future in futures:
            future.result()

    def _write(self, data: memoryview, start: int) -> None:
        self._file.write(data)
        if hasattr(os, "posix_fadvise"):  # begins writing back what it is said of
            self._file.flush()
            os.posix_fadvise(self._file.fileno(), start, len(data), os.POSIX_FADV_DONTNEED)
        if start + len(data) - self._synced > _SYNC_BYTES and (self._sync is None or self._sync.done()):
            if self._sync is not None:
                self._sync.result()
            self._file.flush()
            self._synced = start + len(data)
            self._sync = self._syncer.submit(os.fsync, self._file.fileno())


def sync_file(path: Path) -> None:
    """Wait until the disk has all that was written to the file. Raises OSError."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
