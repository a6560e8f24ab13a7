"""A file that is written and hashed by two threads while its content is made by a third.

Hashing takes as long as writing, and both let other threads run; so does flushing to the disk, which the system is
asked to begin as soon as bytes are there.
"""

import hashlib
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

# Bytes that may be in work besides the piece that is made; a larger piece is in work alone.
_AHEAD_BYTES = 24 << 20


class HashedFile:
    """The file at `path`, made anew; leaving the context without `finish` leaves a torn one."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self._writer, self._hasher = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._pending: deque[tuple[int, Future[Any], Future[Any]]] = deque()
        self._waiting = 0
        self.nbytes = 0

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in (self._writer, self._hasher):
            pool.shutdown(cancel_futures=kind is not None)
        self._file.close()

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`, which must not change afterwards. Raises the OSError of an earlier piece."""
        while self._pending and self._waiting + len(data) > _AHEAD_BYTES:
            self._settle()
        start, self.nbytes = self.nbytes, self.nbytes + len(data)
        self._waiting += len(data)
        written, hashed = self._writer.submit(self._write, data, start), self._hasher.submit(self._digest.update, data)
        self._pending.append((len(data), written, hashed))

    def finish(self, *, sync: bool = True) -> str:
        """Flush the file to the disk; returns the hex sha256 of all of it. Raises OSError.

        Without `sync` its bytes are with the system only, on their way to the disk: `sync_file` waits for them.
        """
        while self._pending:
            self._settle()
        self._file.flush()
        if sync:
            os.fsync(self._file.fileno())
        return self._digest.hexdigest()

    def _settle(self) -> None:
        size, *futures = self._pending.popleft()
        self._waiting -= size
        for future in futures:
            future.result()

    def _write(self, data: bytes | memoryview, start: int) -> None:
        self._file.write(data)
        if hasattr(os, "posix_fadvise"):  # begins writing back what it is said of
            self._file.flush()
            os.posix_fadvise(self._file.fileno(), start, len(data), os.POSIX_FADV_DONTNEED)


def sync_file(path: Path) -> None:
    """Wait until the disk has all that was written to the file. Raises OSError."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
