"""`run`: continue a prompt, token by token, with a quantized folder or any float checkpoint."""

import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cann_llm_quant.cli.options import Debug, Json, Model
from cann_llm_quant.cli.terminal import Reply, duration, printable
from cann_llm_quant.errors import UsageError

if TYPE_CHECKING:
    from cann_llm_quant.runner.engine import Chunk, LLMEngine

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
    kernel: Annotated[
        Literal["auto", "reference"],
        typer.Option("--kernel", help="auto: torch's int4/int8 operators where they fit; reference: dequantize."),
    ] = "auto",
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda or npu, also cuda:1.")] = "cpu",
    dtype: Annotated[str, typer.Option("--dtype", metavar="DTYPE", help="fp32, bf16 or fp16.")] = "fp32",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Continue a text or answer a chat. The text appears on stdout as it is made; counts and speed follow on stderr."""
    text = read_prompt(prompt)
    settings: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": tuple(stop or ()),
    }
    from cann_llm_quant.runner.engine import LLMEngine

    engine = LLMEngine(model, device=device, dtype=dtype, kernel=kernel)
    ids = prompt_ids(engine, text, chat=chat)
    answer = Answer.of(engine.stream(ids, max_new_tokens, **settings), show=not json)
    Reply(json).result({"model": model, "prompt_tokens": len(ids), **asdict(answer)}, lambda console: console.print())
    if not json:
        print(answer.summary(len(ids)), file=sys.stderr)


def prompt_ids(engine: "LLMEngine", text: str, *, chat: bool) -> list[int]:
    """The prompt's tokens, after the model's chat template if asked for. Raises CheckpointError when there is none."""
    from cann_llm_quant.tokenizer import chat_text, encode

    if not chat:
        return engine.prompt_ids(text)
    rendered = chat_text(engine.tokenizer, [{"role": "user", "content": text}], generation_prompt=True)
    return encode(engine.tokenizer, rendered, bos=False)


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
            ids.append(chunk.token_id)
            texts.append(chunk.text)
            reason = chunk.finish_reason or reason
            if show:
                sys.stdout.write(printable(chunk.text))
                sys.stdout.flush()
        ended = time.perf_counter()
        return cls("".join(texts), tuple(ids), reason, first - started, ended - first)

    def summary(self, prompt_tokens: int) -> str:
        """Counts, why it ended, and speed."""
        count = len(self.token_ids)
        speed = f", {(count - 1) / self.decode_seconds:.1f} tokens/s after it" if count > 1 else ""
        why = "the model ended it" if self.finish_reason == "stop" else "the limit ended it"
        first = duration(self.first_token_seconds)
        return f"[{prompt_tokens} prompt tokens, first token after {first}; {count} new tokens{speed}; {why}]"


def read_prompt(prompt: str | None) -> str:
    """The prompt, from standard input when the option was not given.

    Raises UsageError when there is neither.
    """
    if prompt is not None:
        return prompt
    if sys.stdin.isatty():
        raise UsageError("no prompt was given; add -p TEXT or pipe a text in")
    return sys.stdin.read()
