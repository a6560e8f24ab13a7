"""What one step asks of attention: which new tokens, and in which pages their sequence keeps its keys and values.

A page is `page_size` consecutive positions of one sequence in all layers; pages are named by their number in the store
and listed by their number in the sequence (page q holds positions `q * page_size` to `(q + 1) * page_size - 1`).
"""

from dataclasses import dataclass

DROPPED = -1


@dataclass(frozen=True)
class Span:
    """One sequence's new tokens in a step, at positions `start` to `start + count - 1`.

    `before` and `after` list its pages before and after the step, `DROPPED` where no query of the step or later sees
    the page. Where `before[q]` is a float page and `after[q]` a sealed one, the step seals it; the float page stays
    readable during the step and its owner frees it afterwards. `after` covers `start + count` tokens.
    """

    start: int
    count: int
    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True)
class Pattern:
    """Which keys a query sees: key j by query i iff `j <= i` and (`j < first` or `j > i - window`)."""

    window: int
    first: int
