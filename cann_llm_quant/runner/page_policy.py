"""Which form each page of a sequence takes, as a function of positions and tokens alone.

With P tokens a page and r = ceil(recent_tokens / P), after `end` stored tokens the pages `q < end // P - r` are
settled: they keep their form from then on, may be shared, and are

    float    where `q * P < sink_tokens` or a sensitive token lies in page q (protected), or where nothing is quantized
    sealed   otherwise, which is to say in each layer's KV scheme

The pages after them, the one being filled among them, are float pages. A pattern drops pages that no query from `start`
on sees: key j is seen by query i iff `j <= i` and (`j < first` or `j > i - window`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cann_llm_quant.errors import UsageError
from cann_llm_quant.runner.spans import Pattern

Kind = Literal["sealed", "float"]

PAGE_SIZES = (16, 32, 128)


@dataclass(frozen=True)
class Need:
    """A number of pages of each kind."""

    sealed: int = 0
    floats: int = 0

    def __add__(self, other: "Need") -> "Need":
        return Need(self.sealed + other.sealed, self.floats + other.floats)

    def within(self, other: "Need") -> bool:
        """Whether both numbers are at most `other`'s."""
        return self.sealed <= other.sealed and self.floats <= other.floats

    @staticmethod
    def of(kinds: Sequence[Kind]) -> "Need":
        """One page for each of `kinds`."""
        sealed = sum(kind == "sealed" for kind in kinds)
        return Need(sealed, len(kinds) - sealed)


@dataclass(frozen=True)
class PagePolicy:
    """The page size, what stays in float, and which pages are dropped."""

    page_size: int
    recent_tokens: int = 0
    sink_tokens: int = 0
    sensitive: frozenset[int] = frozenset()
    quantizes: bool = False
    pattern: Pattern | None = None

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise UsageError(f"page size {self.page_size} must be positive; {PAGE_SIZES} are usual")
        if self.recent_tokens < 0 or self.sink_tokens < 0:
            raise UsageError(
                f"recent_tokens {self.recent_tokens}, sink_tokens {self.sink_tokens}: must not be negative"
            )
        if self.pattern is not None and (self.pattern.window < 1 or self.pattern.first < 0):
            raise UsageError(f"attention pattern {self.pattern} needs a window of at least 1 and no negative first")

    @property
    def recent_pages(self) -> int:
        """Full pages behind the one being filled that stay in float."""
        return -(-self.recent_tokens // self.page_size) if self.quantizes else 0

    def pages(self, tokens: int) -> int:
        """Pages that `tokens` positions touch."""
        return -(-tokens // self.page_size)

    def settled(self, end: int) -> int:
        """How many leading pages have their final form once `end` tokens are stored."""
        return max(0, end // self.page_size - self.recent_pages)

    def settled_kind(self, page: int, tokens: Sequence[int]) -> Kind:
        """The final form of page number `page`, whose tokens are (or begin with) `tokens`."""
        protected = page * self.page_size < self.sink_tokens or not self.sensitive.isdisjoint(tokens)
        return "sealed" if self.quantizes and not protected else "float"

    def dropped(self, start: int) -> range:
        """Pages that no query at `start` or later sees."""
        if self.pattern is None:
            return range(0)
        first = self.pages(self.pattern.first)
        return range(first, max(first, (start - self.pattern.window + 1) // self.page_size))

    def kinds(self, tokens: Sequence[int], settled: int, end: int) -> list[Kind]:
        """The forms of pages `settled`, `settled + 1`, ... once `end` of `tokens` are stored."""
        size, final = self.page_size, self.settled(end)
        return [
            self.settled_kind(page, tokens[page * size : (page + 1) * size]) if page < final else "float"
            for page in range(settled, self.pages(end))
        ]

    def peak(self, prompt: Sequence[int], stored: int) -> Need:
        """The most pages that one sequence of `stored` positions holds at a time when it runs alone, token by token.

        It is assumed that no sensitive token comes behind `prompt`; with a pattern the numbers are bounds.
        """
        kept = self.pages(stored)
        if self.pattern is not None:
            kept = min(kept, self.pages(self.pattern.first) + 1 + self.pages(self.pattern.window - 1))
        if not self.quantizes:
            return Need(0, kept)
        final = Need.of(self.kinds(prompt, 0, stored)[: self.settled(stored)])
        return Need(min(kept, final.sealed), min(kept, final.floats + self.recent_pages + 1))
