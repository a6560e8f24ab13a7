"""What a request asks for, and which of its values cannot be meant.

`GenerationSettings` checks what needs no model when it is made; `check_vocabulary` checks the token ids in it. Both
raise RequestError with the field at fault. The bound of every token id is the number of the model's logits, not of
the tokenizer's tokens: the rows of an embedding are what an id may index.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cann_llm_quant.errors import RequestError

MAX_LOGPROBS = 20
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
REPETITION_RANGE = (0.01, 100.0)
LARGEST = sys.float_info.max


@dataclass(frozen=True)
class GenerationSettings:
    """The settings of one request; `runner/sampler.py` says what each does to the logits.

    `stop` are texts, `stop_ids` tokens that end the answer besides the model's own end tokens (which `ignore_eos`
    alone leaves out). `logprobs` is None or the number of alternatives to report with each token.
    Raises RequestError, naming the field, for a value that cannot be meant.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: int | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _integer("max_new_tokens", self.max_new_tokens, 1)
        _integer("top_k", self.top_k, 0)
        _integer("seed", self.seed, 0, (1 << 63) - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _number("temperature", self.temperature)
        if self.temperature < 0:
            raise RequestError(
                "temperature", f"temperature {self.temperature} is negative; use 0 for greedy decoding or a value above"
            )
        _number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise RequestError("top_p", f"top_p {self.top_p} must be above 0 and at most 1")
        _number("min_p", self.min_p, 0, 1)
        _number("repetition_penalty", self.repetition_penalty, *REPETITION_RANGE)
        _number("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _number("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        for bias in self.logit_bias.values():
            _number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise RequestError("stop", f"stop {self.stop!r} must be a sequence of texts that are not empty")

    def check_vocabulary(self, vocab_size: int) -> None:
        """RequestError if a token id of the settings is none of the model's."""
        check_token_ids("stop_ids", self.stop_ids, vocab_size)
        check_token_ids("logit_bias", tuple(self.logit_bias), vocab_size)

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


def check_token_ids(field: str, ids: Sequence[object], vocab_size: int) -> None:
    """RequestError of `field` if one of `ids` is no integer from 0 to `vocab_size` - 1."""
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(
                field, f"{field}: {token!r} at position {position} is no token id from 0 to {vocab_size - 1}"
            )


def _integer(field: str, value: object, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        limit = f"at least {least}" if most is None else f"from {least} to {most}"
        raise RequestError(field, f"{field} {value!r} must be an integer, {limit}")


def _number(field: str, value: object, least: float | None = None, most: float | None = None) -> None:
    # math.isfinite overflows on whole numbers that no float holds; NaN fails every comparison
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        raise RequestError(field, f"{field} {value!r} must be a finite number")
    if least is not None and most is not None and not least <= value <= most:
        raise RequestError(field, f"{field} {value!r} must lie between {least:g} and {most:g}")
