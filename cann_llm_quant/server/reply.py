"""Jobs to a response: one JSON object, or a stream of server-sent events. A client that leaves ends its jobs.

Events (WHATWG, "Server-sent events") are `data: JSON` and a blank line; `data: [DONE]` is the last. A failure after
the first byte cannot change the status any more, so it becomes an event with an `error` object and the stream ends
without `[DONE]`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence

from fastapi import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from cann_llm_quant.errors import CannQuantError
from cann_llm_quant.server.answer_form import AnswerForm, Json
from cann_llm_quant.server.disconnect import ClientLeftError, unless_disconnected
from cann_llm_quant.server.failures import failure_response
from cann_llm_quant.server.jobs import Job
from cann_llm_quant.server.metrics import CLIENT_LEFT
from cann_llm_quant.server.service import Service, service_of

DONE = b"data: [DONE]\n\n"


async def reply(request: Request, jobs: Sequence[Job], form: AnswerForm, *, stream: bool) -> Response:
    """The response to a request whose jobs are submitted; they are released with it."""
    service = service_of(request)
    if stream:
        (job,) = jobs
        return EventStream(service, job, form)
    try:
        answers = asyncio.gather(*(job.answer() for job in jobs))
        return JSONResponse(form.whole(await unless_disconnected(request.receive, answers)))
    except ClientLeftError:
        return Response(status_code=CLIENT_LEFT)
    finally:
        service.release(jobs)


class EventStream(Response):
    """Events as the tokens are made."""

    media_type = "text/event-stream"

    def __init__(self, service: Service, job: Job, form: AnswerForm) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._service = service
        self._job = job
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end of the answer or the client leaves."""
        try:
            await unless_disconnected(receive, self._send(send))
        except ClientLeftError:
            pass
        finally:
            self._service.release([self._job])

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events():
                await send({"type": "http.response.body", "body": _line(event), "more_body": True})
            last = DONE
        except CannQuantError as error:
            last = b"data: " + bytes(failure_response(error).body) + b"\n\n"
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _events(self) -> AsyncIterator[Json]:
        opening = self._form.opening()
        if opening is not None:
            yield opening
        offset = 0
        async for piece in self._job.pieces():
            event = self._form.event(piece, offset)
            offset += len(piece.text)
            if event is not None:
                yield event
        closing = self._form.closing(self._job)
        if closing is not None:
            yield closing


def _line(event: Json) -> bytes:
    return b"data: " + json.dumps(event, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n\n"
