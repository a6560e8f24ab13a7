"""Tensors made by several threads at once and handed over in the order in which they were asked for.

Torch spreads each operator over all cores. Those of an export are short and bound by memory: the cores would spend a
third of their time waiting for one another, and take it from the threads that hash and write. So each operator runs in
one thread here, and every thread has a linear of its own.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeVar

import torch

Made = TypeVar("Made")

# Bytes that may be made and not yet taken. Two jobs are always let in, however large: one is made while one is taken.
_AHEAD_BYTES = 128 << 20
_AHEAD_JOBS = 2


@dataclass(frozen=True)
class Job(Generic[Made]):
    """What `make` gives, about `nbytes` large; it runs in any thread, beside others."""

    nbytes: int
    make: Callable[[], Made]


@contextmanager
def in_order(jobs: Iterable[Job[Made]]) -> Iterator[Iterator[Made]]:
    """The results of `jobs`, begun ahead of their turn; an error comes in its turn, as what was asked for."""
    with one_thread_each() as threads:
        pool = ThreadPoolExecutor(threads)
        try:
            yield _ahead(pool, jobs)
        finally:  # also when nobody asks for the rest
            pool.shutdown(cancel_futures=True)


def _ahead(pool: ThreadPoolExecutor, jobs: Iterable[Job[Made]]) -> Iterator[Made]:
    begun: deque[tuple[int, Future[Made]]] = deque()
    for job in jobs:
        while len(begun) >= _AHEAD_JOBS and sum(nbytes for nbytes, _ in begun) + job.nbytes > _AHEAD_BYTES:
            yield begun.popleft()[1].result()
        begun.append((job.nbytes, pool.submit(job.make)))
    while begun:
        yield begun.popleft()[1].result()


class _Taken:
    """How many threads torch had before the exports that go on in this process, whose setting it is, took them."""

    lock = Lock()
    exports = 0
    threads = 1


@contextmanager
def one_thread_each() -> Iterator[int]:
    """Torch's operators run in one thread meanwhile; gives the number of threads that they had.

    Exports may overlap, in threads of their own: each leaves torch the threads that it had before the first.
    """
    with _Taken.lock:
        if not _Taken.exports:
            _Taken.threads = torch.get_num_threads()
        _Taken.exports += 1
        threads = _Taken.threads
        torch.set_num_threads(1)
    try:
        yield threads
    finally:
        with _Taken.lock:
            _Taken.exports -= 1
            torch.set_num_threads(threads)
