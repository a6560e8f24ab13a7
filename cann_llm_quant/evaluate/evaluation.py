"""Run a model, and a reference beside it, over the same windows and condense what they predict."""

import math
from collections.abc import Callable
from itertools import repeat

import torch
from torch import Tensor

from cann_llm_quant.errors import NonFiniteResultError
from cann_llm_quant.evaluate.divergence import divergence
from cann_llm_quant.evaluate.perplexity import Logits, require_finite, token_nll
from cann_llm_quant.evaluate.report import Divergence, EvaluationResult, EvaluationSettings
from cann_llm_quant.evaluate.windows import EvaluationWindows

Progress = Callable[[int, int], None]
"""Called with (windows done, windows in all) after each window."""


def evaluate(
    logits: Logits,
    windows: EvaluationWindows,
    *,
    reference: Logits | None = None,
    progress: Progress | None = None,
) -> EvaluationResult:
    """Perplexity of `logits` on `windows`; with a reference also KL(reference || candidate) and top-1.

    Tokens are scored and positions compared once each, overlapping context never twice. The final position
    of a disjoint window predicts a token outside it: it is compared but cannot be scored. Raises
    NonFiniteResultError at the first NaN or infinity of either model, naming it and its position.
    """
    nll: list[Tensor] = []
    reference_nll: list[Tensor] = []
    kl: list[Tensor] = []
    same: list[Tensor] = []
    rows = logits(windows.ids)
    reference_rows = repeat(None) if reference is None else reference(windows.ids)
    for index, (q, p) in enumerate(zip(rows, reference_rows, strict=reference is not None)):
        ids, first = windows.ids[index], windows.first_scored(index)
        if p is not None:
            require_finite(p, "reference", index, windows.place)
        require_finite(q, "candidate" if reference else "evaluated", index, windows.place)
        nll.append(_finite(token_nll(q, ids, first), "negative log-likelihood", index))
        if p is not None:
            reference_nll.append(_finite(token_nll(p, ids, first), "reference negative log-likelihood", index))
            kl_row, same_row = divergence(p, q, windows.overlap[index])
            kl.append(_finite(kl_row, "KL divergence", index))
            same.append(same_row)
        if progress is not None:
            progress(index + 1, len(windows.ids))
    if len(nll) != len(windows.ids):
        raise RuntimeError(f"the model gave logits for {len(nll)} of {len(windows.ids)} windows")
    return _condense(windows, nll, reference_nll, kl, same)


def _finite(values: Tensor, what: str, window: int) -> Tensor:
    """`values` unchanged; finite logits can still be too far apart for float32 probabilities."""
    if not bool(torch.isfinite(values).all()):
        position = int((~torch.isfinite(values)).nonzero()[0])
        raise NonFiniteResultError(
            f"the {what} is {float(values[position])} at scored position {position} of window {window}: "
            "the logits are finite but too large; check the weights with `cann-llm-quant inspect`"
        )
    return values


def _condense(
    windows: EvaluationWindows,
    nll: list[Tensor],
    reference_nll: list[Tensor],
    kl: list[Tensor],
    same: list[Tensor],
) -> EvaluationResult:
    tokens = sum(len(row) for row in nll)
    total = math.fsum(float(row.sum()) for row in nll)
    settings = EvaluationSettings(
        text_sha256=windows.text_sha256,
        tokens_sha256=windows.tokens_sha256,
        windows=len(windows.ids),
        window=int(windows.ids.shape[1]),
        stride=windows.stride,
        bos=windows.bos,
        bos_id=windows.bos_id,
    )
    return EvaluationResult(
        settings=settings,
        tokens=tokens,
        dropped_tokens=windows.dropped_tokens,
        nll_sum=total,
        perplexity=_perplexity(total, tokens),
        bits_per_byte=_bits_per_byte(total / tokens, windows),
        divergence=_divergence(tokens, reference_nll, kl, same) if kl else None,
    )


def _perplexity(nll_sum: float, tokens: int) -> float:
    mean = nll_sum / tokens
    try:
        return math.exp(mean)
    except OverflowError as error:
        raise NonFiniteResultError(
            f"the mean negative log-likelihood is {mean:.6g} nats, so that perplexity overflows; "
            "check the weights with `cann-llm-quant inspect`"
        ) from error


def _bits_per_byte(mean_nll: float, windows: EvaluationWindows) -> float | None:
    """Mean bits per token times the whole text's tokens per byte; None without the text."""
    if not windows.text_bytes:
        return None
    return mean_nll / math.log(2.0) * windows.stream_tokens / windows.text_bytes


def _divergence(tokens: int, reference_nll: list[Tensor], kl: list[Tensor], same: list[Tensor]) -> Divergence:
    every = torch.cat(kl)
    means = torch.stack([row.mean() for row in kl])
    total = math.fsum(float(row.sum()) for row in reference_nll)
    agree = sum(int(row.sum()) for row in same)
    return Divergence(
        reference_nll_sum=total,
        reference_perplexity=_perplexity(total, tokens),
        positions=len(every),
        kl=float(every.mean()),
        kl_stderr=float(means.std() / math.sqrt(len(means))) if len(means) > 1 else None,
        kl_p99=float(every.kthvalue(math.ceil(0.99 * len(every))).values),
        kl_max=float(every.max()),
        top1_agreement=agree / len(every),
    )
