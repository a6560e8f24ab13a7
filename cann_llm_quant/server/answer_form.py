"""How an endpoint writes its answers: `AnswerForm`, and what OpenAI's two forms have in common."""

import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from cann_llm_quant.server.jobs import Answer, Job, Piece

Json = dict[str, Any]
LEAST_LOGPROB = -9999.0  # JSON has no -infinity; OpenAI's API writes this number for tokens that cannot be


@runtime_checkable
class AnswerForm(Protocol):
    """JSON objects of one response."""

    def whole(self, answers: Sequence[Answer]) -> Json:
        """The body of a response that is not streamed."""
        ...

    def opening(self) -> Json | None:
        """An event before the first token."""
        ...

    def event(self, piece: Piece, offset: int) -> Json | None:
        """The event of one token; `offset` characters were given out before. None where there is nothing to say."""
        ...

    def closing(self, job: Job) -> Json | None:
        """An event after the last token."""
        ...


class OpenAIForm:
    """The frame of both endpoints: one id and time for all objects of a response, token counts where asked for."""

    def __init__(self, kind: str, event_kind: str, id_prefix: str, model: str, *, include_usage: bool) -> None:
        self._kinds = (kind, event_kind)
        self._id = f"{id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._include_usage = include_usage

    def body(self, choices: list[Json], answers: Sequence[Answer]) -> Json:
        """A whole response."""
        counts = usage(sum(a.prompt_tokens for a in answers), sum(len(a.pieces) for a in answers))
        return {**self._frame(self._kinds[0]), "choices": choices, "usage": counts}

    def chunk(self, choices: list[Json]) -> Json:
        """One event; with token counts to come, those of the others are null."""
        return {**self._frame(self._kinds[1]), "choices": choices, **({"usage": None} if self._include_usage else {})}

    def closing(self, job: Job) -> Json | None:
        """The token counts, in an event without choices."""
        if not self._include_usage:
            return None
        return {**self._frame(self._kinds[1]), "choices": [], "usage": usage(job.prompt_tokens, job.new_tokens)}

    def _frame(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}


def usage(prompt_tokens: int, new_tokens: int) -> Json:
    """Token counts under OpenAI's names."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LEAST_LOGPROB)
