"""Which keys the new tokens of one sequence read in a step: integers only, the tensors are in paged_attention.py.

A query in page b reads page q from its sealed copy when q < b - recent_pages and there is one, else from its float
copy. While a long prompt passes, a page may thus be read in both ways within one step: it is two *columns* then, each
visible to its own query pages. Float copies lie in the store, in a page's *home*; but a page that begins and is sealed
within the step never gets a home. From the first such page on, float copies are the step's own new tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from cann_llm_quant.runner.spans import Pattern, Span


@dataclass(frozen=True)
class Column:
    """One page of keys: its number, the id to read (None: from the new tokens), and the query pages that see it."""

    number: int
    page: int | None
    first_query: int
    last_query: int


class SpanColumns:
    """The columns of one span; see the module's docstring.

    `homes` are the float pages by page number; from page number `fresh` on, the new tokens themselves are read.
    """

    def __init__(self, span: Span, page_size: int, recent_pages: int, is_sealed: Callable[[int], bool]) -> None:
        self.span, self.size, self.recent = span, page_size, recent_pages
        self.end = span.start + span.count
        self.first_query, self.last_query = span.start // page_size, (self.end - 1) // page_size
        known = -(-span.start // page_size)
        numbers = range(self.last_query + 1)
        self.sealed = [is_sealed(span.after[n]) for n in numbers]
        candidates = (span.before[n] if n < known else span.after[n] for n in numbers)
        self.homes = [page if page >= 0 and not is_sealed(page) else None for page in candidates]
        self.fresh = next((n for n in range(known, len(numbers)) if self.homes[n] is None), len(numbers))
        newly = [n for n in numbers if self.sealed[n] and (n >= known or not is_sealed(span.before[n]))]
        #: page numbers that the step seals, from their homes and from the new tokens
        self.seals_home = [n for n in newly if self.homes[n] is not None]
        self.seals_fresh = [n for n in newly if self.homes[n] is None]

    def new_slots(self) -> list[tuple[int, int, int]]:
        """(index among the new tokens, float page, slot) of each new token that has a float page."""
        places = ((i, *divmod(self.span.start + i, self.size)) for i in range(self.span.count))
        return [(i, home, slot) for i, number, slot in places if (home := self.homes[number]) is not None]

    def columns(self, window: int | None, pattern: Pattern | None) -> list[Column]:
        """What some query of the span sees: from the store, then new tokens. The last token is in the last column."""
        columns = [column for n in range(self.last_query + 1) for column in self._copies(n)]
        reached = [column for column in columns if self._reached(column.number, window, pattern)]
        return sorted(reached, key=lambda column: column.page is None)

    def _copies(self, n: int) -> list[Column]:
        first, last, page = self.first_query, self.last_query, self.span.after[n]
        near = n + self.recent
        home = None if n >= self.fresh else self.homes[n]
        if home is None and n < self.fresh:
            return [Column(n, page, first, last)] if page >= 0 else []
        if not self.sealed[n]:
            return [Column(n, home, first, last)] if home is None or page >= 0 else []
        resealed = [Column(n, page, max(first, near + 1), last)] if near < last else []
        return [*resealed, Column(n, home, first, min(last, near))] if near >= first else resealed

    def _reached(self, number: int, window: int | None, pattern: Pattern | None) -> bool:
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
