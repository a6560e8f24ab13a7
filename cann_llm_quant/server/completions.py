"""`POST /v1/completions`."""

from collections.abc import Sequence
from itertools import accumulate

from fastapi import APIRouter, Request
from starlette.responses import Response

from cann_llm_quant.errors import RequestError
from cann_llm_quant.runner.sampler import TokenLogprobs
from cann_llm_quant.server.answer_form import Json, OpenAIForm, finite
from cann_llm_quant.server.failures import field_names
from cann_llm_quant.server.jobs import Answer, Piece
from cann_llm_quant.server.reply import reply
from cann_llm_quant.server.request_bodies import CompletionRequest
from cann_llm_quant.server.service import Service, service_of
from cann_llm_quant.server.token_texts import TokenTexts

router = APIRouter()


@router.post("/v1/completions")
async def complete(body: CompletionRequest, request: Request) -> Response:
    """Continue a prompt, or several where the answer is not streamed."""
    service = service_of(request)
    service.check_model(body.model)
    with field_names(max_new_tokens="max_tokens"):
        settings = body.generation()
        prompts = body.prompts()
        if body.stream and len(prompts) > 1:
            raise RequestError("prompt", "prompt: a stream continues one prompt; send several without stream")
        jobs = service.submit(await service.prompt_ids(prompts), settings)
    return await reply(request, jobs, CompletionForm(service, body.include_usage), stream=bool(body.stream))


class CompletionForm(OpenAIForm):
    """`text_completion` objects."""

    def __init__(self, service: Service, include_usage: bool) -> None:
        super().__init__("text_completion", "text_completion", "cmpl", service.model_name, include_usage=include_usage)
        self._texts = TokenTexts(service.engine.tokenizer)

    def whole(self, answers: Sequence[Answer]) -> Json:
        """One choice for each prompt."""
        return self.body([self._choice(index, answer) for index, answer in enumerate(answers)], answers)

    def opening(self) -> Json | None:
        """Nothing comes before the first token."""
        return None

    def event(self, piece: Piece, offset: int) -> Json | None:
        """A piece of text; nothing while text is withheld."""
        if not piece.text and piece.finish_reason is None and piece.logprobs is None:
            return None
        logprobs = self._logprobs([piece], offset)
        choice = {"index": 0, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        return self.chunk([choice])

    def _choice(self, index: int, answer: Answer) -> Json:
        logprobs = self._logprobs(answer.pieces, 0)
        return {"index": index, "text": answer.text, "logprobs": logprobs, "finish_reason": answer.finish_reason}

    def _logprobs(self, pieces: Sequence[Piece], offset: int) -> Json | None:
        """Lists over the tokens; offsets count the characters given out before a token."""
        found = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        if not found:
            return None
        lengths = [len(piece.text) for piece in pieces]
        return {
            "tokens": [self._texts(piece.token_id) for piece in pieces],
            "token_logprobs": [finite(each.logprob) for each in found],
            "top_logprobs": [self._alternatives(each) for each in found],
            "text_offset": list(accumulate(lengths[:-1], initial=offset)),
        }

    def _alternatives(self, logprobs: TokenLogprobs) -> dict[str, float]:
        """By text, the likeliest first; of tokens with the same text the likelier one counts."""
        named: dict[str, float] = {}
        for token, value in logprobs.top:
            named.setdefault(self._texts(token), finite(value))
        return named
