"""The knapsack against enumeration of every mix."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_llm_quant.errors import UsageError
from cann_llm_quant.quant import allocation
from cann_llm_quant.quant.allocation import allocate

Instance = tuple[list[list[float]], list[list[int]], int]


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    step = draw(st.sampled_from([1, 7, 64]))
    damage = [[draw(st.integers(0, 50)) / 8 for _ in range(n)] for n in counts]
    bits = [[draw(st.integers(1, 40)) * step for _ in range(n)] for n in counts]
    least = sum(min(row) for row in bits)
    return damage, bits, least + draw(st.integers(0, 60 * step))


def best_by_enumeration(damage: list[list[float]], bits: list[list[int]], budget: int) -> float:
    mixes = itertools.product(*(range(len(row)) for row in bits))
    return min(
        sum(row[c] for row, c in zip(damage, mix, strict=True))
        for mix in mixes
        if sum(row[c] for row, c in zip(bits, mix, strict=True)) <= budget
    )


def cost(table: list[list[float]] | list[list[int]], mix: list[int]) -> float:
    return sum(row[c] for row, c in zip(table, mix, strict=True))


@settings(max_examples=60, deadline=None)
@given(instances())
def test_the_mix_is_the_best_of_all_that_fit(instance: Instance) -> None:
    damage, bits, budget = instance
    mix = allocate(damage, bits, budget)
    assert cost(bits, mix) <= budget
    assert cost(damage, mix) == best_by_enumeration(damage, bits, budget)


def test_a_coarse_grid_of_sums_keeps_the_budget_and_little_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(0)
    bits = [[source.randrange(1000, 9000) for _ in range(5)] for _ in range(40)]
    damage = [[1e6 / b * source.uniform(0.5, 2) for b in row] for row in bits]
    budget = 40 * 4000
    exact = allocate(damage, bits, budget)
    monkeypatch.setattr(allocation, "MAX_STATES", 2000)
    coarse = allocate(damage, bits, budget)
    assert cost(bits, coarse) <= budget
    assert cost(damage, exact) <= cost(damage, coarse) <= 1.01 * cost(damage, exact)


def test_hand_calculated_mix() -> None:
    # 10 bits to spend beyond 3 + 3 + 3: the second unit's upgrade saves most, then the first's; the third stays.
    damage = [[8.0, 2.0], [20.0, 1.0], [3.0, 0.5]]
    bits = [[3, 8], [3, 8], [3, 8]]
    assert allocate(damage, bits, 19) == [1, 1, 0]
    assert allocate(damage, bits, 14) == [0, 1, 0]
    assert allocate(damage, bits, 13) == [0, 0, 0]


def test_of_equal_damages_fewer_bits_are_taken() -> None:
    assert allocate([[1.0, 1.0]], [[8, 4]], 100) == [1]


def test_no_units_and_no_choice() -> None:
    assert allocate([], [], 10) == []
    assert allocate([[0.5]], [[4]], 4) == [0]


def test_a_budget_below_the_smallest_mix_is_refused() -> None:
    with pytest.raises(UsageError, match="smallest mix takes 7 bits, more than the 6"):
        allocate([[1.0, 0.1], [1.0]], [[3, 8], [4]], 6)
