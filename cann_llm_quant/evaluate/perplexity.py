"""Negative log-likelihood of a window's tokens under its logits, in row chunks.

    nll_t = -log_softmax(logits_{t-1})[token_t],   perplexity = exp(sum nll / tokens)

log_softmax runs in float32 over a few rows at a time (`CHUNK_ELEMENTS`), so that a vocabulary of 150 000
and a window of 2048 need 64 MB beside the logits; sums run in float64.
"""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from cann_llm_quant.errors import NonFiniteResultError, UsageError

Logits = Callable[[Int[Tensor, "windows seq"]], Iterator[Float[Tensor, "seq vocab"]]]
"""Windows in, each window's logits out one after another."""

CHUNK_ELEMENTS = 1 << 24


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Slices that cover `rows`, each of at most `CHUNK_ELEMENTS` elements (one row at least)."""
    step = max(1, CHUNK_ELEMENTS // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def token_nll(logits: Float[Tensor, "seq vocab"], ids: Int[Tensor, " seq"], first: int) -> Float64[Tensor, " scored"]:
    """Nats of the tokens at positions `first` (>= 1) and later, each under the logits one position before.

    Raises UsageError when an id lies outside the logits' vocabulary.
    """
    if int(ids.max()) >= logits.shape[1] or int(ids.min()) < 0:
        raise UsageError(
            f"the text has token id {int(ids.max())} but the model has {logits.shape[1]} entries; "
            "use the tokenizer that belongs to the model"
        )
    predictions = logits[first - 1 : -1]
    targets = ids[first:].to(logits.device, torch.int64)
    nll = torch.empty(len(targets), dtype=torch.float64)
    for rows in row_chunks(len(targets), logits.shape[1]):
        log_p = predictions[rows].to(torch.float32).log_softmax(-1)
        nll[rows] = -log_p.gather(1, targets[rows, None])[:, 0].double().cpu()
    return nll


def require_finite(
    logits: Float[Tensor, "seq vocab"], whose: str, window: int, where: Callable[[int, int], str]
) -> None:
    """Raise NonFiniteResultError at the first position whose logits hold NaN or infinity.

    `where(window, position)` says which token that is, for the message.
    """
    for rows in row_chunks(*logits.shape):
        bad = ~torch.isfinite(logits[rows])
        if not bool(bad.any()):
            continue
        row, entry = (int(i) for i in bad.nonzero()[0])
        position = rows.start + row
        value = float(logits[position, entry])
        raise NonFiniteResultError(
            f"the {whose} model's logits hold {value} at window {window}, position {position} "
            f"({where(window, position)}, vocabulary entry {entry}); "
            "check the weights with `cann-llm-quant inspect`"
        )
