"""What goes wrong below a request: it is told, nobody waits forever, and nobody reads what was lost."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_tiny

from cann_llm_quant.errors import CannQuantError, RequestError, UsageError
from cann_llm_quant.runner.engine import LLMEngine
from cann_llm_quant.runner.offload import OffloadStore


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama"), dtype=torch.float32)


PROMPTS = [[(7 * i + start) % 120 + 3 for i in range(60)] for start in range(3)]


@pytest.mark.parametrize("broken", ["put", "take"])
@pytest.mark.parametrize("tier", ["host_offload", "disk_offload"])
def test_pages_lost_on_their_way_are_computed_again(
    folder: Path, broken: str, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLMEngine(folder, prefix_cache=False) as plain:
        alone = [plain.generate(prompt, 8, ignore_eos=True).token_ids for prompt in PROMPTS]
    room: dict[str, Any] = {tier: 10**6}
    with LLMEngine(folder, kv_pages=6, **room) as engine:
        whole = getattr(OffloadStore, broken)
        calls = iter(range(100))

        def failing(store: OffloadStore, *arguments: Any) -> Any:
            if next(calls) == 1:
                raise CannQuantError("the disk is full")
            return whole(store, *arguments)

        monkeypatch.setattr(OffloadStore, broken, failing)
        failures = []
        for number in (0, 1, 0, 1, 2, 0, 1):
            try:
                answer = engine.generate(PROMPTS[number], 8, ignore_eos=True)
            except CannQuantError as error:
                failures.append(str(error))
            else:
                assert answer.token_ids == alone[number]
        assert failures == ["pages could not be moved outside or back: the disk is full"]
        pages = engine.stats().pages
        assert (pages.referenced, pages.free + pages.cached) == (0, pages.total)


def test_others_begin_again_when_pages_are_lost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLMEngine(folder, prefix_cache=False) as plain:
        alone = [plain.generate(prompt, 8, ignore_eos=True).token_ids for prompt in PROMPTS]
    whole, calls = OffloadStore.take, iter(range(100))

    def failing(store: OffloadStore, handle: int) -> Any:
        if next(calls) == 2:
            raise OSError("input/output error")
        return whole(store, handle)

    monkeypatch.setattr(OffloadStore, "take", failing)
    with LLMEngine(folder, kv_pages=9, preemption="swap", host_offload=10**6, prefix_cache=False) as engine:
        handles = [engine.submit(prompt, 8, ignore_eos=True) for prompt in PROMPTS]
        ends = []
        for handle, tokens in zip(handles, alone, strict=True):
            try:
                assert handle.result().token_ids == tokens
                ends.append("right")
            except CannQuantError as error:
                ends.append(str(error))
        assert next(calls) > 2
        assert "right" in ends
        assert "pages could not be moved outside or back: input/output error" in ends
        assert engine.stats().pages.free == 9


def test_a_fault_in_the_bookkeeping_reaches_everybody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LLMEngine(folder, gather_ms=50)
    handles = [engine.submit(prompt, 8) for prompt in PROMPTS]
    monkeypatch.setattr(engine._service._batch, "commit", lambda *_: 1 / 0)
    for handle in handles:
        with pytest.raises(CannQuantError, match=r"made anew.*ZeroDivisionError"):
            handle.result()
    with pytest.raises(CannQuantError, match="made anew"):
        engine.submit(PROMPTS[0], 8)
    handles[0].cancel()
    engine.close()


class ClosingLoop:
    """An event loop that is closed between the question whether it is and the call."""

    def is_closed(self) -> bool:
        return False

    def call_soon_threadsafe(self, *_: object) -> None:
        raise RuntimeError("Event loop is closed")


def test_a_loop_that_closes_does_not_stop_the_engine(folder: Path) -> None:
    with LLMEngine(folder) as engine:
        handle = engine.submit(PROMPTS[0], 20, ignore_eos=True)
        handle._wake = (ClosingLoop(), asyncio.Event())  # type: ignore[assignment]
        assert len(engine.generate(PROMPTS[1], 8, ignore_eos=True).token_ids) == 8
        assert len(list(handle)) == 20


def test_an_answer_is_read_once(folder: Path) -> None:
    with LLMEngine(folder) as engine:
        handle = engine.submit(PROMPTS[0], 3, ignore_eos=True)
        assert len(list(handle)) == 3
        assert list(handle) == []
        with pytest.raises(UsageError, match="has been read already"):
            handle.result()


@pytest.mark.parametrize("settings", [{"temperature": 10**400}, {"logit_bias": {5: -(10**400)}}])
def test_c70_numbers_that_no_float_holds_are_refused(folder: Path, settings: dict[str, Any]) -> None:
    with LLMEngine(folder) as engine, pytest.raises(RequestError, match="must be a finite number") as caught:
        engine.submit([5], 3, **settings)
    assert caught.value.field == next(iter(settings))
