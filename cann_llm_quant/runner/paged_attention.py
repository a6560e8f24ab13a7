"""Attention over pages: the decoder's `Attend` for one step of the engine, any mixture of prompts and single tokens.

In every layer the new keys and values are written to float pages, pages that the step completes are sealed, and each
span's queries attend to the columns of their own sequence (span_columns.py). Sequences never meet in one operation, so
that no result depends on who else is in the batch.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cann_llm_quant.models.attention import masked_attention
from cann_llm_quant.runner.kv_store import KvStore, Selection
from cann_llm_quant.runner.span_columns import SpanColumns
from cann_llm_quant.runner.spans import Pattern, Span


@dataclass(frozen=True)
class _Reading:
    """How a span reads its keys under one window: pages of the store, how many of their tokens, how much of the tail.

    `keys` is the run of tokens that is seen at all; `mask` is None when attention within it is causal, and windowed.
    """

    pages: Selection
    tail_from: int | None
    keys: slice
    mask: Bool[Tensor, "count keys"] | None


class _SpanAttend:
    """One span: what it reads is worked out once a step and window, and used in every layer."""

    def __init__(self, store: KvStore, span: Span, recent_pages: int, pattern: Pattern | None) -> None:
        self.store, self.span, self.pattern = store, span, pattern
        self.columns = SpanColumns(span, store.page_size, recent_pages, store.is_sealed)
        tail = self.columns.tail
        known = -(-span.start // store.page_size)
        homes = self.columns.homes[tail : None if self.columns.homed else known]
        self._tail_pages = store.select([page for page in homes if page is not None])
        self._seal_pages = torch.tensor([span.after[n] for n in self.columns.seals], device=store.device)
        self._seal_index = torch.tensor([n - tail for n in self.columns.seals], device=store.device)
        self._readings: dict[int | None, _Reading] = {}

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "heads count dim"],
        k: Float[Tensor, "kv count dim"],
        v: Float[Tensor, "kv count dim"],
        scale: float,
        window: int | None,
    ) -> Float[Tensor, "heads count dim"]:
        """Seal what the step completes, then attend."""
        reading = self._readings.get(window) or self._readings.setdefault(window, self._reading(window))
        tails = self._tails(layer, k, v) if self.columns.seals or not self.columns.homed else None
        if tails is not None and self.columns.seals:
            self.store.seal(layer, self._seal_pages, *(self._whole_pages(tail) for tail in tails))
        keys, values = self.store.read(layer, reading.pages)
        if tails is not None and reading.tail_from is not None:
            tails = [tail[:, reading.tail_from :] for tail in tails]
            keys, values = (torch.cat(parts, 1) for parts in zip((keys, values), tails, strict=True))
        keys, values = keys[:, reading.keys], values[:, reading.keys]
        if self.span.count == 1:
            return _attend_one(q, keys, values, scale, reading.mask)
        if reading.mask is None:
            return masked_attention(q[None], keys[None], values[None], scale=scale, window=window)[0]
        grouped = q.shape[0] != keys.shape[0]
        return scaled_dot_product_attention(
            q[None], keys[None], values[None], attn_mask=reading.mask[None, None], scale=scale, enable_gqa=grouped
        )[0]

    def _tails(self, layer: int, k: Tensor, v: Tensor) -> list[Tensor]:
        """Keys and values [kv, tokens, dim] from the tail's first position to the last new token, not quantized."""
        first = self.columns.tail * self.store.page_size
        old = self.store.read(layer, self._tail_pages)
        if self.columns.homed:
            return [tail[:, : self.columns.end - first] for tail in old]
        return [torch.cat([tail[:, : self.span.start - first], x], 1) for tail, x in zip(old, (k, v), strict=True)]

    def _whole_pages(self, tail: Tensor) -> Tensor:
        size = self.store.page_size
        count = tail.shape[1] // size
        pages = tail[:, : count * size].reshape(tail.shape[0], count, size, tail.shape[2])
        return pages.index_select(1, self._seal_index)

    def _reading(self, window: int | None) -> _Reading:
        spot, size, end = self.columns, self.store.page_size, self.columns.end
        columns = spot.columns(window, self.pattern)
        in_store = [column.page for column in columns if column.page is not None]
        pages = self.store.select(in_store)
        tail_from = None if spot.homed else (columns[len(in_store)].number - spot.tail) * size
        first = columns[0].number
        # the last column is the page of the last new token, which may not be full
        count = end - (spot.last_query - len(columns) + 1) * size
        in_a_row = [column.number for column in columns] == list(range(first, first + len(columns)))
        if self.pattern is None and in_a_row and all(spot.seen_by_all(column) for column in columns):
            unseen = 0 if window is None else max(0, self.span.start + 1 - window - first * size)
            return _Reading(pages, tail_from, slice(unseen, count), None)
        mask = spot.visible(columns, window, self.pattern, self.store.device)
        needless = self.span.count == 1 and bool(mask.all())
        return _Reading(pages, tail_from, slice(0, count), None if needless else mask)


class PagedAttend:
    """`Attend` over the spans of one step, whose tokens lie side by side in one row of the batch.

    `recent_pages` are the full pages before the current one that are read as float where they have a float copy.
    A model's own window and the pattern both apply. Use it for one forward pass, in which each layer calls it once.
    """

    def __init__(
        self, store: KvStore, spans: Sequence[Span], *, recent_pages: int, pattern: Pattern | None = None
    ) -> None:
        self.store = store
        self._spans = [_SpanAttend(store, span, recent_pages, pattern) for span in spans]
        self._ends = list(itertools.accumulate(span.count for span in spans))
        slots, written = [], []
        for offset, span in zip([0, *self._ends], self._spans, strict=False):
            for i, page, token in span.columns.new_slots():
                slots.append(store.slot(page, token))
                written.append(offset + i)
        self._slots = torch.tensor(slots, dtype=torch.int64, device=store.device)
        everything = len(written) == sum(span.count for span in spans)
        self._written = None if everything else torch.tensor(written, dtype=torch.int64, device=store.device)

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "1 heads total dim"],
        k: Float[Tensor, "1 kv total dim"],
        v: Float[Tensor, "1 kv total dim"],
        *,
        scale: float,
        window: int | None,
    ) -> Float[Tensor, "1 heads total dim"]:
        """Store and seal what is new, then attend span by span."""
        q, k, v = q[0], k[0], v[0]
        stored = (k, v) if self._written is None else tuple(x.index_select(1, self._written) for x in (k, v))
        self.store.write(layer, self._slots, *stored)
        mixed, start = [], 0
        for span, end in zip(self._spans, self._ends, strict=True):
            mixed.append(span(layer, q[:, start:end], k[:, start:end], v[:, start:end], scale, window))
            start = end
        return torch.cat(mixed, 1)[None]


def _attend_one(
    q: Float[Tensor, "heads 1 dim"],
    keys: Float[Tensor, "kv keys dim"],
    values: Float[Tensor, "kv keys dim"],
    scale: float,
    mask: Bool[Tensor, "1 keys"] | None,
) -> Float[Tensor, "heads 1 dim"]:
    """One token's attention; the query heads that share a key head go as rows of one product, keys are not repeated."""
    rows = q.reshape(1, keys.shape[0], -1, q.shape[2])
    mask = None if mask is None else mask[None, None]
    return scaled_dot_product_attention(rows, keys[None], values[None], attn_mask=mask, scale=scale).view_as(q)
