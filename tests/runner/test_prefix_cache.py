"""Which beginnings are found, which page goes first, and that no hash hands out another text's page."""

from array import array

import pytest
import xxhash

from cann_llm_quant.errors import UsageError
from cann_llm_quant.runner.page_table import Outside, PageTable
from cann_llm_quant.runner.prefix_cache import Entry, PrefixCache


def store(cache: PrefixCache, tokens: list[int], first_page: int) -> list[Entry]:
    """Insert the full pages of a text that has none in the cache yet."""
    size, entries = cache.page_size, list[Entry]()
    for number in range(len(tokens) // size):
        parent = entries[-1] if entries else None
        entries.append(cache.insert(parent, tuple(tokens[number * size : (number + 1) * size]), first_page + number))
    return entries


def keep(table: PageTable, tokens: list[int]) -> None:
    """Run a text through a table as a sequence that ends at once, with pages of one token."""
    assert table.prefix is not None
    hits = table.match(tokens)
    table.prefix.count_query(len(tokens), hits)
    pages = table.take(hits, range(0))
    parent = hits[-1] if hits else None
    for token in tokens[len(hits) :]:
        page = table.allocate("float")
        parent = table.publish(parent, (token,), page)
        assert parent is not None
        assert parent.page is not None
        pages.append(parent.page)
    table.release(pages)


def known(table: PageTable, tokens: list[int]) -> int:
    return len(table.match([*tokens, -1]))


def test_digests_are_chained_xxh3_over_salt_and_tokens() -> None:
    cache = PrefixCache(2, salt=b"model")
    first, second = store(cache, [1, 2, 3, 4], 0)
    root = xxhash.xxh3_128_digest(b"model")
    assert first.digest == xxhash.xxh3_128_digest(root + array("q", [1, 2]).tobytes())
    assert second.digest == xxhash.xxh3_128_digest(first.digest + array("q", [3, 4]).tobytes())
    assert store(PrefixCache(2, salt=b"other"), [1, 2], 0)[0].digest != first.digest


def test_only_full_pages_match_and_one_token_is_left() -> None:
    cache = PrefixCache(4)
    store(cache, list(range(12)), 0)
    assert [len(cache.match(list(range(length)))) for length in (0, 4, 5, 8, 9, 12, 13, 40)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [entry.page for entry in cache.match([0, 1, 2, 3, 4, 5, 6, 99, 8])] == [0]


@pytest.mark.parametrize("constant", [False, True])
def test_c67_equal_second_pages_behind_different_first_ones_are_not_shared(constant: bool) -> None:
    hook = (lambda data: b"same") if constant else xxhash.xxh3_128_digest
    cache = PrefixCache(2, hash_page=hook)
    one = store(cache, [1, 2, 7, 7], 0)
    assert cache.match([3, 4, 7, 7, 0]) == []
    two = store(cache, [3, 4, 7, 7], 2)
    assert cache.match([1, 2, 7, 7, 0]) == one
    assert cache.match([3, 4, 7, 7, 0]) == two
    assert cache.match([7, 7, 7, 7, 0]) == []
    assert [entry.page for entry in cache.match([3, 4, 7, 7, 0])] == [2, 3]


def test_c67_a_prompt_of_exactly_two_pages_leaves_the_second_to_compute() -> None:
    cache = PrefixCache(2, hash_page=lambda data: b"")
    store(cache, [1, 2, 3, 4], 0)
    assert [entry.page for entry in cache.match([1, 2, 3, 4])] == [0]


def test_min_prefix_len_counts_tokens() -> None:
    cache = PrefixCache(4, min_prefix_len=6)
    store(cache, list(range(12)), 0)
    assert cache.match(list(range(5))) == []
    assert len(cache.match(list(range(9)))) == 2


def test_removing_takes_along_what_hangs_below() -> None:
    cache = PrefixCache(1)
    chain = store(cache, [1, 2, 3], 0)
    branch = cache.insert(chain[0], (9,), 3)
    gone = cache.remove(chain[1])
    assert gone == [chain[2], chain[1]]
    assert cache.match([1, 9, 0]) == [chain[0], branch]
    assert cache.match([1, 2, 3, 0]) == [chain[0]]
    assert set(cache.remove(chain[0])) == {chain[0], branch}
    assert cache.entries == 0
    assert cache.stats.evictions == 4


def test_lru_evicts_the_text_used_longest_ago_from_its_end() -> None:
    table = PageTable(sealed=0, floats=6, prefix=PrefixCache(1))
    keep(table, [1, 2, 3])
    keep(table, [4, 5, 6])
    keep(table, [1, 2, 3, 3])  # a hit of three and a fourth, which takes the end of the older text
    assert [known(table, [1, 2, 3, 3]), known(table, [4, 5, 6])] == [4, 2]
    keep(table, [7])
    assert [known(table, [1, 2, 3, 3]), known(table, [4, 5, 6]), known(table, [7])] == [4, 1, 1]


def test_lfu_keeps_the_text_used_most_often() -> None:
    texts = {}
    for eviction in ("lru", "lfu"):
        table = PageTable(sealed=0, floats=6, prefix=PrefixCache(1, eviction=eviction))
        keep(table, [1, 2, 3])
        keep(table, [1, 2, 3, 3])
        for token in range(10, 16):
            keep(table, [token])
        texts[eviction] = known(table, [1, 2, 3])
    # Six single pages came after it: all room there is under lru; under lfu the three pages that were hit once stay.
    assert texts == {"lru": 0, "lfu": 3}


def test_stats_count_what_was_asked_and_given() -> None:
    table = PageTable(sealed=0, floats=8, prefix=PrefixCache(1))
    keep(table, [1, 2, 3])
    keep(table, [1, 2, 4, 5])
    assert table.prefix is not None
    stats = table.prefix.stats
    assert (stats.queries, stats.tokens_asked, stats.tokens_hit, stats.pages_saved, stats.evictions) == (2, 7, 2, 2, 0)
    assert stats.hit_rate == pytest.approx(2 / 7)
    assert PrefixCache(1).stats.hit_rate == 0.0


def test_a_hit_survives_that_bringing_back_its_pages_needs_room() -> None:
    """Pages of one hit lie in the pool and outside; making room for the latter must not push out the former."""
    table = PageTable(sealed=0, floats=3, prefix=PrefixCache(1), outside=Outside(3, sealed_bytes=1, float_bytes=1))
    keep(table, [1, 2, 3])
    keep(table, [7, 8])  # 3 and 2 go outside
    assert known(table, [1, 2, 3]) == 3
    hits = table.match([1, 2, 3, 0])
    assert [entry.page is None for entry in hits] == [False, True, True]
    pages = table.take(hits, range(0))
    assert sorted(pages) == [0, 1, 2]
    assert [entry.page for entry in hits] == pages
    assert [move.kind for move in table.take_moves()].count("in") == 2


def test_settings_are_checked() -> None:
    with pytest.raises(UsageError, match="min_prefix_len -1"):
        PrefixCache(16, min_prefix_len=-1)
    with pytest.raises(UsageError, match="unknown eviction 'fifo'; known are lru, lfu"):
        PrefixCache(16, eviction="fifo")
