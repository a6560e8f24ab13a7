"""Cut one token stream into the windows that an evaluation scores, and remember every rule that was used.

A window has `window` positions. Disjoint windows (`stride` = `window`, the default) follow each other in
the stream; with a smaller stride a window starts `stride` tokens after the one before, repeats the rest as
context and scores its new tokens alone, so that every token is scored once. The incomplete window at the
end is dropped, and `dropped_tokens` says how much.

BOS (`each-window`) takes the first position of every window; a stream or window that begins with it already
is not given a second one, and a window that would then hold no new token is left out. Without BOS the first
token of a window has no context and is not scored, hence windows x (window - 1) tokens.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cann_llm_quant.errors import CorpusError, UsageError
from cann_llm_quant.tokenizer import adds_bos
from cann_llm_quant.tokenizer import bos_id as bos_of

BosRule = Literal["auto", "each-window", "none"]


@dataclass(frozen=True)
class EvaluationWindows:
    """Token windows with the rules that made them.

    `starts[i]` is the stream index of window i's first position (-1 for a BOS put before the stream);
    `overlap[i]` counts its leading positions that the window before has covered already (0: all its
    positions are new).
    """

    ids: Int[Tensor, "windows seq"]
    starts: tuple[int, ...]
    overlap: tuple[int, ...]
    stride: int
    bos_id: int | None
    dropped_tokens: int
    stream_tokens: int
    text_sha256: str | None = None
    text_bytes: int | None = None

    @property
    def bos(self) -> Literal["each-window", "none"]:
        """The BOS rule after `auto` was resolved."""
        return "none" if self.bos_id is None else "each-window"

    def first_scored(self, index: int) -> int:
        """First position of window `index` whose token is scored; its logits stand one position earlier."""
        return max(1, self.overlap[index])

    def stream_index(self, index: int, position: int) -> int:
        """Where a position lies in the token stream (an inserted BOS: one before its window's first token)."""
        return self.starts[index] + position

    def place(self, index: int, position: int) -> str:
        """That position in words."""
        if position == 0 and self.bos_id is not None:
            return "the BOS before its text"
        return f"token {self.stream_index(index, position)} of the text"

    @property
    def tokens_sha256(self) -> str:
        """Hex sha256 of the windows' ids as little-endian int64, row by row."""
        return hashlib.sha256(self.ids.to(torch.int64).numpy().astype("<i8").tobytes()).hexdigest()


def own_bos(tokenizer: PreTrainedTokenizerBase, rule: BosRule = "auto") -> int | None:
    """The id that `cut_windows` is to put before every window under this rule, or None.

    `auto` asks whether the tokenizer itself puts its BOS before a text. Raises InputError when `each-window` is
    asked of a tokenizer that has no BOS.
    """
    if rule == "none" or (rule == "auto" and not adds_bos(tokenizer)):
        return None
    return bos_of(tokenizer)


def cut_windows(
    ids: Sequence[int] | Int[Tensor, " tokens"],
    *,
    window: int = 2048,
    stride: int | None = None,
    max_windows: int | None = None,
    bos_id: int | None = None,
    bos: BosRule = "auto",
    text: str | None = None,
) -> EvaluationWindows:
    """Windows over the stream `ids`; see the module's rules.

    `bos_id` is what `own_bos` returned (under `auto`, None means that the tokenizer adds none). `text` is
    what `ids` encode; its hash and byte count go into the result. Raises UsageError for sizes or rules that
    cannot be, CorpusError when the stream does not fill one window.
    """
    stride = window if stride is None else stride
    _check_sizes(window, stride, max_windows)
    if bos == "each-window" and bos_id is None:
        raise UsageError("BOS rule 'each-window' needs the id of the BOS token; the tokenizer names none")
    bos_id = None if bos == "none" else bos_id
    stream = torch.as_tensor(ids, dtype=torch.int64).cpu()
    rows, starts, overlap, end = _cut(stream, window, stride, max_windows, bos_id)
    if not rows:
        raise CorpusError(
            f"the text has {len(stream)} tokens, fewer than one window of {window}; "
            "use a longer text or a smaller --window"
        )
    return EvaluationWindows(
        ids=torch.stack(rows),
        starts=tuple(starts),
        overlap=tuple(overlap),
        stride=stride,
        bos_id=bos_id,
        dropped_tokens=len(stream) - end,
        stream_tokens=len(stream),
        text_sha256=None if text is None else hashlib.sha256(text.encode("utf-8")).hexdigest(),
        text_bytes=None if text is None else len(text.encode("utf-8")),
    )


def _check_sizes(window: int, stride: int, max_windows: int | None) -> None:
    if window < 2:
        raise UsageError(f"--window {window} is too small: a window needs at least 2 positions")
    if not 1 <= stride <= window:
        raise UsageError(f"--stride {stride} must lie between 1 and the window, {window}")
    if max_windows is not None and max_windows < 1:
        raise UsageError(f"--max-windows {max_windows} must be at least 1")


def _cut(
    stream: Int[Tensor, " tokens"], window: int, stride: int, max_windows: int | None, bos_id: int | None
) -> tuple[list[Tensor], list[int], list[int], int]:
    """Rows, their starts and overlaps, and the end of the covered text."""
    rows: list[Tensor] = []
    starts: list[int] = []
    overlap: list[int] = []
    start = covered = 0
    while max_windows is None or len(rows) < max_windows:
        insert = bos_id is not None and (start >= len(stream) or int(stream[start]) != bos_id)
        end = start + window - int(insert)
        if end > len(stream):
            break
        # Where the window before had room for one token more, a stride of 1 brings nothing new.
        if end > covered:
            head = stream.new_tensor([bos_id] if insert else [])
            rows.append(torch.cat([head, stream[start:end]]))
            starts.append(start - int(insert))
            overlap.append(window - (end - covered) if covered > start else 0)
            covered = end
        start += min(stride, end - start)
    return rows, starts, overlap, covered
