"""Requests that share the engine: whoever else runs, each gets what it gets alone, and every page comes back."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import CONFIGS, save_tiny
from transformers import AutoModelForCausalLM

from cann_llm_quant.errors import CannQuantError, NonFiniteResultError, OverloadedError, RequestError, UsageError
from cann_llm_quant.quant.kv import KvPlan, KvScales, KvScheme, LayerKv
from cann_llm_quant.runner.engine import LLMEngine

NO_SCALES = KvScales(None, None, None, None)


def dynamic_plan(layers: int = 2, **classes: object) -> KvPlan:
    """int8 keys by channel and values by token."""
    layer = LayerKv(
        KvScheme("int8", strategy="channel", dynamic=True), KvScheme("int8", strategy="token", dynamic=True)
    )
    return KvPlan((layer,) * layers, (NO_SCALES,) * layers, **classes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama"), dtype=torch.float32)


def prompts(count: int, seed: int, shared: int = 0, longest: int = 60) -> list[list[int]]:
    source = random.Random(seed)
    prefix = [source.randrange(3, 128) for _ in range(shared)]
    return [prefix + [source.randrange(3, 128) for _ in range(source.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_five_prompts_at_once_equal_transformers_token_for_token(family: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, family, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    engine = LLMEngine(folder, max_batch_tokens=24, prefix_cache=False)
    asked = prompts(5, seed=3, longest=40)
    handles = [engine.submit(prompt, 16, ignore_eos=True) for prompt in asked]
    for prompt, handle in zip(asked, handles, strict=True):
        ids = torch.tensor([prompt])
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        assert list(handle.result().token_ids) == theirs[0, len(prompt) :].tolist()


SETTINGS = [
    {},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 0.7, "seed": 2},
    {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3, "logprobs": 2},
]


@pytest.mark.parametrize("plan", [None, dynamic_plan(), dynamic_plan(sink_tokens=4, sensitive=frozenset({5, 6, 7}))])
@pytest.mark.parametrize("shuffled", [False, True])
def test_c68_a_request_gets_what_it_gets_alone(folder: Path, plan: KvPlan | None, shuffled: bool) -> None:
    """Whatever runs beside it, in whatever order, with or without a hit of the prefix cache."""
    asked = [(prompt, SETTINGS[i % 4]) for i, prompt in enumerate(prompts(8, seed=1, shared=40))]
    alone = [
        LLMEngine(folder, kv_cache=plan, prefix_cache=False, max_batch_tokens=512).generate(prompt, 12, **settings)
        for prompt, settings in asked
    ]
    order = list(range(8))
    if shuffled:
        random.Random(5).shuffle(order)
    with LLMEngine(folder, kv_cache=plan, max_batch_size=4, max_batch_tokens=20) as engine:
        handles = {i: engine.submit(asked[i][0], 12, **asked[i][1]) for i in order}
        together = [handles[i].result() for i in range(8)]
        hits = engine.stats().prefix
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    for one, other in zip(together, alone, strict=True):
        assert one.text == other.text
        if one.logprobs is not None and other.logprobs is not None:
            ours, theirs = ([each.logprob for each in made.logprobs] for made in (one, other))
            assert ours == pytest.approx(theirs, abs=1e-4)
    assert hits is not None
    assert hits.tokens_hit > 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_preempted_request_goes_on_as_if_nothing_had_been(folder: Path, preemption: str) -> None:
    asked = prompts(6, seed=2, longest=50)
    alone = [LLMEngine(folder).generate(prompt, 40, ignore_eos=True).token_ids for prompt in asked]
    room = 1 << 20 if preemption == "swap" else 0
    options: dict[str, Any] = {"kv_pages": 14, "prefix_cache": False, "host_offload": room}
    with LLMEngine(folder, preemption=preemption, **options) as engine:
        together = [each.result().token_ids for each in [engine.submit(p, 40, ignore_eos=True) for p in asked]]
        assert engine.stats().preemptions > 0
    assert together == alone


@pytest.mark.parametrize("plan", [None, dynamic_plan(recent_tokens=16)])
def test_c66_two_hundred_mixed_requests_leave_no_page_behind(folder: Path, plan: KvPlan | None) -> None:
    source = random.Random(4)
    with LLMEngine(folder, kv_cache=plan, max_batch_size=12, kv_pages=60) as engine:
        handles = []
        for prompt in prompts(200, seed=6, shared=40):
            fate = source.random()
            handle = engine.submit(prompt, 1 if fate < 0.2 else source.randint(2, 10), ignore_eos=fate < 0.6)
            handles.append(handle)
            if fate > 0.8:
                handle.cancel()
            elif fate > 0.7:
                next(iter(handle))
        answers = [handle.result() for i, handle in enumerate(handles) if not _left(handle)]
        assert {"length", "cancelled"} <= {answer.finish_reason for answer in answers}
        engine.close()
        pages = engine.stats().pages
        assert pages.referenced == 0
        assert pages.free + pages.cached == pages.total
        batch = engine._service._batch
        batch.table.clear_cache()
        assert batch.table.stats().free == pages.total


def _left(handle) -> bool:  # type: ignore[no-untyped-def]
    """Whether its caller went away after the first chunk."""
    return handle._ended and not handle._items


def test_ten_equal_prompts_hold_one_copy_of_their_full_pages(folder: Path) -> None:
    prompt = prompts(1, seed=7, shared=64, longest=1)[0]  # four full pages and one token
    with LLMEngine(folder, max_batch_size=10, gather_ms=50) as engine:
        handles = [engine.submit(prompt, 100, ignore_eos=True) for _ in range(10)]
        chunks = [iter(handle) for handle in handles]
        for _ in range(3):
            for each in chunks:
                next(each)
        pages = engine.stats().pages
        # The shared prompt once; each answer its own page or, when that is full, pages.
        held_alone = pages.held - pages.referenced
        assert held_alone == 9 * 4
        assert sum(handle.cached_tokens for handle in handles) == 9 * 64
        for handle in handles:
            handle.cancel()


def test_memory_stops_growing_under_a_window_with_global_first_tokens(folder: Path) -> None:
    with LLMEngine(folder, attention_pattern="local_window_32+global_first_last", prefix_cache=False) as engine:
        held = []
        for i, _ in enumerate(engine.stream([5] * 20, 200, ignore_eos=True)):
            if i % 10 == 0:
                held.append(engine.stats().pages.referenced)
    assert max(held) <= 4  # the first page, and those of 32 tokens wherever they begin
    assert held[-5:] == [4] * 5 or max(held[-5:]) <= 4


def test_the_pattern_equals_dense_attention_under_the_same_mask(folder: Path) -> None:
    """transformers with an explicit mask: key j for query i iff j <= i and (j < 4 or j > i - 32)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    prompt = prompts(1, seed=8, shared=50)[0]
    with LLMEngine(folder, attention_pattern="local_window_32+global_first_last", max_batch_tokens=48) as engine:
        ours = engine.generate(prompt, 60, ignore_eos=True).token_ids
    ids = torch.tensor([[*prompt, *ours]])
    i, j = torch.arange(ids.shape[1])[:, None], torch.arange(ids.shape[1])
    seen = (j <= i) & ((j < 4) | (j > i - 32))
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        theirs = model(ids, attention_mask=mask).logits[0].argmax(-1)
    assert theirs[len(prompt) - 1 : -1].tolist() == list(ours)


def test_engines_of_one_model_share_its_weights(folder: Path) -> None:
    first, second = LLMEngine(folder), LLMEngine(folder, kv_cache=dynamic_plan())
    assert first.model is second.model
    assert LLMEngine(folder, dtype="bf16").model is not first.model


def test_requests_in_an_event_loop(folder: Path) -> None:
    async def main() -> None:
        with LLMEngine(folder) as engine:
            asked = prompts(4, seed=9)
            answers = await asyncio.gather(*(engine.generate_async(p, 8, ignore_eos=True) for p in asked))
            assert [a.token_ids for a in answers] == [engine.generate(p, 8, ignore_eos=True).token_ids for p in asked]
            seen = [chunk async for chunk in engine.stream_async(asked[0], 8, ignore_eos=True)]
            assert [chunk.token_id for chunk in seen] == list(answers[0].token_ids)
            task = asyncio.create_task(engine.generate_async(asked[1], 150, ignore_eos=True))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while engine.stats().pages.referenced:  # given back when the step that was under way ends
                await asyncio.sleep(0.001)

    asyncio.run(main())


def test_a_cancelled_answer_says_so_and_keeps_what_it_has(folder: Path) -> None:
    with LLMEngine(folder) as engine:
        handle = engine.submit([3, 4, 5], 200, ignore_eos=True)
        chunks = iter(handle)
        first = next(chunks)
        handle.cancel()
        rest = list(chunks)
    assert first.token_id is not None
    assert rest[-1].finish_reason == "cancelled"
    assert rest[-1].token_id is None


def test_what_cannot_be_computed_is_refused_and_the_others_go_on(folder: Path) -> None:
    with LLMEngine(folder, kv_pages=4, max_waiting=2) as engine:
        with pytest.raises(RequestError, match="kv_pages") as caught:
            engine.submit([3] * 60, 10)
        assert caught.value.field == "max_new_tokens"
        running = engine.submit([3] * 10, 50, ignore_eos=True)
        next(iter_once := iter(running))
        queue = [engine.submit([4] * 40, 20, ignore_eos=True) for _ in range(2)]
        with pytest.raises(OverloadedError, match="waiting already"):
            engine.submit([5], 2)
        assert len(list(iter_once)) == 49
        assert all(handle.result().finish_reason == "length" for handle in queue)
    with pytest.raises(OverloadedError, match="shutting down"):
        engine.submit([5], 2)


def test_a_request_whose_logits_are_not_numbers_ends_alone(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, dtype=torch.float32)
    engine = LLMEngine(folder)
    assert isinstance(engine.model.embedding, torch.Tensor)
    engine.model.embedding[9] = float("nan")
    with engine:
        bad, good = engine.submit([3, 9], 5), engine.submit([3, 4], 5, ignore_eos=True)
        with pytest.raises(NonFiniteResultError):
            bad.result()
        assert len(good.result().token_ids) == 5
        assert engine.stats().pages.referenced == 0


def test_a_step_that_cannot_be_computed_ends_its_requests_and_not_the_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLMEngine(folder) as engine:
        with monkeypatch.context() as broken:
            broken.setattr(engine.model, "hidden", lambda *_, **__: 1 / 0)
            with pytest.raises(CannQuantError, match="ZeroDivisionError"):
                engine.generate([3, 4], 5)
        assert len(engine.generate([3, 4], 5, ignore_eos=True).token_ids) == 5
        assert engine.stats().pages.referenced == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 24}, "page_size 24"),
        ({"kv_pages": 0}, "kv_pages 0"),
        ({"memory_budget": 1000}, "memory_budget"),
        ({"preemption": "swap"}, "room outside"),
        ({"attention_pattern": "local"}, "attention pattern 'local'"),
        ({"attention_pattern": "local_window_0"}, "attention pattern"),
        ({"attention_pattern": "local_window_" + "9" * 25}, "attention pattern"),
        ({"max_batch_tokens": 4}, "max_batch_tokens"),
        ({"pages": 3}, "unknown engine options pages"),
    ],
)
def test_options_that_cannot_be_are_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LLMEngine(folder, **options)
