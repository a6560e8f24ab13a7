"""The pool and the page table against a list of holders, by hand and by a state machine."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cann_llm_quant.runner.page_table import Outside, PageTable
from cann_llm_quant.runner.pages import PagePool
from cann_llm_quant.runner.prefix_cache import Entry, PrefixCache
from cann_llm_quant.runner.spans import DROPPED


def test_a_pool_hands_out_each_page_once_and_counts_its_holders() -> None:
    pool = PagePool(10, 3)
    assert [pool.allocate() for _ in range(3)] == [10, 11, 12]
    pool.share(11)
    assert (pool.count(11), pool.free, pool.referenced, pool.holders) == (2, 0, 3, 4)
    pool.release(11, None)
    assert pool.referenced == 3
    pool.release(11, None)
    assert (pool.free, pool.referenced) == (1, 2)
    with pytest.raises(AssertionError, match="11 is not held"):
        pool.release(11, None)
    with pytest.raises(AssertionError, match="11 is free"):
        pool.share(11)


def test_idle_pages_go_by_rank_and_can_be_taken_up_again() -> None:
    pool = PagePool(0, 4)
    pages = [pool.allocate() for _ in range(4)]
    for page, rank in zip(pages, [(0, 3), (0, 1), (0, 2), (0, 4)], strict=True):
        pool.release(page, rank)
    assert (pool.free, pool.idle, pool.referenced) == (0, 4, 0)
    assert pool.least() == 1
    pool.share(1)
    assert pool.least() == 2
    pool.reclaim(2)
    assert (pool.least(), pool.free, pool.idle) == (0, 1, 2)
    pool.rank(0, (0, 9))
    assert pool.least() == 3


def test_places_in_the_order_that_are_out_of_date_are_cleared_away() -> None:
    pool = PagePool(0, 1)
    page = pool.allocate()
    for tick in range(500):
        pool.release(page, (0, tick))
        pool.share(page)
    assert len(pool._order) < 100


def test_pages_of_both_kinds_have_one_id_space() -> None:
    table = PageTable(sealed=2, floats=3)
    assert [table.kind(page) for page in range(5)] == ["sealed"] * 2 + ["float"] * 3
    assert [table.allocate("sealed"), table.allocate("float")] == [0, 2]
    table.release([0, DROPPED, 2])
    assert table.stats().free == 5


def test_an_evicted_parent_takes_its_children_along() -> None:
    """As a pattern leaves it: the first page is given back while the second is held."""
    table = PageTable(sealed=0, floats=2, prefix=PrefixCache(1))
    first, second = table.allocate("float"), table.allocate("float")
    root = table.publish(None, (5,), first)
    assert table.publish(root, (6,), second) is not None
    table.release([first])
    assert table.allocate("float") == first
    assert table.match([5, 6, 7]) == []
    table.release([second])
    assert (table.stats().free, table.stats().cached) == (1, 0)


class PageTableMachine(RuleBasedStateMachine):
    """Texts over two tokens in pages of one token, so that equal beginnings abound.

    The model: a list of holders (text, pages), a list of swapped texts with their handles, and what each page and
    handle contains, kept up by writing on allocation and by the moves alone.
    """

    @initialize(eviction=st.sampled_from(["lru", "lfu"]), budget=st.sampled_from([0, 3, 8]))
    def start(self, eviction: str, budget: int) -> None:
        prefix = PrefixCache(1, eviction=eviction, hash_page=lambda data: b"")  # type: ignore[arg-type]
        self.table = PageTable(
            sealed=3, floats=5, prefix=prefix, outside=Outside(budget, sealed_bytes=1, float_bytes=2)
        )
        self.holders: list[tuple[tuple[int, ...], list[int]]] = []
        self.swapped: list[tuple[tuple[int, ...], list[int]]] = []
        self.contents: dict[int, tuple[int, ...]] = {}
        self.outside: dict[int, tuple[int, ...]] = {}

    def kind(self, text: tuple[int, ...]) -> str:
        return "float" if len(text) % 3 else "sealed"

    def carry_out(self) -> None:
        for move in self.table.take_moves():
            if move.kind == "out":
                self.outside[move.handle] = self.contents[move.page]
            elif move.kind == "in":
                self.contents[move.page] = self.outside.pop(move.handle)
            else:
                del self.outside[move.handle]

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5), share=st.booleans())
    def begin(self, tokens: list[int], share: bool) -> None:
        """What the scheduler does for a prompt: take what is cached, allocate the rest, publish it."""
        text = tuple(tokens)
        hits = self.table.match(tokens) if share else []
        available, cost = self.table.available(), self.table.cost(hits)
        kinds = [self.kind(text[: end + 1]) for end in range(len(hits), len(text))]
        if (
            cost.sealed + kinds.count("sealed") > available.sealed
            or cost.floats + kinds.count("float") > available.floats
        ):
            return
        pages = self.table.take(hits, range(0))
        pages += [self.table.allocate(kind) for kind in kinds]  # type: ignore[arg-type]
        self.carry_out()
        for end in range(len(hits), len(text)):
            self.contents[pages[end]] = text[: end + 1]
        parent: Entry | None = hits[-1] if hits else None
        for end in range(len(hits), len(text)):
            parent = self.table.publish(parent, (text[end],), pages[end])
            if parent is None:
                break
            assert parent.page is not None
            pages[end] = parent.page
        self.holders.append((text, pages))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        _, pages = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.table.release(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def drop_first(self, data: st.DataObject) -> None:
        """As a pattern does."""
        _, pages = self.holders[data.draw(st.integers(0, len(self.holders) - 1))]
        self.table.release(pages[:1])
        pages[0] = DROPPED

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.holders) - 1))
        text, pages = self.holders[number]
        handles = self.table.swap_out(pages)
        self.carry_out()
        if handles is not None:
            del self.holders[number]
            self.swapped.append((text, handles))

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.swapped) - 1))
        text, handles = self.swapped[number]
        kinds = [self.table.outside.kind(handle) for handle in handles if handle != DROPPED]
        available = self.table.available()
        if kinds.count("sealed") <= available.sealed and kinds.count("float") <= available.floats:
            del self.swapped[number]
            self.holders.append((text, self.table.swap_in(handles)))
            self.carry_out()

    @precondition(lambda self: self.swapped)
    @rule()
    def abandon(self) -> None:
        self.table.drop(self.swapped.pop()[1])

    @rule()
    def clear_cache(self) -> None:
        self.table.clear_cache()
        self.carry_out()
        stats = self.table.stats()
        assert stats.cached == 0
        assert stats.free + stats.referenced == stats.total
        if not self.holders:
            assert stats.free == stats.total

    @invariant()
    def every_count_is_right(self) -> None:
        self.carry_out()
        held = Counter(page for _, pages in self.holders for page in pages if page != DROPPED)
        stats = self.table.stats()
        assert stats.free + stats.cached + stats.referenced == stats.total == 8
        assert stats.referenced == len(held)
        assert stats.held == held.total()
        for pool in self.table.pools.values():
            pages = range(pool.first, pool.first + pool.total)
            assert [pool.count(page) for page in pages] == [held[page] for page in pages]
            states = [*pool._free, *pool._idle, *(page for page in pages if pool.count(page))]
            assert sorted(states) == list(pages)

    @invariant()
    def everybody_finds_what_was_stored(self) -> None:
        for where, contents in ((self.holders, self.contents), (self.swapped, self.outside)):
            for text, places in where:
                for end, place in enumerate(places):
                    assert place == DROPPED or contents[place] == text[: end + 1]

    @invariant()
    def entries_have_their_parents_and_their_contents(self) -> None:
        prefix = self.table.prefix
        assert prefix is not None
        entries = [entry for bucket in prefix._by_digest.values() for entry in bucket]
        for entry in entries:
            assert entry.alive
            assert entry.parent is None or (entry.parent in entries and entry in entry.parent.children)
            text: tuple[int, ...] = ()
            above: Entry | None = entry
            while above is not None:
                text, above = above.tokens + text, above.parent
            stored = self.contents[entry.page] if entry.page is not None else self.outside[entry.handle or 0]
            assert stored == text
        assert len({entry.page for entry in entries} - {None}) == sum(entry.page is not None for entry in entries)

    @invariant()
    def the_budget_outside_is_kept(self) -> None:
        outside = self.table.outside
        assert 0 <= outside.used <= outside.budget
        assert outside.pages == len(self.outside)
        assert set(outside.cached) | {h for _, handles in self.swapped for h in handles if h != DROPPED} == set(
            self.outside
        )


TestPageTable = PageTableMachine.TestCase
TestPageTable.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)
