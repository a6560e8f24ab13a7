"""An engine that says what it is told to, so that the server's tests need no model, and a server around it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from runner_tokenizers import byte_level

from cann_llm_quant.errors import NonFiniteResultError, OverloadedError, RequestError
from cann_llm_quant.runner.answer import Chunk
from cann_llm_quant.runner.sampler import TokenLogprobs
from cann_llm_quant.runner.settings import GenerationSettings, check_token_ids
from cann_llm_quant.runner.text_stream import TextStream
from cann_llm_quant.server.app import AppOptions, create_app
from cann_llm_quant.server.serving import DrainingServer, open_socket, url_of

VOCAB = 400  # more rows than the tokenizer's 320 tokens
END = 2
MODEL = "tiny"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
    "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True)
class CacheNumbers:
    queries: int = 7
    hit_rate: float = 0.5


@dataclass(frozen=True)
class Numbers:
    running: int
    cache: CacheNumbers = field(default_factory=CacheNumbers)
    policy: str = "lru"


class FakeHandle:
    """The scripted tokens; `broken` fails after the first."""

    def __init__(self, engine: "FakeEngine", settings: GenerationSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.cancelled = False
        self.finished = False

    def cancel(self) -> None:
        self.cancelled = True

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        script = [*self.engine.script, END]
        stream = TextStream(self.engine.tokenizer.decode)
        for index, token in enumerate(script):
            await asyncio.sleep(self.engine.delay)
            if self.cancelled:
                yield Chunk(None, "", "cancelled")
                return
            if self.engine.broken and index:
                raise NonFiniteResultError("the model's logits hold nan during generation")
            text = "" if token == END else stream.push(token)
            last = index + 1 == self.settings.max_new_tokens
            self.finished = token == END or last
            yield Chunk(token, text, "stop" if token == END else "length" if last else None, self._logprobs(token))
            if self.finished:
                return

    def _logprobs(self, token: int) -> TokenLogprobs | None:
        count = self.settings.logprobs
        if count is None:
            return None
        top = ((token, -0.25), (10, -2.0), (11, float("-inf")))
        return TokenLogprobs(-0.25, top[:count])


class FakeEngine:
    """`script`: the text that every request is answered with; `delay`: seconds a token; `room`: requests it takes."""

    def __init__(self, script: str = "Hello, wörld!", *, delay: float = 0.0, room: int = 1000) -> None:
        self.tokenizer = byte_level()
        self.tokenizer.chat_template = TEMPLATE
        self.max_context = 256
        self.script: list[int] = self.tokenizer.encode(script, add_special_tokens=False)
        self.delay = delay
        self.room = room
        self.broken = False
        self.seen: list[tuple[list[int], GenerationSettings]] = []
        self.handles: list[FakeHandle] = []

    def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        ids = self.tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else list(prompt)
        check_token_ids("prompt", ids, VOCAB)
        return ids or [1]

    def submit(self, prompt: Sequence[int], **given: Any) -> FakeHandle:
        settings = GenerationSettings(**given)
        settings.check_vocabulary(VOCAB)
        if len(prompt) + settings.max_new_tokens > self.max_context:
            raise RequestError("max_new_tokens", f"max_new_tokens {settings.max_new_tokens} exceed the context")
        if len(self.live) >= self.room:
            raise OverloadedError(f"{len(self.live)} requests wait already; send it again later")
        self.seen.append((list(prompt), settings))
        self.handles.append(FakeHandle(self, settings))
        return self.handles[-1]

    @property
    def live(self) -> list[FakeHandle]:
        return [handle for handle in self.handles if not handle.cancelled and not handle.finished]

    def stats(self) -> Numbers:
        return Numbers(running=len(self.live))


@dataclass(frozen=True)
class Running:
    """A server that listens: its address, and the server itself to be told to stop."""

    url: str
    server: DrainingServer
    thread: threading.Thread


@contextmanager
def running(engine: object, *, drain_seconds: float = 5.0, **options: object) -> Iterator[Running]:
    """uvicorn on a free port of this machine, ended with the block."""
    app = create_app(engine, AppOptions(MODEL, **options))  # type: ignore[arg-type]
    bound = open_socket("127.0.0.1", 0)
    ready = threading.Event()
    server = DrainingServer(app, drain_seconds, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        assert ready.wait(30)
        yield Running(url_of(bound), server, thread)
    finally:
        server.begin_drain()
        server.begin_drain()
        thread.join(30)
        assert not thread.is_alive()
