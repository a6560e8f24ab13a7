"""How one next token is drawn from a row of logits, and the settings of a request.

temperature 0, or one too small for float32, takes the largest logit. Otherwise p = softmax(logits /
temperature), restricted to the `top_k` most probable tokens (0: all) and then to the smallest set of most
probable ones whose mass reaches `top_p` (1904.09751). Draws are made in float32 on the CPU from a generator
of the request's own, so that a seed gives the same text on every device and next to any other request.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.errors import NonFiniteResultError, UsageError

FLOAT32 = torch.finfo(torch.float32)


@dataclass(frozen=True)
class GenerationSettings:
    """What a request asks for. Raises UsageError, naming the field, for a value that cannot be meant."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _integer("max_new_tokens", self.max_new_tokens, 1)
        _integer("top_k", self.top_k, 0)
        _integer("seed", self.seed, 0, (1 << 63) - 1)
        _number("temperature", self.temperature)
        if self.temperature < 0:
            raise UsageError(f"temperature {self.temperature} is negative; use 0 for greedy decoding or a value above")
        _number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p {self.top_p} must be above 0 and at most 1")
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise UsageError(f"stop {self.stop!r} must be a sequence of texts that are not empty")


def _integer(field: str, value: object, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        limit = f"at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"{field} {value!r} must be an integer, {limit}")


def _number(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"{field} {value!r} must be a finite number")


def make_generator(settings: GenerationSettings) -> torch.Generator:
    """The request's own source of randomness."""
    return torch.Generator().manual_seed(settings.seed)


def sample(logits: Float[Tensor, " vocab"], settings: GenerationSettings, generator: torch.Generator) -> int:
    """The next token's id. Raises NonFiniteResultError when no token can be preferred (NaN or +infinity)."""
    row = logits.to("cpu", torch.float32)
    best = row.max()
    if not bool(torch.isfinite(best)):
        raise NonFiniteResultError(
            f"the model's logits hold {float(best)} during generation; check the weights with `cann-llm-quant inspect`"
        )
    if settings.temperature < FLOAT32.tiny:
        return int(row.argmax())
    # Subtracting the largest logit first keeps tiny temperatures from overflowing; -inf / inf would be NaN.
    temperature = min(settings.temperature, FLOAT32.max)
    probabilities, order = ((row - best) / temperature).softmax(-1).sort(descending=True, stable=True)
    if settings.top_k:
        probabilities[settings.top_k :] = 0
    if settings.top_p < 1:
        mass_before = probabilities.cumsum(-1) - probabilities
        probabilities[mass_before >= settings.top_p * probabilities.sum()] = 0
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])
