"""One request's answer as it grows: tokens in, chunks of text out, and why it ends.

An answer ends with an end-of-sequence token, one of the request's `stop_ids`, a stop text, or its last allowed token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cann_llm_quant.runner.sampler import Sampled, TokenLogprobs
from cann_llm_quant.runner.settings import GenerationSettings
from cann_llm_quant.runner.stop import StopTexts
from cann_llm_quant.runner.text_stream import TextStream, byte_tokens

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Chunk:
    """One new token and the text that it completes (possibly none).

    The last chunk says why it is the last. A cancelled answer ends with a chunk whose token id is None.
    """

    token_id: int | None
    text: str
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class Timings:
    """Seconds for the prompt (up to the first new token) and for the tokens after it."""

    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class Generation:
    """A whole answer.

    `token_ids` holds every sampled token, the end token included; its text is not in `text`. `cached_tokens` of the
    prompt were not computed, because an earlier request had.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    timings: Timings
    logprobs: tuple[TokenLogprobs, ...] | None = None


class Vocabulary:
    """What answers need of a tokenizer, worked out once: decoding, byte tokens, and which tokens end a text."""

    def __init__(self, tokenizer: Any, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._byte_of = byte_tokens(tokenizer)

    def decode(self, ids: list[int]) -> str:
        """The text of a short run of tokens, special tokens left out."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def stream(self, prompt: tuple[int, ...]) -> TextStream:
        """The text of tokens that follow `prompt`."""
        return TextStream(self.decode, prompt, self._byte_of)

    def ends(self, settings: GenerationSettings) -> dict[int, str]:
        """Ids that end this request, with the text to show for each.

        Special tokens whose name is a stop text count among them: decoding leaves them out, so no text would match.
        """
        ends = {} if settings.ignore_eos else dict.fromkeys(self._end_ids, "")
        ends |= dict.fromkeys(settings.stop_ids, "")
        for name in self._tokenizer.all_special_tokens:
            if name in settings.stop:
                ends[self._tokenizer.convert_tokens_to_ids(name)] = name if settings.include_stop else ""
        return ends


class Answer:
    """The text of one request's answer."""

    def __init__(self, vocabulary: Vocabulary, prompt: tuple[int, ...], settings: GenerationSettings) -> None:
        self._text = vocabulary.stream(prompt)
        self._stops = StopTexts(settings.stop, settings.include_stop)
        self._ends: Mapping[int, str] = vocabulary.ends(settings)
        self._left = settings.max_new_tokens

    def push(self, sampled: Sampled) -> Chunk:
        """The chunk of the next token; not to be called after one with a reason."""
        token = sampled.token_id
        self._left -= 1
        ended = token in self._ends
        last = ended or not self._left
        piece = "" if ended else self._text.push(token)
        shown = self._stops.push(piece + self._text.finish() if last else piece)
        reason: FinishReason | None = "stop" if ended or self._stops.stopped else "length" if last else None
        if last and not self._stops.stopped:
            shown += self._stops.finish() + self._ends.get(token, "")
        return Chunk(token, shown, reason, sampled.logprobs)

    def cancel(self) -> Chunk:
        """The last chunk of an answer that nobody waits for; it gives out the text that was withheld."""
        return Chunk(None, self._stops.finish(), "cancelled")
