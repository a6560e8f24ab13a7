"""`POST /generate`: settings under their names in the Python API, token ids in the answer."""

from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from cann_llm_quant.runner.sampler import TokenLogprobs
from cann_llm_quant.server.answer_form import Json, finite, usage
from cann_llm_quant.server.jobs import Answer, Job, Piece
from cann_llm_quant.server.reply import reply
from cann_llm_quant.server.request_bodies import GenerateRequest
from cann_llm_quant.server.service import service_of

router = APIRouter()


@router.post("/generate")
async def generate(body: GenerateRequest, request: Request) -> Response:
    """Continue a text or token ids."""
    service = service_of(request)
    settings = body.generation()
    jobs = service.submit(await service.prompt_ids([body.prompt]), settings)
    return await reply(request, jobs, GenerateForm(), stream=body.stream)


class GenerateForm:
    """Text, token ids, and log-probabilities as `[token id, value]` where asked for."""

    def whole(self, answers: Sequence[Answer]) -> Json:
        """The answer to the one prompt."""
        (answer,) = answers
        logprobs = [_logprobs(piece.logprobs) for piece in answer.pieces]
        return {
            "text": answer.text,
            "token_ids": [piece.token_id for piece in answer.pieces],
            "finish_reason": answer.finish_reason,
            "logprobs": None if None in logprobs else logprobs,
            "usage": usage(answer.prompt_tokens, len(answer.pieces)),
        }

    def opening(self) -> Json | None:
        """Nothing comes before the first token."""
        return None

    def event(self, piece: Piece, offset: int) -> Json | None:
        """Every token has its event, with or without text."""
        return {
            "text": piece.text,
            "token_id": piece.token_id,
            "finish_reason": piece.finish_reason,
            "logprobs": _logprobs(piece.logprobs),
        }

    def closing(self, job: Job) -> Json | None:
        """The token counts."""
        return {"usage": usage(job.prompt_tokens, job.new_tokens)}


def _logprobs(found: TokenLogprobs | None) -> Json | None:
    if found is None:
        return None
    return {"logprob": finite(found.logprob), "top": [[token, finite(value)] for token, value in found.top]}
