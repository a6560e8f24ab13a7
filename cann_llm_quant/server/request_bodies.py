"""The bodies of requests: OpenAI's completions and chat as far as this server carries them out, and `/generate`.

References: OpenAI API reference, "Completions" and "Chat Completions".
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cann_llm_quant.errors import RequestError
from cann_llm_quant.runner.settings import GenerationSettings
from cann_llm_quant.server.sampling_fields import SamplingFields, Text

MAX_PROMPTS = 128
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens


class Strict(BaseModel):
    """Exactly these fields, of exactly these types."""

    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(Strict):
    """`include_usage`: one more event with the token counts before the end."""

    include_usage: bool = False


class OpenAIFields(SamplingFields):
    """What both of OpenAI's endpoints take; OpenAI's temperature is 1 where a request names none."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: Literal[1] | None = None
    user: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check_stream_options(self) -> None:
        """RequestError where they are given to an answer that is not streamed."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options", "stream_options are for requests with stream: true")

    def openai_settings(self, max_new_tokens: int, logprobs: int | None) -> GenerationSettings:
        """`settings` with OpenAI's default temperature."""
        temperature = 1.0 if self.temperature is None else self.temperature
        return self.settings(max_new_tokens=max_new_tokens, logprobs=logprobs, temperature=temperature)


Ids = list[int]


class CompletionRequest(OpenAIFields):
    """`POST /v1/completions`: continue one prompt or several, each a text or token ids."""

    prompt: Text | Ids | Annotated[list[Text] | list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
    logprobs: int | None = None

    def prompts(self) -> list[str | Ids]:
        """One or several prompts; an empty list is one empty prompt."""
        prompt: Any = self.prompt
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        return list(prompt) if several else [prompt]

    def generation(self) -> GenerationSettings:
        """RequestError for a value out of range."""
        self.check_stream_options()
        count = COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self.openai_settings(count, self.logprobs)


class TextPart(Strict):
    """A piece of a message; only texts are taken."""

    type: Literal["text"]
    text: Text


class Message(Strict):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: Text | None = None

    def plain(self) -> dict[str, str]:
        """The message as chat templates take it: its parts joined, and no field that is absent."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content} | ({} if self.name is None else {"name": self.name})


class ChatRequest(OpenAIFields):
    """`POST /v1/chat/completions`. `max_tokens` is the older name of `max_completion_tokens`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def limit_field(self) -> str:
        """The name under which this request limits its answer."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def generation(self, room: int) -> GenerationSettings:
        """Settings of an answer that may fill the `room` left in the context; RequestError for values out of range."""
        self.check_stream_options()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs", "top_logprobs needs logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise RequestError("max_tokens", "max_tokens and max_completion_tokens are one setting; send one of them")
        given = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if given is None and room < 1:
            raise RequestError("messages", "the messages fill the model's context; shorten them")
        return self.openai_settings(
            room if given is None else given, (self.top_logprobs or 0) if self.logprobs else None
        )


class GenerateRequest(SamplingFields):
    """`POST /generate`: this project's own form; greedy unless told, names as in the Python API."""

    prompt: Text | Ids
    max_new_tokens: int | None = None
    logprobs: int | None = None
    stream: bool = False

    def generation(self) -> GenerationSettings:
        """RequestError for a value out of range."""
        return self.settings(max_new_tokens=self.max_new_tokens, logprobs=self.logprobs)
