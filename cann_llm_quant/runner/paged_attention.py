"""Attention over pages: the decoder's `Attend` for one step of the engine, any mixture of prompts and single tokens.

In every layer the new keys and values are written to float pages, pages that the step completes are sealed, and each
span's queries attend to the columns of their own sequence (span_columns.py). Sequences never meet in one operation, so
that no result depends on who else is in the batch.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cann_llm_quant.models.attention import masked_attention
from cann_llm_quant.runner.kv_store import KvStore, Selection
from cann_llm_quant.runner.span_columns import SpanColumns
from cann_llm_quant.runner.spans import Pattern, Span


@dataclass(frozen=True)
class _Reading:
    """How a span reads its keys under one window: pages of the store, then the new tokens from `fresh` on.

    `keys` is the run of them that is seen at all; `mask` is None when attention within it is causal, and windowed.
    """

    pages: Selection
    fresh: slice | None
    keys: slice
    mask: Bool[Tensor, "1 1 count keys"] | None


class _SpanAttend:
    """One span: what it reads is worked out once a step and window, and used in every layer."""

    def __init__(self, store: KvStore, span: Span, recent_pages: int, pattern: Pattern | None) -> None:
        self.store, self.span, self.pattern = store, span, pattern
        self.columns = columns = SpanColumns(span, store.page_size, recent_pages, store.is_sealed)
        self._first_fresh = columns.fresh * store.page_size - span.start
        self._homes = store.select([page for n in columns.seals_home if (page := columns.homes[n]) is not None])
        self._sealed_homes = self._ids([span.after[n] for n in columns.seals_home])
        self._fresh = self._ids([n - columns.fresh for n in columns.seals_fresh])
        self._sealed_fresh = self._ids([span.after[n] for n in columns.seals_fresh])
        self._readings: dict[int | None, _Reading] = {}

    def _ids(self, numbers: list[int]) -> Int[Tensor, "count"]:
        return torch.tensor(numbers, dtype=torch.int64, device=self.store.device)

    def seal(self, layer: int, k: Float[Tensor, "kv count dim"], v: Float[Tensor, "kv count dim"]) -> None:
        """Encode the pages that the step completes; their new tokens are in their homes already."""
        if self.columns.seals_home:
            pages = [self._pages(x) for x in self.store.read(layer, self._homes)]
            self.store.seal(layer, self._sealed_homes, *pages)
        if self.columns.seals_fresh:
            pages = [self._pages(x[:, self._first_fresh :]).index_select(1, self._fresh) for x in (k, v)]
            self.store.seal(layer, self._sealed_fresh, *pages)

    def attend(
        self,
        layer: int,
        q: Float[Tensor, "heads count dim"],
        k: Float[Tensor, "kv count dim"],
        v: Float[Tensor, "kv count dim"],
        scale: float,
        window: int | None,
    ) -> Float[Tensor, "heads count dim"]:
        """Attention of the span's tokens over their sequence."""
        reading = self._readings.get(window) or self._readings.setdefault(window, self._reading(window))
        keys, values = self.store.read(layer, reading.pages)
        if reading.fresh is not None:
            keys, values = torch.cat([keys, k[:, reading.fresh]], 1), torch.cat([values, v[:, reading.fresh]], 1)
        keys, values = keys[None, :, reading.keys], values[None, :, reading.keys]
        if self.span.count == 1:
            return _attend_one(q, keys, values, scale, reading.mask)
        if reading.mask is None:
            return masked_attention(q[None], keys, values, scale=scale, window=window)[0]
        grouped = q.shape[0] != keys.shape[1]
        return scaled_dot_product_attention(
            q[None], keys, values, attn_mask=reading.mask, scale=scale, enable_gqa=grouped
        )[0]

    def _pages(self, x: Float[Tensor, "kv tokens dim"]) -> Float[Tensor, "kv pages size dim"]:
        """Whole pages; what is left over is cut off."""
        whole = x.shape[1] // self.store.page_size * self.store.page_size
        return x[:, :whole].reshape(x.shape[0], -1, self.store.page_size, x.shape[2])

    def _reading(self, window: int | None) -> _Reading:
        size, start, span = self.store.page_size, self.span.start, self.columns
        columns = span.columns(window, self.pattern)
        pages = self.store.select([column.page for column in columns if column.page is not None])
        fresh = None if span.fresh > span.last_query else slice(self._first_fresh, None)
        # all columns are full but the last, which ends with the last new token
        count = span.end - (span.last_query - len(columns) + 1) * size
        first = columns[0].number
        in_a_row = [column.number for column in columns] == list(range(first, first + len(columns)))
        if self.pattern is None and in_a_row and all(span.seen_by_all(column) for column in columns):
            unseen = 0 if window is None else max(0, start + 1 - window - first * size)
            return _Reading(pages, fresh, slice(unseen, count), None)
        mask = span.visible(columns, window, self.pattern, self.store.device)[None, None]
        needless = self.span.count == 1 and bool(mask.all())
        return _Reading(pages, fresh, slice(0, count), None if needless else mask)


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
            new_q, new_k, new_v = (x[:, start:end] for x in (q, k, v))
            span.seal(layer, new_k, new_v)
            mixed.append(span.attend(layer, new_q, new_k, new_v, scale, window))
            start = end
        return torch.cat(mixed, 1)[None]


def _attend_one(
    q: Float[Tensor, "heads 1 dim"],
    keys: Float[Tensor, "1 kv keys dim"],
    values: Float[Tensor, "1 kv keys dim"],
    scale: float,
    mask: Bool[Tensor, "1 1 1 keys"] | None,
) -> Float[Tensor, "heads 1 dim"]:
    """One token's attention; the query heads that share a key head go as rows of one product, keys are not repeated."""
    rows = q.reshape(1, keys.shape[1], -1, q.shape[2])
    return scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale).reshape(q.shape)
