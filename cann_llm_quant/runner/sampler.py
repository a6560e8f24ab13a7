"""How one next token is drawn from a row of logits l, and what is reported of it.

In this order, each step only where its setting asks for it:

    l_t += logit_bias_t
    l_t = l_t / repetition_penalty if l_t > 0 else l_t * repetition_penalty    for t in the prompt or the output (CTRL,
                                                                               1909.05858)
    l_t -= presence_penalty * [c_t > 0] + frequency_penalty * c_t              c_t: times that t occurs in the output
                                                                               (the definition of OpenAI's API)
    temperature 0, or one too small for float32: the largest l, and no more
    p = softmax(l / temperature)
    the top_k largest p (0: all); of those, renormalized, the smallest set of largest ones whose mass reaches top_p
    (1904.09751); of those, p_t >= min_p * max p (2407.01082)

Draws are made in float32 on the CPU from a generator of the request's own, so that a seed gives the same text on
every device and next to any other request.

Reported log-probabilities are log softmax of the model's own logits, before bias, penalties and temperature: they
say what the model expects, whatever the request asks for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.errors import NonFiniteResultError
from cann_llm_quant.runner.settings import GenerationSettings

FLOAT32 = torch.finfo(torch.float32)


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities: of the drawn token, and `top` (token id, log-probability), the likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Sampled:
    """A drawn token, with its log-probabilities where the request asks for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


def make_generator(settings: GenerationSettings) -> torch.Generator:
    """The request's own source of randomness."""
    return torch.Generator().manual_seed(settings.seed)


def sample(
    logits: Float[Tensor, " vocab"],
    settings: GenerationSettings,
    generator: torch.Generator,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> Sampled:
    """The next token; `prompt` and `output` are the tokens so far, which only penalties read.

    Raises NonFiniteResultError when no token can be preferred (NaN or +infinity).
    """
    row = logits.to("cpu", torch.float32)
    best = row.max()
    if not bool(torch.isfinite(best)):
        raise NonFiniteResultError(
            f"the model's logits hold {float(best)} during generation; check the weights with `cann-llm-quant inspect`"
        )
    token = _draw(_adjusted(row, settings, prompt, output), settings, generator)
    return Sampled(token, None if settings.logprobs is None else _logprobs(row, token, settings.logprobs))


def _adjusted(
    row: Float[Tensor, " vocab"], settings: GenerationSettings, prompt: Sequence[int], output: Sequence[int]
) -> Float[Tensor, " vocab"]:
    """The logits with bias and penalties; the row itself where there are none."""
    if not settings.logit_bias and not settings.has_penalties:
        return row
    row = row.clone()
    for token, bias in settings.logit_bias.items():
        row[token] += bias
    if settings.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *output}), dtype=torch.int64)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / settings.repetition_penalty, values * settings.repetition_penalty)
    if settings.presence_penalty or settings.frequency_penalty:
        counts = torch.tensor(output, dtype=torch.int64).bincount(minlength=len(row))
        row -= settings.presence_penalty * (counts > 0) + settings.frequency_penalty * counts
    return row


def _draw(row: Float[Tensor, " vocab"], settings: GenerationSettings, generator: torch.Generator) -> int:
    if settings.temperature < FLOAT32.tiny:
        return int(row.argmax())
    # Subtracting the largest logit first keeps tiny temperatures from overflowing; -inf / inf would be NaN.
    temperature = min(settings.temperature, FLOAT32.max)
    probabilities, order = ((row - row.max()) / temperature).softmax(-1).sort(descending=True, stable=True)
    if settings.top_k:
        probabilities[settings.top_k :] = 0
    if settings.top_p < 1:
        mass_before = probabilities.cumsum(-1) - probabilities
        probabilities[mass_before >= settings.top_p * probabilities.sum()] = 0
    if settings.min_p:
        probabilities[probabilities < settings.min_p * probabilities[0]] = 0
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


def _logprobs(row: Float[Tensor, " vocab"], token: int, count: int) -> TokenLogprobs:
    logprobs = row.log_softmax(-1)
    values, ids = logprobs.topk(min(count, len(row)))
    return TokenLogprobs(float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
