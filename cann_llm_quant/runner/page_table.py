"""Every page of the engine: two pools, the prefix cache that keeps pages nobody holds, and what lies outside of them.

Nothing here touches a tensor. What has to happen to the contents is written down as moves, to be carried out in order
before the step that is being planned (`OffloadStore.apply`):

    out  page, handle    store the page's content under the handle; the page may be overwritten from then on
    in   page, handle    bring it back into that page and forget the handle
    drop handle          forget it

Two things lie outside: whole sequences that were swapped out, and cached pages that gave up their place in the pool.
The oldest of the latter are dropped, with their children, when the room outside is needed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from cann_llm_quant.runner.page_policy import Kind, Need
from cann_llm_quant.runner.pages import PagePool
from cann_llm_quant.runner.prefix_cache import Entry, PrefixCache
from cann_llm_quant.runner.spans import DROPPED


@dataclass(frozen=True)
class Move:
    """One transfer between a page and the storage outside of the pools."""

    kind: Literal["out", "in", "drop"]
    handle: int
    page: int = DROPPED


@dataclass(frozen=True)
class PageStats:
    """Pages by state.

    `held` is what the sequences would hold if they shared nothing, `outside_bytes` what is offloaded.
    """

    total: int
    free: int
    cached: int
    referenced: int
    held: int
    outside_bytes: int

    @property
    def saved(self) -> int:
        """Pages that sharing saves at this moment."""
        return self.held - self.referenced


class Outside:
    """A budget of bytes outside of the pools, and what has been promised of it, by handle."""

    def __init__(self, budget: int, *, sealed_bytes: int, float_bytes: int) -> None:
        self.budget = budget
        self.used = 0
        self.cached: dict[int, Entry] = {}
        self._size: dict[Kind, int] = {"sealed": sealed_bytes, "float": float_bytes}
        self._kinds: dict[int, Kind] = {}
        self._last = 0

    @property
    def pages(self) -> int:
        """How many pages lie outside."""
        return len(self._kinds)

    def unpromised(self) -> int:
        """Bytes that could be had if all cached pages were dropped."""
        return self.budget - self.used + self.size(self._kinds[handle] for handle in self.cached)

    def size(self, kinds: Iterable[Kind]) -> int:
        """Bytes of pages of these kinds."""
        return sum(self._size[kind] for kind in kinds)

    def kind(self, handle: int) -> Kind:
        """The kind of page that lies under a handle."""
        return self._kinds[handle]

    def put(self, kind: Kind) -> int:
        """A new handle for a page's content."""
        self._last += 1
        self._kinds[self._last] = kind
        self.used += self._size[kind]
        return self._last

    def pop(self, handle: int) -> None:
        """Give a handle's room back."""
        self.used -= self._size[self._kinds.pop(handle)]
        self.cached.pop(handle, None)


class PageTable:
    """Pages `0 .. sealed-1` are sealed ones, `sealed .. sealed+floats-1` float ones."""

    def __init__(
        self, *, sealed: int, floats: int, prefix: PrefixCache | None = None, outside: Outside | None = None
    ) -> None:
        self.pools: dict[Kind, PagePool] = {"sealed": PagePool(0, sealed), "float": PagePool(sealed, floats)}
        self.prefix = prefix
        self._sealed = sealed
        self.outside = Outside(0, sealed_bytes=1, float_bytes=1) if outside is None else outside
        self._moves: list[Move] = []

    def kind(self, page: int) -> Kind:
        """The kind of a page."""
        return "sealed" if page < self._sealed else "float"

    def total(self) -> Need:
        """All pages."""
        return Need(self.pools["sealed"].total, self.pools["float"].total)

    def available(self) -> Need:
        """Pages that can be had: free ones, and idle ones at the price of what is cached in them."""
        sealed, floats = self.pools["sealed"], self.pools["float"]
        return Need(sealed.free + sealed.idle, floats.free + floats.idle)

    def stats(self) -> PageStats:
        """How the pages are used."""
        pools = self.pools.values()
        return PageStats(
            total=sum(pool.total for pool in pools),
            free=sum(pool.free for pool in pools),
            cached=sum(pool.idle for pool in pools),
            referenced=sum(pool.referenced for pool in pools),
            held=sum(pool.holders for pool in pools),
            outside_bytes=self.outside.used,
        )

    def take_moves(self) -> tuple[Move, ...]:
        """The moves since the last call, in order."""
        moves, self._moves = tuple(self._moves), []
        return moves

    def allocate(self, kind: Kind) -> int:
        """A page for one holder; `available` must count one. Gives up an idle page where none is free."""
        pool = self.pools[kind]
        if not pool.free:
            self._evict(pool)
        return pool.allocate()

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each of a sequence's pages, the last page first."""
        for page in reversed(pages):
            if page != DROPPED:
                entry = None if self.prefix is None else self.prefix.of_page(page)
                rank = None if self.prefix is None or entry is None else self.prefix.rank(entry)
                self._pool(page).release(page, rank)

    def match(self, tokens: Sequence[int]) -> list[Entry]:
        """The cached pages with which `tokens` begin."""
        return [] if self.prefix is None else self.prefix.match(tokens)

    def cost(self, hits: Sequence[Entry]) -> Need:
        """What `take` of these uses up of the pages that are available."""
        kinds: list[Kind] = []
        for entry in hits:
            if entry.handle is not None:
                kinds.append(self.outside.kind(entry.handle))
            elif entry.page is not None and not self._pool(entry.page).count(entry.page):
                kinds.append(self.kind(entry.page))
        return Need.of(kinds)

    def take(self, hits: Sequence[Entry], unseen: range) -> list[int]:
        """Hold the pages of `hits`, brought back into the pools where need be, except those numbered in `unseen`."""
        for entry in hits:
            # While some are brought in, none of the others may be evicted or dropped.
            if entry.page is not None:
                self._pool(entry.page).share(entry.page)
            elif entry.handle is not None:
                self.outside.cached.pop(entry.handle)
        for number, entry in enumerate(hits):
            if entry.handle is None:
                continue
            if number in unseen:
                self.outside.cached[entry.handle] = entry
            else:
                self._settle(entry, self._bring_in(entry.handle))
        pages = [DROPPED if entry.page is None else entry.page for entry in hits]
        self.release([page for number, page in enumerate(pages) if number in unseen])
        return [DROPPED if number in unseen else page for number, page in enumerate(pages)]

    def publish(self, parent: Entry | None, tokens: tuple[int, ...], page: int) -> Entry | None:
        """Offer a full page in its final form for sharing, below the entry of the page before.

        Where an equal page is cached already its holder takes that one and gives its own back: the entry's page
        is the one to go on with. None: it cannot be cached, because its parent is not.
        """
        if self.prefix is None or (parent is not None and not parent.alive):
            return None
        entry = self.prefix.find(parent, tokens)
        if entry is None:
            return self.prefix.insert(parent, tokens, page)
        if entry.page is None:
            self.drop([entry.handle] if entry.handle is not None else [])
            self._settle(entry, page)
        elif entry.page != page:
            self._pool(entry.page).share(entry.page)
            self.release([page])
            self.prefix.count_merge()
        return entry

    def swap_out(self, pages: Sequence[int]) -> list[int] | None:
        """Move a sequence's pages outside and release them; returns a handle for each, None if they do not fit."""
        kinds = [self.kind(page) for page in pages if page != DROPPED]
        size = self.outside.size(kinds)
        if size > self.outside.unpromised() or not self._room(size):
            return None
        handles = [DROPPED if page == DROPPED else self._send_out(page) for page in pages]
        self.release(pages)
        return handles

    def swap_in(self, handles: Sequence[int]) -> list[int]:
        """Fresh pages with what lies under `handles`; `available` must count them."""
        return [DROPPED if handle == DROPPED else self._bring_in(handle) for handle in handles]

    def drop(self, handles: Iterable[int]) -> None:
        """Forget what lies under `handles`."""
        for handle in handles:
            if handle != DROPPED:
                self.outside.pop(handle)
                self._moves.append(Move("drop", handle))

    def clear_cache(self) -> None:
        """Evict all that is cached and held by nobody, inside and outside of the pools."""
        for pool in self.pools.values():
            while pool.idle:
                self._forget(self._least(pool))
        while self.outside.cached:
            self._forget(next(iter(self.outside.cached.values())))

    def forget_contents(self) -> None:
        """After moves that failed: forget all that is cached, here or outside. Nobody may hold a page."""
        self.clear_cache()
        self.take_moves()

    def _pool(self, page: int) -> PagePool:
        return self.pools[self.kind(page)]

    def _least(self, pool: PagePool) -> Entry:
        entry = None if self.prefix is None else self.prefix.of_page(pool.least())
        assert entry is not None, "an idle page is not in the prefix cache"
        return entry

    def _evict(self, pool: PagePool) -> None:
        """Make one idle page free: its content goes outside where there is room, and is forgotten otherwise."""
        entry = self._least(pool)
        page = entry.page
        assert page is not None
        if not self._room(self.outside.size([self.kind(page)])):
            self._forget(entry)
        elif entry.alive:  # making room may have dropped its parent, and it
            handle = self._send_out(page)
            self._settle(entry, handle=handle)
            self.outside.cached[handle] = entry
            pool.reclaim(page)

    def _room(self, size: int) -> bool:
        """Whether `size` bytes fit outside, after dropping the oldest cached pages there as far as needed."""
        if size > self.outside.budget:
            return False
        while self.outside.used + size > self.outside.budget and self.outside.cached:
            self._forget(next(iter(self.outside.cached.values())))
        return self.outside.used + size <= self.outside.budget

    def _send_out(self, page: int) -> int:
        handle = self.outside.put(self.kind(page))
        self._moves.append(Move("out", handle, page))
        return handle

    def _bring_in(self, handle: int) -> int:
        page = self.allocate(self.outside.kind(handle))
        self.outside.pop(handle)
        self._moves.append(Move("in", handle, page))
        return page

    def _settle(self, entry: Entry, page: int | None = None, handle: int | None = None) -> None:
        if self.prefix is not None:
            self.prefix.settle(entry, page=page, handle=handle)

    def _forget(self, entry: Entry) -> None:
        """Remove an entry and all below it from the cache, and free the pages of them that nobody holds."""
        for each in () if self.prefix is None else self.prefix.remove(entry):
            page, handle = each.page, each.handle
            self._settle(each)
            if handle is not None:
                self.drop([handle])
            elif page is not None and not self._pool(page).count(page):
                self._pool(page).reclaim(page)
