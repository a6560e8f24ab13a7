"""The scheduler, driven by a simulated model whose text shows every wrong page."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_pages import SimulatedEngine, generate_alone

from cann_llm_quant.errors import OverloadedError, RequestError, UsageError
from cann_llm_quant.runner.page_policy import PagePolicy
from cann_llm_quant.runner.page_table import Outside, PageTable
from cann_llm_quant.runner.prefix_cache import PrefixCache
from cann_llm_quant.runner.scheduler import Limits, Scheduler
from cann_llm_quant.runner.sequence import Sequence, State
from cann_llm_quant.runner.spans import Pattern


def make(
    *,
    floats: int = 64,
    sealed: int = 0,
    policy: PagePolicy | None = None,
    cache: bool = True,
    min_prefix_len: int = 0,
    eviction: str = "lru",
    outside: int = 0,
    **limits: object,
) -> SimulatedEngine:
    policy = policy or PagePolicy(16)
    prefix = PrefixCache(policy.page_size, min_prefix_len=min_prefix_len, eviction=eviction) if cache else None  # type: ignore[arg-type]
    table = PageTable(
        sealed=sealed, floats=floats, prefix=prefix, outside=Outside(outside, sealed_bytes=10, float_bytes=20)
    )
    return SimulatedEngine(Scheduler(Limits(**limits), table, policy))  # type: ignore[arg-type]


def text(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(97) for _ in range(length))


def check_texts(engine: SimulatedEngine, sequences: list[Sequence]) -> None:
    for each in sequences:
        expected = generate_alone(each.prompt, each.max_new_tokens, engine.scheduler.policy.pattern)
        assert engine.texts[each.id] == expected


@pytest.mark.parametrize(
    ("preemption", "eviction", "quantizes"),
    [("recompute", "lfu", False), ("swap", "lru", True)],
)
def test_c66_two_hundred_mixed_requests_leave_no_page_behind(preemption: str, eviction: str, quantizes: bool) -> None:
    rng = random.Random(66)
    shared = text(1, 40)
    engine = make(
        floats=12,
        sealed=12 if quantizes else 0,
        policy=PagePolicy(16, quantizes=quantizes, recent_tokens=16 if quantizes else 0),
        eviction=eviction,
        outside=900,
        max_batch_size=16,
        max_batch_tokens=48,
        preemption=preemption,
    )
    scheduler = engine.scheduler
    sequences = [
        Sequence(number, shared + text(number + 2, rng.randint(1, 60)), rng.choice([1, 1, 1, 60]), number / 80)
        for number in range(200)
    ]
    coming, cancelled, now = list(sequences), set(), 0.0
    while coming or scheduler.running or scheduler.waiting:
        while coming and coming[0].arrival <= now:
            scheduler.add(coming.pop(0))
        step = scheduler.schedule(now)
        if rng.random() < 0.04 and step.work:
            # In the middle of a step, one that takes part in it and one that does not (perhaps).
            for each in (rng.choice(step.work).sequence, rng.choice(sequences)):
                if scheduler.abort(each.id):
                    cancelled.add(each.id)
        engine.compute(step)
        engine.end(step)
        usage = scheduler.table.stats().referenced / scheduler.table.stats().total
        assert 0 <= usage <= 1
        now += 0.05
    assert len(cancelled) > 10
    assert scheduler.preemptions > 2
    check_texts(engine, [each for each in sequences if each.id not in cancelled])
    assert all(each.state is State.FINISHED and not each.block_table for each in sequences)
    assert scheduler.table.prefix is not None
    assert scheduler.table.prefix.stats.tokens_hit > 100 * 32
    engine.check_empty()


def test_ten_equal_prompts_hold_one_copy_of_their_full_pages_and_compute_them_once() -> None:
    engine = make()
    prompt = text(3, 100)  # 6 full pages and 4 tokens
    engine.add(*(Sequence(number, prompt, 5) for number in range(10)))
    most = 0
    while engine.scheduler.running or engine.scheduler.waiting:
        engine.step()
        most = max(most, engine.scheduler.table.stats().referenced)
    assert most == 6 + 10
    computed = sum(count for step in engine.history for _, start, count in step if start < 96)
    assert computed == 100  # the first computes 100 tokens, each other only those behind the full pages
    assert set(engine.texts.values()) == {generate_alone(prompt, 5)}
    engine.check_empty()


def test_equal_pages_of_output_are_merged_when_they_are_full() -> None:
    engine = make()
    prompt = text(3, 30)
    engine.add(*(Sequence(number, prompt, 40) for number in range(4)))
    while len(engine.scheduler.running) < 4 or engine.scheduler.running[-1].computed < 66:
        engine.step()
    stats = engine.scheduler.table.stats()
    assert stats.held == 4 * 5
    assert stats.referenced == 4 + 4  # four full pages (one of them prompt alone), and the one that each fills
    assert stats.saved == 12
    engine.run()
    engine.check_empty()


def test_hit_rate_counts_every_admission() -> None:
    engine = make()
    engine.add(*(Sequence(number, text(3, 100), 1) for number in range(10)))
    engine.run()
    prefix = engine.scheduler.table.prefix
    assert prefix is not None
    assert (prefix.stats.queries, prefix.stats.tokens_asked, prefix.stats.tokens_hit) == (10, 1000, 9 * 96)
    assert prefix.stats.hit_rate == pytest.approx(0.864)
    assert prefix.stats.pages_saved == 54


def test_c67_a_prompt_of_two_full_pages_sent_twice_computes_at_least_one_token_again() -> None:
    engine = make()
    prompt = text(4, 32)
    engine.add(Sequence(0, prompt, 3))
    engine.run()
    engine.history.clear()
    engine.add(Sequence(1, prompt, 3))
    engine.run()
    assert engine.history[0] == [(1, 16, 16)]
    assert engine.texts[1] == engine.texts[0] == generate_alone(prompt, 3)


def test_c68_a_sequence_that_shares_nothing_computes_its_whole_prompt() -> None:
    engine = make()
    prompt = text(4, 50)
    engine.add(Sequence(0, prompt, 1))
    engine.run()
    engine.history.clear()
    engine.add(Sequence(1, prompt, 1, share_prefix=False))
    engine.run()
    assert engine.history[0] == [(1, 0, 50)]


def test_a_hit_shorter_than_min_prefix_len_is_not_used() -> None:
    for length, start in ((64, 0), (80, 64)):
        engine = make(min_prefix_len=64)
        engine.add(Sequence(0, text(5, length), 1))
        engine.run()
        engine.history.clear()
        engine.add(Sequence(1, text(5, length), 1))
        engine.run()
        assert engine.history[0][0][1] == start


def test_a_long_prompt_does_not_block_decodes_or_a_short_prompt() -> None:
    engine = make(max_batch_tokens=32)
    engine.add(Sequence(0, text(1, 10), 40))
    engine.step()
    engine.add(Sequence(1, text(2, 300), 1, arrival=1.0), Sequence(2, text(3, 20), 4, arrival=2.0))
    for _ in range(4):
        engine.step(3.0)
    for step in engine.history[1:]:
        assert step[0][0] == 0  # one token of the decoding sequence in every step
        assert sum(count for _, _, count in step) == 32
    assert engine.history[1][1:] == [(1, 0, 31)]
    assert engine.history[2][1:] == [(2, 0, 20), (1, 31, 11)]  # its turn, and what is left for the long one
    engine.run()
    assert engine.texts[2] == generate_alone(text(3, 20), 4)


def test_long_prompts_take_turns_in_the_order_of_arrival() -> None:
    engine = make(max_batch_tokens=32)
    engine.add(*(Sequence(number, text(number, 128), 1, arrival=float(number)) for number in range(3)))
    for _ in range(7):
        engine.step(9.0)
    assert [[each[0] for each in step] for step in engine.history] == [[0], [1], [2], [0], [1], [2], [0]]


def test_a_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    engine = make(max_batch_tokens=16, max_batch_size=4)
    engine.add(Sequence(0, text(0, 160), 1))
    number = 1
    while 0 not in engine.texts:
        engine.add(Sequence(number, text(number, 16), 1, arrival=float(number)))
        engine.step(float(number))
        number += 1
        assert number < 10 * 5
    engine.run()


def test_full_batches_of_decodes_leave_a_token_for_the_prompt() -> None:
    engine = make(max_batch_size=4, max_batch_tokens=4)
    engine.add(*(Sequence(number, text(number, 3), 40) for number in range(3)), Sequence(3, text(3, 30), 2))
    engine.run()
    check_texts(engine, [Sequence(3, text(3, 30), 2)])


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_the_youngest_is_preempted_and_goes_on_where_it_was(preemption: str) -> None:
    engine = make(floats=6, outside=1000, preemption=preemption, cache=False)
    sequences = [Sequence(number, text(number, 20), 40, arrival=float(number)) for number in range(2)]
    engine.add(*sequences)
    while not engine.scheduler.preemptions:
        engine.step(9.0)
    assert [each.id for each in engine.scheduler.waiting] == [1]
    victim = sequences[1]
    assert victim.state is (State.SWAPPED if preemption == "swap" else State.WAITING)
    assert (victim.computed > 0) == (preemption == "swap")
    done = len(victim.tokens)
    engine.history.clear()
    engine.run()
    begin = next(entry for step in engine.history for entry in step if entry[0] == 1)
    assert begin == ((1, done - 1, 1) if preemption == "swap" else (1, 0, done))
    check_texts(engine, sequences)
    engine.check_empty()


def test_swapping_without_room_outside_recomputes() -> None:
    engine = make(floats=6, outside=0, preemption="swap", cache=False)
    sequences = [Sequence(number, text(number, 20), 40) for number in range(2)]
    engine.add(*sequences)
    engine.run()
    assert engine.scheduler.preemptions
    check_texts(engine, sequences)


def test_a_swapped_sequence_takes_what_is_still_cached_and_brings_back_the_rest() -> None:
    engine = make(floats=9, outside=1000, preemption="swap")
    sequences = [Sequence(number, text(7, 40) + text(number, 8), 50, arrival=float(number)) for number in range(2)]
    engine.add(*sequences)
    engine.run()
    assert engine.scheduler.preemptions
    check_texts(engine, sequences)
    engine.check_empty()


def test_prompts_that_wait_for_each_others_pages_do_not_lock() -> None:
    engine = make(floats=8, cache=False, max_batch_tokens=16, max_batch_size=4)
    sequences = [Sequence(number, text(number, 100), 20, arrival=float(number)) for number in range(4)]
    engine.add(*sequences)
    engine.run()
    check_texts(engine, sequences)
    engine.check_empty()


def test_an_evicted_page_is_offloaded_and_a_hit_brings_it_back() -> None:
    engine = make(floats=6, outside=200)
    engine.add(Sequence(0, text(0, 70), 2))
    engine.run()
    engine.add(Sequence(1, text(1, 70), 2))
    engine.run()
    assert engine.scheduler.table.stats().outside_bytes > 0
    engine.history.clear()
    engine.add(Sequence(2, text(0, 70), 2))
    engine.run()
    assert engine.history[0] == [(2, 64, 6)]
    assert engine.texts[2] == engine.texts[0]
    engine.check_empty()


def test_what_can_never_fit_is_refused_by_the_option_to_raise() -> None:
    scheduler = make(floats=4, max_context=100).scheduler
    with pytest.raises(
        RequestError, match=r"90 prompt tokens and 20 new ones exceed the context of 100.*raise max_cont"
    ) as e:
        scheduler.add(Sequence(0, text(0, 90), 20))
    assert e.value.field == "max_new_tokens"
    with pytest.raises(RequestError, match="max_context") as e:
        scheduler.add(Sequence(0, text(0, 100), 1))
    assert e.value.field == "prompt"
    with pytest.raises(RequestError, match=r"need 5 float pages of 16 tokens and there are 4.*raise kv_pages") as e:
        scheduler.add(Sequence(0, text(0, 60), 6))
    assert e.value.field == "max_new_tokens"
    with pytest.raises(RequestError, match="kv_pages") as e:
        scheduler.add(Sequence(0, text(0, 65), 1))
    assert e.value.field == "prompt"
    scheduler.add(Sequence(0, text(0, 60), 5))  # the last new token is never stored: 64 positions
    with pytest.raises(RequestError, match="no tokens"):
        scheduler.add(Sequence(1, (), 5))
    with pytest.raises(RequestError, match="at least 1"):
        scheduler.add(Sequence(1, (1,), 0))
    assert [each.id for each in scheduler.waiting] == [0]


@pytest.mark.parametrize(("sealed", "floats", "kind"), [(2, 9, "sealed"), (9, 1, "float")])
def test_each_kind_of_page_is_checked(sealed: int, floats: int, kind: str) -> None:
    policy = PagePolicy(16, quantizes=True, recent_tokens=20)
    scheduler = make(sealed=sealed, floats=floats, policy=policy).scheduler
    with pytest.raises(RequestError, match=f"3 {kind} pages"):
        scheduler.add(Sequence(0, text(0, 80), 2))


def test_the_queue_has_an_end() -> None:
    scheduler = make(max_waiting=2).scheduler
    scheduler.add(Sequence(0, (1,), 1))
    scheduler.add(Sequence(1, (1,), 1))
    with pytest.raises(OverloadedError, match="max_waiting"):
        scheduler.add(Sequence(2, (1,), 1))


def test_an_idle_engine_gathers_until_its_window_closes_or_the_batch_is_full() -> None:
    engine = make(gather_seconds=0.01, max_batch_size=2)
    engine.add(Sequence(0, (1, 2), 2, arrival=5.0))
    step = engine.step(5.004)
    assert (step.work, step.wake) == ((), pytest.approx(5.01))
    engine.add(Sequence(1, (3, 4), 2, arrival=5.005))
    assert len(engine.step(5.006).work) == 2
    engine.run()
    engine.add(Sequence(2, (1, 2), 2, arrival=6.0))
    assert len(engine.step(6.01).work) == 1
    engine.add(Sequence(3, (5,), 2, arrival=6.011))
    assert len(engine.step(6.011).work) == 2  # nobody waits while the engine works


def test_an_idle_scheduler_has_nothing_to_do() -> None:
    step = make().step()
    assert (step.work, step.moves, step.exhausted, step.wake) == ((), (), (), None)


def test_abort_in_every_state() -> None:
    engine = make(floats=6, outside=1000, preemption="swap", max_batch_size=2, cache=False)
    sequences = [Sequence(number, text(number, 20), 40, arrival=float(number)) for number in range(3)]
    engine.add(*sequences)
    while sequences[1].state is not State.SWAPPED:
        engine.step(9.0)
    assert [each.state for each in sequences] == [State.RUNNING, State.SWAPPED, State.WAITING]
    assert engine.scheduler.abort(2)
    assert engine.scheduler.abort(1)
    step = engine.scheduler.schedule(9.0)
    assert [move.kind for move in step.moves] == ["drop", "drop"] or len(step.moves) > 2
    assert engine.scheduler.abort(0)  # in the middle of its step
    assert not engine.scheduler.abort(0)
    assert not engine.scheduler.abort(77)
    engine.compute(step)
    assert engine.scheduler.table.stats().referenced > 0
    engine.end(step)
    engine.check_empty()


def test_a_step_that_failed_is_taken_back() -> None:
    engine = make(policy=PagePolicy(16, quantizes=True), sealed=8, floats=4)
    sequence, other = Sequence(0, text(0, 40), 5), Sequence(1, text(1, 10), 5)
    engine.add(sequence, other)
    engine.step()
    before = engine.scheduler.table.stats()
    step = engine.scheduler.schedule(0.0)
    engine.scheduler.abort(1)
    engine.scheduler.discard(step)
    assert sequence.computed == 40
    assert engine.scheduler.table.stats().referenced == before.referenced - 1
    engine.run()
    check_texts(engine, [sequence])
    engine.check_empty()


def test_output_that_needs_more_float_pages_than_there_are_ends_exhausted() -> None:
    prompt = text(8, 16)
    sensitive = frozenset(range(97)) - set(prompt)
    engine = make(policy=PagePolicy(16, quantizes=True, sensitive=sensitive), sealed=8, floats=2)
    engine.add(Sequence(0, prompt, 100))
    engine.run()
    assert engine.exhausted == [0]
    engine.check_empty()


def test_a_pattern_holds_a_constant_number_of_pages() -> None:
    pattern = Pattern(window=40, first=4)
    engine = make(floats=5, policy=PagePolicy(16, pattern=pattern), max_batch_tokens=32, cache=False)
    sequence = Sequence(0, text(0, 300), 200)
    engine.add(sequence)
    engine.run()
    check_texts(engine, [sequence])
    engine.check_empty()


def test_limits_are_checked() -> None:
    with pytest.raises(UsageError, match="max_batch_tokens 8 must be at least max_batch_size 16"):
        Limits(max_batch_tokens=8)
    with pytest.raises(UsageError, match="max_context 0"):
        Limits(max_context=0)
    with pytest.raises(UsageError, match="gather_seconds nan"):
        Limits(gather_seconds=float("nan"))
    with pytest.raises(UsageError, match="unknown preemption 'kill'"):
        Limits(preemption="kill")


policies = st.builds(
    PagePolicy,
    page_size=st.sampled_from([1, 4]),
    recent_tokens=st.sampled_from([0, 3, 8]),
    sink_tokens=st.sampled_from([0, 0, 5]),
    sensitive=st.sampled_from([frozenset(), frozenset({0, 1})]),
    quantizes=st.booleans(),
    pattern=st.sampled_from([None, None, Pattern(window=7, first=0), Pattern(window=9, first=5)]),
)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), policy=policies)
def test_any_mixture_gives_each_sequence_the_text_it_gets_alone(data: st.DataObject, policy: PagePolicy) -> None:
    draw = data.draw
    size = policy.page_size
    engine = make(
        policy=policy,
        sealed=draw(st.integers(8, 14)) * (4 // size) if policy.quantizes else 0,
        floats=draw(st.integers(8, 14)) * (4 // size),
        cache=draw(st.booleans()),
        eviction=draw(st.sampled_from(["lru", "lfu"])),
        outside=draw(st.sampled_from([0, 60, 500])),
        min_prefix_len=draw(st.sampled_from([0, 6])),
        max_batch_size=draw(st.integers(1, 5)),
        max_batch_tokens=draw(st.integers(5, 20)),
        preemption=draw(st.sampled_from(["recompute", "swap"])),
    )
    shared = text(1, 9)
    sequences, cancelled = [], set()
    for number in range(draw(st.integers(1, 9))):
        prompt = shared[: draw(st.integers(0, 9))] + text(draw(st.integers(0, 3)), draw(st.integers(1, 9)))
        sequence = Sequence(number, prompt, draw(st.integers(1, 12)), draw(st.sampled_from([0.0, 1.0])))
        sequence.share_prefix = draw(st.sampled_from([True, True, False]))
        engine.add(sequence)
        sequences.append(sequence)
        for _ in range(draw(st.integers(0, 3))):
            step = engine.scheduler.schedule(2.0)
            if draw(st.booleans()) and engine.scheduler.abort(draw(st.integers(0, number))):
                cancelled = {each.id for each in sequences if each.state is State.FINISHED} - set(engine.texts)
            engine.compute(step)
            engine.end(step)
    engine.run(400)
    alive = [each for each in sequences if each.id not in cancelled and each.id not in engine.exhausted]
    check_texts(engine, alive)
    if not policy.sensitive:
        assert not engine.exhausted
    engine.check_empty()


def test_two_runs_plan_the_same_steps() -> None:
    def history() -> list[list[tuple[int, int, int]]]:
        engine = make(floats=20, max_batch_tokens=40, outside=300, preemption="swap")
        engine.add(*(Sequence(n, text(n % 3, 30 + n), 20, arrival=n / 7) for n in range(12)))
        engine.run()
        return engine.history

    assert history() == history()
