"""Text to token ids and back to the model's own rules: which file decides, whether BOS comes first, how a chat reads.

`tokenizer.json` is authoritative: it is read by transformers' generic fast tokenizer, never through a class that
belongs to a model type, because such classes rebuild parts of it (AutoTokenizer of transformers 5.24 replaces the
pre-tokenizer whenever model_type is qwen2). Only a folder without that file goes through AutoTokenizer, and then
without remote code.

Special tokens' names inside plain text (`<|im_end|>`) become those tokens, as in transformers, so that perplexities
agree with it. Nothing here pads: a tokenizer without a padding token is as good as any.

A chat template is a program from the model's folder. It is rendered in jinja's immutable sandbox (transformers'
own), on a thread with a deadline and with a bound on the length of what it writes; the memory that a single
expression takes is not bounded.
"""

import ctypes
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import date
from pathlib import Path

from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cann_llm_quant.errors import CheckpointError, CorpusError, InputError
from cann_llm_quant.shown import shown_name

TEMPLATE_SECONDS = 5.0
TEMPLATE_CHARACTERS = 16 * 2**20

DATE_CODES = ("a", "A", "b", "B", "d", "-d", "H", "I", "j", "m", "-m", "M", "p", "S", "y", "Y")

SLOW_FILES = ("*.model", "vocab.json", "vocab.txt", "*.tiktoken")


class TemplateTimeoutError(Exception):
    """Raised inside the thread of a chat template that has run past its deadline."""


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model's folder; CheckpointError where its files are missing or unreadable."""
    file = folder / "tokenizer.json"
    if file.is_file():
        return _load_fast(folder, file)
    if not any(match for pattern in SLOW_FILES for match in folder.glob(pattern)):
        raise CheckpointError(f"{folder} holds no tokenizer: copy tokenizer.json from the original model into it")
    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        own = _own_code(folder / "tokenizer_config.json")
        if own is not None:
            raise CheckpointError(
                f"{folder} has no tokenizer.json and its other tokenizer files cannot be read without "
                f"{shown_name(own)}, code of the model's own that is never run; put a tokenizer.json made from that "
                "tokenizer beside them"
            ) from error
        raise CheckpointError(
            f"{folder} has no tokenizer.json and its other tokenizer files cannot be read ({_first_line(error)}): "
            "pip install 'cann-llm-quant[sentencepiece]', or convert them to tokenizer.json"
        ) from error


def _own_code(config: Path) -> str | None:
    """The class that a tokenizer_config.json wants run from the model's folder, such as `own.OwnTokenizer`."""
    if not config.is_file():
        return None
    _check_json(config)
    auto_map = json.loads(config.read_bytes().decode("utf-8-sig")).get("auto_map")
    named = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else None
    candidates = named if isinstance(named, list) else [named]
    return next((name for name in candidates if isinstance(name, str)), None)


def _load_fast(folder: Path, file: Path) -> PreTrainedTokenizerBase:
    for path in (file, folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
        if path.is_file():
            _check_json(path)
    try:
        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception for a file it cannot use
        raise CheckpointError(f"{file} is not a usable tokenizer: {_first_line(error)}") from error


def _check_json(path: Path) -> None:
    try:
        content = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): copy it again from the original model") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__} where an object belongs")


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, bos: bool) -> list[int]:
    """Token ids of a text, with BOS before them if `bos` and unless the text brings it; no other token is added."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    if not bos:
        return ids
    first = bos_id(tokenizer)
    return ids if ids[:1] == [first] else [first, *ids]


def bos_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of BOS; InputError where the tokenizer has none."""
    token: int | None = tokenizer.bos_token_id
    if token is None:
        raise InputError("this tokenizer has no BOS token: use --bos none")
    return token


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer's own rule puts BOS before a text, found by encoding one."""
    ids: list[int] = tokenizer.encode("a", add_special_tokens=True, verbose=False)
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """CheckpointError if the tokenizer can produce ids past the embedding's `vocab_size` rows.

    Fewer tokens than rows are usual (rows padded for speed) and left as they are.
    """
    highest = max(tokenizer.get_vocab().values(), default=-1) + 1
    if highest > vocab_size:
        raise CheckpointError(
            f"the tokenizer has {highest} tokens but the embedding only {vocab_size} rows: "
            "the model and tokenizer files do not belong together"
        )


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the model's folder says how a chat is written."""
    return bool(tokenizer.chat_template)


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, object]],
    *,
    generation_prompt: bool = False,
    today: date | None = None,
    seconds: float = TEMPLATE_SECONDS,
) -> str:
    """The text of a chat, `{role, content}` messages through the model's own template.

    `generation_prompt` opens the assistant's next turn; `today` is the date that templates see, the real one if None.
    CorpusError: the template refuses these messages. CheckpointError: the template itself is unusable (none there,
    not valid, forbidden operations, more than `seconds` or TEMPLATE_CHARACTERS).
    """
    if not has_chat_template(tokenizer):
        raise CheckpointError("the model's tokenizer has no chat template: use plain text")

    def render() -> str:
        template: str = tokenizer.get_chat_template()
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=template if today is None else _dated(template, today),
            tokenize=False,
            add_generation_prompt=generation_prompt,
        )
        return text

    try:
        text = _within(seconds, render)
    except (SecurityError, TemplateSyntaxError, OverflowError, MemoryError, RecursionError) as error:
        raise CheckpointError(f"the model's chat template is refused: {_first_line(error)}") from error
    except TemplateTimeoutError:
        raise CheckpointError(f"the model's chat template did not end within {seconds:g} s") from None
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise CorpusError(f"the model's chat template refuses the messages: {_first_line(error)}") from error
    if len(text) > TEMPLATE_CHARACTERS:
        raise CheckpointError(f"the model's chat template wrote {len(text)} characters for one chat")
    return text


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, object]]) -> list[int]:
    """Token ids of a chat up to the assistant's next turn; BOS by the tokenizer's own rule, never twice.

    Raises what `chat_text` does.
    """
    text = chat_text(tokenizer, messages, generation_prompt=True)
    brings_bos = tokenizer.bos_token is not None and text.lstrip().startswith(tokenizer.bos_token)
    return encode(tokenizer, text, bos=adds_bos(tokenizer) and not brings_bos)


def _dated(template: str, today: date) -> str:
    """The template behind a macro that hides transformers' `strftime_now`, which reads the clock.

    The line break after the macro is the one that jinja's trim_blocks takes away.
    """
    replaced = "".join(f"|replace('%{code}', '{today.strftime('%' + code)}')" for code in DATE_CODES)
    return "{% macro strftime_now(format) %}{{ format" + replaced + " }}{% endmacro %}\n" + template


def _within(seconds: float, render: Callable[[], str]) -> str:
    """`render()` on a thread of its own, which is stopped at its next bytecode once `seconds` have passed."""
    future: Future[str] = Future()

    def work() -> None:
        try:
            future.set_result(render())
        except Exception as error:
            future.set_exception(error)

    thread = threading.Thread(target=work, name="chat template", daemon=True)
    thread.start()
    try:
        return future.result(timeout=seconds)
    except TimeoutError:
        if thread.ident is not None and thread.is_alive():
            raised = ctypes.py_object(TemplateTimeoutError)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), raised)
            thread.join(1.0)
        raise TemplateTimeoutError from None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return shown_name(lines[0], 400) if lines else type(error).__name__
