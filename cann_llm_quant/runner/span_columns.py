"""Which keys the new tokens of one sequence read in a step: integers only, the tensors are in paged_attention.py.

A query in page b reads page q from its sealed copy when q < b - recent_pages and there is one, else from its float
copy. While a long prompt passes, a page may thus be read in both ways within one step: it is two *columns* then, each
visible to its own query pages. From page number `tail` on, the step has float copies at hand:

    stored    pages before the tail, read as they lie in `after`
    resealed  sealed copies of pages of the tail
    float     the tail: in pages of the store, or, where new tokens never get a float page, the new tokens themselves
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from cann_llm_quant.runner.spans import Pattern, Span


@dataclass(frozen=True)
class Column:
    """One page of keys: its number, the id to read (None: from the tail), and the query pages that see it."""

    number: int
    page: int | None
    first_query: int
    last_query: int


class SpanColumns:
    """The columns of one span; see the module's docstring."""

    def __init__(self, span: Span, page_size: int, recent_pages: int, is_sealed: Callable[[int], bool]) -> None:
        self.span, self.size, self.recent = span, page_size, recent_pages
        self.end = span.start + span.count
        self.first_query, self.last_query = span.start // page_size, (self.end - 1) // page_size
        self.sealed = [is_sealed(page) for page in span.after]
        known = -(-span.start // page_size)
        #: float page of each page number, None where there is none
        self.homes: list[int | None] = [None] * (self.last_query + 1)
        for number in range(self.last_query + 1):
            for page in (span.before[number] if number < known else -1, span.after[number]):
                if self.homes[number] is None and page >= 0 and not is_sealed(page):
                    self.homes[number] = page
        #: page numbers that the step seals
        self.seals = [
            number
            for number in range(self.last_query + 1)
            if self.sealed[number] and (number >= known or not is_sealed(span.before[number]))
        ]
        self.tail = self._tail(known)
        #: every float copy lies in the store once the new tokens are written
        self.homed = None not in self.homes[self.tail :]

    def _tail(self, known: int) -> int:
        """First page number of which the step needs the float copy, and has it."""
        wanted = min([self.first_query, self.first_query - self.recent, *self.seals])
        tail = min(known, self.first_query)
        while tail > max(wanted, 0) and self.homes[tail - 1] is not None:
            tail -= 1
        return tail

    def new_slots(self) -> list[tuple[int, int, int]]:
        """(index among the new tokens, float page, slot) of each new token that has a float page."""
        places = ((i, *divmod(self.span.start + i, self.size)) for i in range(self.span.count))
        return [(i, home, slot) for i, number, slot in places if (home := self.homes[number]) is not None]

    def columns(self, window: int | None, pattern: Pattern | None) -> list[Column]:
        """All columns that some query of the span sees: stored, resealed, float, each in the order of positions."""
        first, last, after = self.first_query, self.last_query, self.span.after
        stored = [Column(n, after[n], first, last) for n in range(self.tail) if after[n] >= 0]
        resealed = [
            Column(n, after[n], max(first, n + self.recent + 1), last)
            for n in range(self.tail, last - self.recent)
            if self.sealed[n]
        ]
        floats = [
            Column(
                n, self.homes[n] if self.homed else None, first, min(last, n + self.recent) if self.sealed[n] else last
            )
            for n in range(self.tail, last + 1)
        ]
        columns = [c for c in stored + resealed + floats if self._reached(c, window, pattern)]
        if not self.homed:
            # the tail is one run of tokens: a page within it that nobody sees is masked, not left out
            oldest = min(c.number for c in columns if c.page is None)
            columns = [c for c in columns if c.page is not None] + floats[oldest - self.tail :]
        return columns

    def _reached(self, column: Column, window: int | None, pattern: Pattern | None) -> bool:
        number = column.number
        if column.last_query < self.first_query:
            return False
        newest = (number + 1) * self.size - 1
        if window is not None and newest <= self.span.start - window:
            return False
        return pattern is None or number * self.size < pattern.first or newest > self.span.start - pattern.window

    def seen_by_all(self, column: Column) -> bool:
        """Whether every query page of the span reads this column."""
        return column.first_query <= self.first_query and column.last_query >= self.last_query

    def visible(
        self, columns: list[Column], window: int | None, pattern: Pattern | None, device: torch.device
    ) -> Bool[Tensor, "count keys"]:
        """Which of the columns' keys each new token sees; keys from `end` on are left out."""
        rows = torch.tensor([[c.number, c.first_query, c.last_query] for c in columns], device=device)
        slots = torch.arange(self.size, device=device)
        keys = (rows[:, :1] * self.size + slots).flatten()
        within = keys < self.end
        keys = keys[within]
        seen_from, seen_to = (rows[:, i].repeat_interleave(self.size)[within] for i in (1, 2))
        queries = torch.arange(self.span.start, self.end, device=device)[:, None]
        pages = queries // self.size
        return sees(queries, keys, window, pattern) & (seen_from <= pages) & (pages <= seen_to)


def sees(
    queries: Int[Tensor, "count 1"], keys: Int[Tensor, "keys"], window: int | None, pattern: Pattern | None
) -> Bool[Tensor, "count keys"]:
    """Causal visibility by positions, within a sliding window and a pattern if there are any."""
    seen = keys <= queries
    if window is not None:
        seen &= keys > queries - window
    if pattern is not None:
        seen &= (keys < pattern.first) | (keys > queries - pattern.window)
    return seen
