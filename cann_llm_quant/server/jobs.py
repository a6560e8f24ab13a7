"""Requests on their way through the engine, each counted, and always given back to it."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from cann_llm_quant.runner.sampler import TokenLogprobs
from cann_llm_quant.server.engine_door import Handle
from cann_llm_quant.server.failures import ShuttingDownError
from cann_llm_quant.server.metrics import Metrics


@dataclass(frozen=True)
class Piece:
    """One token of an answer and the text that it completes; the last says why it is the last."""

    token_id: int
    text: str
    finish_reason: str | None
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class Answer:
    """A finished answer."""

    pieces: tuple[Piece, ...]
    prompt_tokens: int

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def finish_reason(self) -> str | None:
        """`stop` or `length`."""
        return self.pieces[-1].finish_reason


class Job:
    """One request that the engine works on; `close` must be called whatever becomes of it."""

    def __init__(self, handle: Handle, prompt_tokens: int, metrics: Metrics) -> None:
        self.prompt_tokens = prompt_tokens
        self.new_tokens = 0
        self._handle = handle
        self._metrics = metrics
        self._started = time.perf_counter()
        self._reason: str | None = None
        self._closed = False
        metrics.in_progress.inc()
        metrics.prompt_tokens.inc(prompt_tokens)

    async def pieces(self) -> AsyncIterator[Piece]:
        """The answer's tokens, counted. Raises ShuttingDownError where somebody else cancelled the request."""
        async for chunk in self._handle:
            if chunk.token_id is None:
                break
            self._count(chunk.finish_reason)
            yield Piece(chunk.token_id, chunk.text, chunk.finish_reason, chunk.logprobs)
        if self._reason is None:
            raise ShuttingDownError("the server shuts down and gave the request up; send it again")

    async def answer(self) -> Answer:
        """All pieces together."""
        return Answer(tuple([piece async for piece in self.pieces()]), self.prompt_tokens)

    def cancel(self) -> None:
        """Let the engine end it; whoever reads its pieces is told."""
        self._handle.cancel()

    def close(self) -> None:
        """Give an unfinished request back; once."""
        if self._closed:
            return
        self._closed = True
        if self._reason is None:
            self._handle.cancel()
        self._metrics.in_progress.dec()
        self._metrics.finished.labels(self._reason or "cancelled").inc()
        self._metrics.duration.observe(time.perf_counter() - self._started)

    def _count(self, reason: str | None) -> None:
        if not self.new_tokens:
            self._metrics.first_token.observe(time.perf_counter() - self._started)
        self.new_tokens += 1
        self._metrics.generated_tokens.inc()
        self._reason = reason
