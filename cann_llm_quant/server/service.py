"""The state of one application: its engine, its name for the model, and the requests in progress."""

from collections.abc import Mapping, Sequence

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from cann_llm_quant.errors import RequestError
from cann_llm_quant.runner.settings import GenerationSettings
from cann_llm_quant.server.engine_door import Engine
from cann_llm_quant.server.failures import ShuttingDownError, UnknownModelError
from cann_llm_quant.server.jobs import Job
from cann_llm_quant.server.metrics import Metrics
from cann_llm_quant.tokenizer import chat_ids, has_chat_template


class Service:
    """What the endpoints share."""

    def __init__(self, engine: Engine, model_name: str, created: int) -> None:
        self.engine = engine
        self.model_name = model_name
        self.created = created
        self.metrics = Metrics(engine.stats)
        self.draining = False
        self._jobs: set[Job] = set()

    def check_model(self, name: str) -> None:
        """UnknownModelError for a model that is not the one here."""
        if name != self.model_name:
            raise UnknownModelError(name, self.model_name)

    async def prompt_ids(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Token ids of each prompt, found on a thread because a long text takes a while."""
        return await run_in_threadpool(lambda: [self.engine.prompt_ids(prompt) for prompt in prompts])

    async def chat_ids(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Token ids of a chat by the model's own template, on a thread of its own.

        RequestError where there is no template, CorpusError where it refuses the messages.
        """
        tokenizer = self.engine.tokenizer
        if not has_chat_template(tokenizer):
            raise RequestError("messages", "messages: the model has no chat template; use /v1/completions")
        return await run_in_threadpool(chat_ids, tokenizer, messages)

    def submit(self, prompts: Sequence[list[int]], settings: GenerationSettings) -> list[Job]:
        """One job for each prompt, or none at all; the caller gives them to `release`.

        RequestError, OverloadedError or ShuttingDownError where one is refused.
        """
        if self.draining:
            raise ShuttingDownError("the server is shutting down; send the request to another or later")
        jobs: list[Job] = []
        try:
            for prompt in prompts:
                jobs.append(Job(self.engine.submit(prompt, **vars(settings)), len(prompt), self.metrics))
        except BaseException:
            for job in jobs:
                job.close()
            raise
        self._jobs.update(jobs)
        return jobs

    def release(self, jobs: Sequence[Job]) -> None:
        """Close jobs, finished or not."""
        for job in jobs:
            job.close()
            self._jobs.discard(job)

    @property
    def is_idle(self) -> bool:
        """Whether no answer is being made or sent."""
        return not self._jobs

    def give_up(self) -> None:
        """Cancel what is left, at the end of a shutdown's time; its clients are told."""
        for job in self._jobs:
            job.cancel()


def service_of(request: Request) -> Service:
    """The application's service."""
    service: Service = request.app.state.service
    return service
