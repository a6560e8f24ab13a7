"""Jobs of several threads: their results come in order, errors in their turn, and not too many are begun."""

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_llm_quant.export import in_order as module
from cann_llm_quant.export.in_order import Job, in_order, one_thread_each


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2, "whoever asked for jobs has torch's threads back"
    torch.set_num_threads(before)


def number(n: int, size: int = 1) -> Job[int]:
    return Job(size, lambda: n)


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 200 << 20), max_size=20))
def test_results_come_in_order(sizes: list[int]) -> None:
    with in_order(number(n, size) for n, size in enumerate(sizes)) as made:
        assert list(made) == list(range(len(sizes)))


def test_two_run_at_once_each_with_one_of_torchs_threads() -> None:
    meeting = threading.Barrier(2, timeout=60)

    def meet() -> int:
        meeting.wait()
        return torch.get_num_threads()

    with in_order([Job(1, meet), Job(1, meet)]) as made:
        assert list(made) == [1, 1]


def test_an_error_comes_in_its_turn_and_what_is_behind_it_is_not_begun() -> None:
    begun: list[int] = []

    def job(n: int) -> Job[int]:
        def make() -> int:
            begun.append(n)
            return 1 // (1 - n)

        return Job(module._AHEAD_BYTES, make)

    with in_order(job(n) for n in range(10)) as made:
        assert next(made) == 1
        with pytest.raises(ZeroDivisionError):
            next(made)
    assert max(begun) <= 3


@pytest.mark.parametrize(("size", "ahead"), [(1 << 40, 2), (module._AHEAD_BYTES // 5, 5)])
def test_no_more_is_begun_than_may_wait(size: int, ahead: int) -> None:
    """Two of any size; of smaller ones as many as fit. One more is asked for to know its size."""
    asked: list[int] = []

    def jobs() -> Iterator[Job[int]]:
        for n in range(50):
            asked.append(n)
            yield number(n, size)

    with in_order(jobs()) as made:
        for n in made:
            assert len(asked) - (n + 1) <= ahead
    assert len(asked) == 50


def test_one_who_stops_asking_leaves_nothing_behind() -> None:
    before = threading.active_count()
    with in_order(number(n) for n in range(100)) as made:
        next(made)
    assert threading.active_count() == before


def test_exports_that_overlap_have_and_leave_torchs_threads_as_before_the_first() -> None:
    """The second begins while the first holds the setting and ends after it: what it found is no number to restore."""
    begun, first_ended = threading.Event(), threading.Event()
    had: list[int] = []

    def second() -> None:
        with one_thread_each() as threads:
            had.append(threads)
            begun.set()
            first_ended.wait(60)
        had.append(torch.get_num_threads())

    other = threading.Thread(target=second)
    with one_thread_each():
        other.start()
        assert begun.wait(60)
    first_ended.set()
    other.join()
    assert had == [2, 2]
    found: list[int] = []
    late = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    late.start()
    late.join()
    assert found == [2]
