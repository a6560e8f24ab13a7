"""The policy against its definition, query by query."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_llm_quant.errors import UsageError
from cann_llm_quant.runner.page_policy import Need, PagePolicy
from cann_llm_quant.runner.spans import Pattern

patterns = st.one_of(st.none(), st.builds(Pattern, window=st.integers(1, 20), first=st.integers(0, 10)))
policies = st.builds(
    PagePolicy,
    page_size=st.sampled_from([1, 2, 4]),
    recent_tokens=st.integers(0, 9),
    sink_tokens=st.integers(0, 5),
    sensitive=st.sampled_from([frozenset(), frozenset({3})]),
    quantizes=st.booleans(),
    pattern=patterns,
)
texts = st.lists(st.integers(0, 5), min_size=1, max_size=40)


def test_the_definition_by_hand() -> None:
    policy = PagePolicy(16, recent_tokens=20, sink_tokens=4, sensitive=frozenset({9}), quantizes=True)
    tokens = [0] * 50 + [9] + [0] * 60
    assert policy.recent_pages == 2
    assert policy.settled(96) == 4
    assert policy.kinds(tokens, 0, 100) == ["float", "sealed", "sealed", "float", "float", "float", "float"]
    assert policy.kinds(tokens, 2, 111) == ["sealed", "float", "float", "float", "float"]
    assert policy.kinds(tokens, 2, 112) == ["sealed", "float", "sealed", "float", "float"]
    assert PagePolicy(16, recent_tokens=20, sink_tokens=4).kinds(tokens, 0, 33) == ["float"] * 3


@settings(max_examples=200, deadline=None)
@given(policy=policies, tokens=texts)
def test_a_query_reads_the_forms_that_the_contract_names(policy: PagePolicy, tokens: list[int]) -> None:
    """Sealed iff q < b - r and not protected, b the page of the query that comes next."""
    size, end = policy.page_size, len(tokens)
    recent = -(-policy.recent_tokens // size)
    for page, kind in enumerate(policy.kinds(tokens, 0, end)):
        part = tokens[page * size : (page + 1) * size]
        protected = page * size < policy.sink_tokens or any(token in policy.sensitive for token in part)
        sealed = policy.quantizes and page < end // size - recent and not protected
        assert kind == ("sealed" if sealed else "float")


@settings(max_examples=200, deadline=None)
@given(policy=policies, start=st.integers(0, 60))
def test_pages_are_dropped_exactly_when_no_later_query_sees_them(policy: PagePolicy, start: int) -> None:
    size, pattern = policy.page_size, policy.pattern

    def is_seen(page: int) -> bool:
        keys = range(page * size, (page + 1) * size)
        queries = range(start, start + size + 60)
        return pattern is None or any(
            key <= query and (key < pattern.first or key > query - pattern.window) for key in keys for query in queries
        )

    dropped = policy.dropped(start)
    assert [page in dropped for page in range(start // size + 1)] == [
        not is_seen(page) for page in range(start // size + 1)
    ]


@settings(max_examples=200, deadline=None)
@given(policy=policies, tokens=texts)
def test_the_peak_is_that_of_a_run_token_by_token(policy: PagePolicy, tokens: list[int]) -> None:
    """Pages held while a token is computed: those before and those after it, each counted once."""
    sealed = floats = 0
    before: dict[int, str] = {}
    for start in range(len(tokens)):
        dropped = policy.dropped(start)
        before = {page: kind for page, kind in before.items() if page not in dropped}
        kinds = enumerate(policy.kinds(tokens, 0, start + 1))
        after = {page: kind for page, kind in kinds if page not in dropped}
        held = set(before.items()) | set(after.items())
        sealed = max(sealed, sum(kind == "sealed" for _, kind in held))
        floats = max(floats, sum(kind == "float" for _, kind in held))
        before = after
    peak = policy.peak(tokens, len(tokens))
    assert Need(sealed, floats).within(peak)
    if policy.pattern is None:
        assert peak.sealed == sealed
        assert floats <= peak.floats <= floats + 1


def test_needs_add_up_and_compare_by_kind() -> None:
    assert Need.of(["sealed", "float", "float"]) + Need(1, 0) == Need(2, 2)
    assert Need(2, 2).within(Need(2, 2))
    assert not Need(2, 2).within(Need(9, 1))
    assert not Need(2, 2).within(Need(1, 9))


def test_settings_are_checked() -> None:
    with pytest.raises(UsageError, match="page size 0"):
        PagePolicy(0)
    with pytest.raises(UsageError, match="recent_tokens -1"):
        PagePolicy(16, recent_tokens=-1)
    with pytest.raises(UsageError, match="window"):
        PagePolicy(16, pattern=Pattern(window=0, first=0))
