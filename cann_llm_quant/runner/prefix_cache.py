"""Full pages by the tokens that they hold and all tokens before them, so that equal beginnings are computed once.

An entry is a page's tokens below the entry of the page before: the entries form a tree whose root is the empty text.
It is found by a chained hash (xxh3, 128 bits),

    digest(entry) = H(digest(parent) || tokens),    digest(root) = H(salt)

and taken only if its parent and its tokens are the ones asked for, so that no collision, found or made, hands out the
page of another text. The salt stands for what the content depends on beside the tokens.

Only full pages have entries, and at least one token of a text is left to compute: its logits are not in the cache. No
entry stays without its parent: `remove` takes along what hangs below. Sequences give their pages back from the last to
the first, and a hit counts for the whole chain, so both orders of eviction, least recent (`lru`) and least often
(`lfu`, among equals least recent), meet leaves before their parents; only where an attention pattern drops pages early
can a page go while its children are in use, and then they are forgotten with it.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import xxhash

from cann_llm_quant.errors import UsageError
from cann_llm_quant.runner.pages import Rank

Eviction = Literal["lru", "lfu"]


def _xxh3(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


@dataclass(eq=False, slots=True)
class Entry:
    """One full page: in the pool as `page`, or outside of it under `handle`, or (both None) removed."""

    parent: "Entry | None"
    tokens: tuple[int, ...]
    digest: bytes
    page: int | None
    handle: int | None = None
    uses: int = 0
    children: "dict[Entry, None]" = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        """Whether its content can still be had."""
        return self.page is not None or self.handle is not None


@dataclass(frozen=True)
class PrefixStats:
    """What the cache was asked for and what it gave, since it was made.

    `pages_saved` counts pages that were handed out instead of computed, or kept once instead of twice; `evictions`
    counts entries that were removed.
    """

    queries: int = 0
    tokens_asked: int = 0
    tokens_hit: int = 0
    pages_saved: int = 0
    evictions: int = 0

    @property
    def hit_rate(self) -> float:
        """The part of all tokens asked for that did not have to be computed."""
        return self.tokens_hit / self.tokens_asked if self.tokens_asked else 0.0


class PrefixCache:
    """The tree of full pages. It holds no references: the page table knows which pages are in use.

    Hits of fewer than `min_prefix_len` tokens are not used. `hash_page` replaces the hash.
    """

    def __init__(
        self,
        page_size: int,
        *,
        min_prefix_len: int = 0,
        eviction: str = "lru",
        salt: bytes = b"",
        hash_page: Callable[[bytes], bytes] = _xxh3,
    ) -> None:
        if min_prefix_len < 0:
            raise UsageError(f"min_prefix_len {min_prefix_len} must not be negative")
        if eviction not in get_args(Eviction):
            raise UsageError(f"unknown eviction {eviction!r}; known are lru, lfu")
        self.page_size = page_size
        self.min_prefix_len = min_prefix_len
        self.eviction = eviction
        self.stats = PrefixStats()
        self._hash = hash_page
        self._root = hash_page(salt)
        self._by_digest: dict[bytes, list[Entry]] = {}
        self._by_page: dict[int, Entry] = {}
        self._tick = 0

    @property
    def entries(self) -> int:
        """How many pages are known."""
        return sum(len(bucket) for bucket in self._by_digest.values())

    def match(self, tokens: Sequence[int]) -> list[Entry]:
        """The entries of the longest known beginning of `tokens` that leaves at least one token to compute."""
        found: list[Entry] = []
        parent: Entry | None = None
        for end in range(self.page_size, len(tokens), self.page_size):
            parent = self.find(parent, tuple(tokens[end - self.page_size : end]))
            if parent is None:
                break
            found.append(parent)
        return found if len(found) * self.page_size >= self.min_prefix_len else []

    def find(self, parent: Entry | None, tokens: tuple[int, ...]) -> Entry | None:
        """The entry of exactly these tokens below exactly this parent."""
        for entry in self._by_digest.get(self._digest(parent, tokens), ()):
            if entry.parent is parent and entry.tokens == tokens:
                return entry
        return None

    def insert(self, parent: Entry | None, tokens: tuple[int, ...], page: int) -> Entry:
        """A new entry for `page`; `find` must not know one already, and the parent must be alive."""
        entry = Entry(parent, tokens, self._digest(parent, tokens), None)
        self._by_digest.setdefault(entry.digest, []).append(entry)
        if parent is not None:
            parent.children[entry] = None
        self.settle(entry, page=page)
        return entry

    def settle(self, entry: Entry, *, page: int | None = None, handle: int | None = None) -> None:
        """Note where an entry's content lies now; neither place: nowhere."""
        if entry.page is not None:
            del self._by_page[entry.page]
        entry.page, entry.handle = page, handle
        if page is not None:
            self._by_page[page] = entry

    def remove(self, entry: Entry) -> list[Entry]:
        """Forget an entry and all below it; returns them, children first, with their places for the caller to clear."""
        if entry.parent is not None:
            del entry.parent.children[entry]
        removed = [entry]
        for each in removed:
            removed.extend(each.children)
        for each in removed:
            bucket = self._by_digest[each.digest]
            bucket.remove(each)
            if not bucket:
                del self._by_digest[each.digest]
        self.stats = replace(self.stats, evictions=self.stats.evictions + len(removed))
        return removed[::-1]

    def of_page(self, page: int) -> Entry | None:
        """The entry whose content lies in `page`."""
        return self._by_page.get(page)

    def rank(self, entry: Entry) -> Rank:
        """The place of an entry, used just now, in the order of eviction."""
        self._tick += 1
        return (entry.uses if self.eviction == "lfu" else 0, self._tick)

    def count_query(self, asked: int, hits: Sequence[Entry]) -> None:
        """Count a lookup of `asked` tokens that used `hits`."""
        for entry in hits:
            entry.uses += 1
        self.stats = replace(
            self.stats,
            queries=self.stats.queries + 1,
            tokens_asked=self.stats.tokens_asked + asked,
            tokens_hit=self.stats.tokens_hit + len(hits) * self.page_size,
            pages_saved=self.stats.pages_saved + len(hits),
        )

    def count_merge(self) -> None:
        """Count a page that was computed twice and is kept once."""
        self.stats = replace(self.stats, pages_saved=self.stats.pages_saved + 1)

    def _digest(self, parent: Entry | None, tokens: tuple[int, ...]) -> bytes:
        return self._hash((self._root if parent is None else parent.digest) + array("q", tokens).tobytes())
