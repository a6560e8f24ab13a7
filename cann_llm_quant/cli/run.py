"""`run`: continue a prompt, token by token, with a quantized folder or any float checkpoint."""

import io
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cann_llm_quant.cli import kv_run_flags as kv
from cann_llm_quant.cli.kv_run_flags import kv_choice
from cann_llm_quant.cli.options import AllowPickle, Debug, Device, Dtype, Json, Kernel, Model, Revision
from cann_llm_quant.cli.terminal import Reply, abandon_stdout, duration, printable
from cann_llm_quant.errors import UsageError

if TYPE_CHECKING:
    from cann_llm_quant.runner.answer import Chunk
    from cann_llm_quant.runner.engine import LLMEngine

SAMPLING = "Sampling"


def run(
    model: Model,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="Text to continue. [default: standard input]")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the text as a user's message, by the chat template.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", metavar="N", help="Longest answer.")] = 128,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before this text. Repeatable.")
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", help="0 takes the likeliest token.", rich_help_panel=SAMPLING)
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", metavar="P", help="Keep this share of probability.", rich_help_panel=SAMPLING)
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option("--top-k", metavar="K", help="Keep this many tokens; 0: all.", rich_help_panel=SAMPLING)
    ] = 0,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Same seed, same text.", rich_help_panel=SAMPLING)
    ] = 0,
    min_p: Annotated[
        float,
        typer.Option(
            "--min-p", metavar="P", help="Keep tokens of at least P times the likeliest's.", rich_help_panel=SAMPLING
        ),
    ] = 0.0,
    repetition_penalty: Annotated[
        float,
        typer.Option(
            "--repetition-penalty", metavar="X", help="Above 1: avoid tokens of the text.", rich_help_panel=SAMPLING
        ),
    ] = 1.0,
    presence_penalty: Annotated[
        float,
        typer.Option(
            "--presence-penalty", metavar="X", help="Subtracted from answered tokens' logits.", rich_help_panel=SAMPLING
        ),
    ] = 0.0,
    frequency_penalty: Annotated[
        float,
        typer.Option("--frequency-penalty", metavar="X", help="The same for each time.", rich_help_panel=SAMPLING),
    ] = 0.0,
    kv_cache: kv.RunKvCache = None,
    kv_sink_tokens: kv.RunKvSinkTokens = None,
    kv_recent_tokens: kv.RunKvRecentTokens = None,
    kv_sensitive: kv.RunKvSensitive = None,
    page_size: kv.RunPageSize = None,
    attention_pattern: kv.AttentionPattern = "dense",
    kernel: Kernel = "auto",
    device: Device = "cpu",
    dtype: Dtype = "fp32",
    revision: Revision = None,
    allow_pickle: AllowPickle = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Continue a text or answer a chat. The text appears on stdout as it is made; counts and speed follow on stderr."""
    text = read_prompt(prompt)
    settings: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
        "stop": tuple(typed_text(text, "--stop") for text in stop or ()),
    }
    from cann_llm_quant.runner.engine import LLMEngine

    options: dict[str, Any] = {} if page_size is None else {"page_size": page_size}
    engine = LLMEngine(
        model,
        device=device,
        dtype=dtype,
        kernel=kernel,
        kv_cache=kv_choice(kv_cache, kv_sink_tokens, kv_recent_tokens, kv_sensitive),
        revision=revision,
        allow_pickle=allow_pickle,
        max_batch_size=1,
        attention_pattern=attention_pattern,
        **options,
    )
    ids = prompt_ids(engine, text, chat=chat)
    answer = Answer.of(engine.stream(ids, max_new_tokens, **settings), show=not json)
    Reply(json).result({"model": model, "prompt_tokens": len(ids), **asdict(answer)}, lambda console: console.print())
    if not json:
        print(answer.summary(len(ids)), file=sys.stderr)


def prompt_ids(engine: "LLMEngine", text: str, *, chat: bool) -> list[int]:
    """The prompt's tokens, after the model's chat template if asked for; BOS by the tokenizer's own rule, never twice.

    Raises CheckpointError when there is no template.
    """
    from cann_llm_quant.tokenizer import chat_ids

    return chat_ids(engine.tokenizer, [{"role": "user", "content": text}]) if chat else engine.prompt_ids(text)


@dataclass(frozen=True)
class Answer:
    """A finished answer and the seconds that its first token and the others took."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    first_token_seconds: float
    decode_seconds: float

    @classmethod
    def of(cls, chunks: "Iterable[Chunk]", *, show: bool) -> "Answer":
        """Take the tokens as they are made; `show` prints their text at once."""
        started = first = time.perf_counter()
        texts: list[str] = []
        ids: list[int] = []
        reason = ""
        for chunk in chunks:
            first = first if ids else time.perf_counter()
            assert chunk.token_id is not None  # nobody else can cancel it
            ids.append(chunk.token_id)
            texts.append(chunk.text)
            reason = chunk.finish_reason or reason
            if show and not wrote(printable(chunk.text)):
                break
        ended = time.perf_counter()
        return cls("".join(texts), tuple(ids), reason, first - started, ended - first)

    def summary(self, prompt_tokens: int) -> str:
        """Counts, why it ended, and speed."""
        count = len(self.token_ids)
        speed = f", {(count - 1) / self.decode_seconds:.1f} tokens/s after it" if count > 1 else ""
        why = {"stop": "the model ended it", "length": "the limit ended it"}.get(self.finish_reason, "nobody read on")
        first = duration(self.first_token_seconds)
        return f"[{prompt_tokens} prompt tokens, first token after {first}; {count} new tokens{speed}; {why}]"


def wrote(text: str) -> bool:
    """Put text on stdout at once; False when its reader has left, so that there is no more to do."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        abandon_stdout()
        return False
    return True


def read_prompt(prompt: str | None) -> str:
    """The prompt, from standard input when the option was not given.

    Raises UsageError when there is neither, or it is not UTF-8, whatever the locale.
    """
    if prompt is not None:
        return typed_text(prompt, "-p")
    if sys.stdin.isatty():
        raise UsageError("no prompt was given; add -p TEXT or pipe a text in")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt on standard input is not UTF-8 ({error.reason}); convert it") from error


def typed_text(text: str, option: str) -> str:
    """An option's text; one that the locale (a C locale) could not decode is read as UTF-8. Raises UsageError."""
    try:
        return os.fsencode(text).decode("utf-8") if any("\ud800" <= c <= "\udfff" for c in text) else text
    except UnicodeError as error:
        raise UsageError(f"the text of {option} is not UTF-8; convert it, or use a UTF-8 locale") from error
