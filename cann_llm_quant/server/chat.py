"""`POST /v1/chat/completions`."""

from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from cann_llm_quant.server.answer_form import Json, OpenAIForm, finite
from cann_llm_quant.server.failures import field_names
from cann_llm_quant.server.jobs import Answer, Piece
from cann_llm_quant.server.reply import reply
from cann_llm_quant.server.request_bodies import ChatRequest
from cann_llm_quant.server.service import Service, service_of
from cann_llm_quant.server.token_texts import TokenTexts

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat(body: ChatRequest, request: Request) -> Response:
    """Answer the last message of a chat, by the model's own template."""
    service = service_of(request)
    service.check_model(body.model)
    with field_names(max_new_tokens=body.limit_field, prompt="messages", logprobs="top_logprobs"):
        body.generation(room=1)  # what is wrong in it is said before the template is rendered
        ids = await service.chat_ids([message.plain() for message in body.messages])
        jobs = service.submit([ids], body.generation(room=service.engine.max_context - len(ids)))
    return await reply(request, jobs, ChatForm(service, body.include_usage), stream=bool(body.stream))


class ChatForm(OpenAIForm):
    """`chat.completion` objects and their chunks."""

    def __init__(self, service: Service, include_usage: bool) -> None:
        kinds = ("chat.completion", "chat.completion.chunk")
        super().__init__(*kinds, "chatcmpl", service.model_name, include_usage=include_usage)
        self._texts = TokenTexts(service.engine.tokenizer)

    def whole(self, answers: Sequence[Answer]) -> Json:
        """The assistant's message."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": self._logprobs(answer.pieces),
                "finish_reason": answer.finish_reason,
            }
            for index, answer in enumerate(answers)
        ]
        return self.body(choices, answers)

    def opening(self) -> Json | None:
        """The role, before the content."""
        return self._event({"role": "assistant", "content": ""}, None, None)

    def event(self, piece: Piece, offset: int) -> Json | None:
        """A piece of content; nothing while text is withheld."""
        if not piece.text and piece.finish_reason is None and piece.logprobs is None:
            return None
        logprobs = self._logprobs([piece])
        return self._event({"content": piece.text} if piece.text else {}, logprobs, piece.finish_reason)

    def _event(self, delta: Json, logprobs: Json | None, reason: str | None) -> Json:
        return self.chunk([{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}])

    def _logprobs(self, pieces: Sequence[Piece]) -> Json | None:
        content = [
            {
                **self._entry(piece.token_id, piece.logprobs.logprob),
                "top_logprobs": [self._entry(*pair) for pair in piece.logprobs.top],
            }
            for piece in pieces
            if piece.logprobs is not None
        ]
        return {"content": content, "refusal": None} if content else None

    def _entry(self, token: int, logprob: float) -> Json:
        return {"token": self._texts(token), "logprob": finite(logprob), "bytes": self._texts.utf8(token)}
