"""A thread that runs the engine's steps, and the handles by which callers follow their requests.

Any thread may submit and cancel. One lock guards all bookkeeping; the forward pass runs outside of it. Chunks reach a
handle in order, and it can be read from a thread or from an event loop.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

from cann_llm_quant.errors import CannQuantError, OverloadedError, UsageError
from cann_llm_quant.runner.answer import Chunk, Generation, Timings
from cann_llm_quant.runner.batch import Batch, EngineStats, Output, Request
from cann_llm_quant.runner.scheduler import Step
from cann_llm_quant.runner.settings import GenerationSettings


class Handle:
    """A request's answer as it comes: iterate over chunks (`for` or `async for`), or take the whole `result()`.

    It is read once, by one reader. Errors that end the request are raised there.
    """

    def __init__(self, service: "Service", prompt_tokens: int, owner: object) -> None:
        self._service = service
        self._owner = owner
        self._changed = threading.Condition()
        self._items: deque[Chunk | CannQuantError] = deque()
        self._ended = False
        self._wake: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._request: Request | None = None
        self._submitted = time.perf_counter()
        self._times: list[float] = []
        self.prompt_tokens = prompt_tokens

    @property
    def id(self) -> int:
        """The number of the request in its engine."""
        return self._bound.sequence.id

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were taken from the prefix cache; 0 before it runs."""
        return self._bound.cached_tokens or 0

    def cancel(self) -> None:
        """End the request and give its pages back; nothing happens when it has ended already."""
        self._service.cancel(self)

    def __iter__(self) -> Iterator[Chunk]:
        """The chunks; a caller that stops early cancels the request."""
        try:
            while True:
                with self._changed:
                    while not self._items:
                        if self._ended:
                            return
                        self._changed.wait()
                    item = self._items.popleft()
                yield _chunk(item)
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """The chunks in an event loop; a caller that stops early, or is cancelled, cancels the request."""
        event = asyncio.Event()
        with self._changed:
            self._wake = (asyncio.get_running_loop(), event)
        try:
            while True:
                with self._changed:
                    event.clear()
                    item = self._items.popleft() if self._items else None
                    if item is None and self._ended:
                        return
                if item is None:
                    await event.wait()
                else:
                    yield _chunk(item)
        finally:
            self.cancel()

    def result(self) -> Generation:
        """The whole answer, once it is there."""
        return self._generation(list(self))

    async def result_async(self) -> Generation:
        """The whole answer, awaited."""
        return self._generation([chunk async for chunk in self])

    @property
    def _bound(self) -> Request:
        assert self._request is not None
        return self._request

    def _generation(self, chunks: list[Chunk]) -> Generation:
        reason = chunks[-1].finish_reason if chunks else None
        if reason is None:
            raise UsageError("this answer has been read already; keep what was read, or submit the request again")
        sampled = [chunk for chunk in chunks if chunk.token_id is not None]
        logprobs = tuple(chunk.logprobs for chunk in sampled if chunk.logprobs is not None)
        first = self._times[0]
        return Generation(
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(chunk.token_id for chunk in sampled if chunk.token_id is not None),
            finish_reason=reason,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            timings=Timings(first - self._submitted, self._times[-1] - first),
            logprobs=logprobs or None,
        )

    def _put(self, item: Chunk | CannQuantError) -> None:
        with self._changed:
            self._times.append(time.perf_counter())
            self._items.append(item)
            self._ended = isinstance(item, CannQuantError) or item.finish_reason is not None
            self._changed.notify_all()
            if self._wake is not None:
                loop, event = self._wake
                with suppress(RuntimeError):  # the loop is closed, perhaps since this moment: nobody reads there
                    loop.call_soon_threadsafe(event.set)


def _chunk(item: Chunk | CannQuantError) -> Chunk:
    if isinstance(item, CannQuantError):
        raise item
    return item


class Service:
    """Runs a batch in a thread that starts with the first request."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._changed = threading.Condition()
        self._handles: dict[int, Handle] = {}
        self._thread: threading.Thread | None = None
        self._closing = False
        self._broken: CannQuantError | None = None

    def submit(self, prompt: tuple[int, ...], settings: GenerationSettings, owner: object = None) -> Handle:
        """Queue a request; `owner` lives as long as its handle does.

        Raises what `Batch.add` raises, OverloadedError once the service is closing, and what broke it.
        """
        handle = Handle(self, len(prompt), owner)
        with self._changed:
            if self._broken is not None:
                raise self._broken
            if self._closing:
                raise OverloadedError("the engine is shutting down and takes no more requests")
            request = self._batch.add(prompt, settings, time.monotonic())
            handle._request = request
            self._handles[request.sequence.id] = handle
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cann-llm-quant engine", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return handle

    def cancel(self, handle: Handle) -> None:
        """End a request early."""
        with self._changed:
            chunk = None if self._broken else self._batch.abort(handle._bound)
            if chunk is not None:
                self._deliver([Output(handle._bound, chunk)])

    def stats(self) -> EngineStats:
        """A moment's counts."""
        with self._changed:
            return self._batch.stats()

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Take no more requests; let those that run end (`drain`, at most `timeout` seconds), then cancel the rest."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if drain:
                self._changed.wait_for(lambda: not self._handles, timeout)
            left = list(self._handles.values())
        for handle in left:
            self.cancel(handle)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._batch.close()

    def _run(self) -> None:
        """The loop: one step after another while there is work."""
        try:
            while self._step():
                pass
        except Exception as error:  # a fault in the bookkeeping: nobody may wait for an engine that stands still
            with self._changed:
                self._broken = _failure("the engine broke down and has to be made anew", error)
                self._deliver([Output(handle._bound, self._broken) for handle in self._handles.values()])

    def _step(self) -> bool:
        """Wait for work and do a step of it; False once the service is closing and there is none."""
        with self._changed:
            while not self._batch.busy and not self._closing:
                self._changed.wait()
            if not self._batch.busy:
                return False
            now = time.monotonic()
            step, outputs = self._batch.schedule(now)
            self._deliver(outputs)
            if step.wake is not None:
                self._compute(step)
                self._changed.wait(step.wake - now)
                return True
        self._compute(step)
        return True

    def _compute(self, step: Step) -> None:
        try:
            outcomes = self._batch.compute(step)
        except Exception as error:  # whatever stops a step (memory, a device, a disk) ends its requests, not the engine
            with self._changed:
                self._deliver(self._batch.fail(step, _failure("computing a step failed", error)))
        else:
            with self._changed:
                self._deliver(self._batch.commit(step, outcomes))

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            key = output.request.sequence.id
            chunk = output.chunk
            ended = isinstance(chunk, CannQuantError) or chunk.finish_reason is not None
            handle = self._handles.pop(key) if ended else self._handles[key]
            handle._put(chunk)
        self._changed.notify_all()


def _failure(what: str, error: Exception) -> CannQuantError:
    if isinstance(error, CannQuantError):
        return error
    wrapped = CannQuantError(f"{what}: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
