"""Evaluation through the cache: the same logits as the engine's, however the text is cut, and nothing of the past."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_tiny
from torch import Tensor
from transformers import AutoModelForCausalLM

from cann_llm_quant.calibrate.streamed_logits import StreamedLogits
from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.cli.main import main
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.quant.kv import KvPlan, KvScales, KvScheme, LayerKv
from cann_llm_quant.runner import batch
from cann_llm_quant.runner.cached_windows import CachedWindows
from cann_llm_quant.runner.engine import LLMEngine
from cann_llm_quant.runner.sampler import Sampled
from cann_llm_quant.runner.spans import Pattern

INT4 = KvScheme("int4", symmetric=False, strategy="token", dynamic=True)
BY_PAGE = KvScheme("int8", strategy="channel", dynamic=True)


def plan(**classes: Any) -> KvPlan:
    return KvPlan((LayerKv(BY_PAGE, INT4), LayerKv(INT4, None)), (KvScales(),) * 2, **classes)


PLANS = [plan(), plan(recent_tokens=20), plan(sink_tokens=3, sensitive=frozenset({9, 10, 11}))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target: Path = save_tiny(tmp_path_factory.mktemp("llama"), dtype=torch.float32)
    return target


@pytest.fixture(scope="module")
def windows() -> Tensor:
    return torch.randint(3, 128, (3, 90), generator=torch.Generator().manual_seed(0))


def streamed(folder: Path, windows: Tensor, wanted: KvPlan, chunk: int, pattern: Pattern | None = None) -> Tensor:
    with open_checkpoint(str(folder)) as checkpoint:
        logits = StreamedLogits(
            checkpoint,
            arch_from_checkpoint(checkpoint),
            device=torch.device("cpu"),
            dtype=torch.float32,
            budget=1 << 30,
            attend=lambda ids: CachedWindows(wanted, ids, page_size=16, pattern=pattern, chunk=chunk),
        )
        return torch.stack(list(logits(windows)))


@pytest.mark.parametrize("wanted", PLANS)
def test_the_engine_reads_the_same(
    folder: Path, windows: Tensor, wanted: KvPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine decodes a window token by token, its answers forced; each step's logits are those of evaluation."""
    text = windows[0].tolist()
    seen: list[Tensor] = []

    def force(logits: Tensor, *_: object) -> Sampled:
        seen.append(logits)
        return Sampled(text[30 + len(seen) - 1])

    monkeypatch.setattr(batch, "sample", force)
    with LLMEngine(folder, kv_cache=wanted) as engine:
        engine.generate(text[:30], 60, ignore_eos=True)
    ours = streamed(folder, windows[:1], wanted, chunk=256)[0]
    torch.testing.assert_close(torch.stack(seen), ours[29:89], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("wanted", PLANS)
def test_chunks_do_not_show(folder: Path, windows: Tensor, wanted: KvPlan) -> None:
    whole = streamed(folder, windows, wanted, chunk=256)
    for chunk in (7, 16, 50):
        torch.testing.assert_close(streamed(folder, windows, wanted, chunk), whole, atol=2e-5, rtol=1e-4)


def test_windows_do_not_see_one_another(folder: Path, windows: Tensor) -> None:
    together = streamed(folder, windows, plan(), chunk=32)
    alone = torch.cat([streamed(folder, row[None], plan(), chunk=32) for row in windows])
    assert torch.equal(together, alone)


def test_a_float_cache_under_a_pattern_is_masked_attention(folder: Path, windows: Tensor) -> None:
    pattern = Pattern(window=24, first=2)
    ours = streamed(folder, windows, KvPlan.plain(2), 32, pattern)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    i, j = torch.arange(90)[:, None], torch.arange(90)
    mask = torch.where((j <= i) & ((j < 2) | (j > i - 24)), 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        theirs = model(windows, attention_mask=mask.expand(3, 1, 90, 90)).logits
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_perplexity_says_what_the_cache_was_and_costs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ["--data", str(folder / "text.txt"), "--window", "64", "--max-windows", "2", "--json"]
    words = " ".join(f"w{i % 90}" for i in range(300))
    (folder / "text.txt").write_text(words, encoding="utf-8")
    found = {}
    for spec in ("float", "int8-token", "int4-token"):
        assert main(["perplexity", str(folder), "--reference", str(folder), "--kv-cache", spec, *text]) == 0
        found[spec] = json.loads(capsys.readouterr().out)
    assert found["float"]["kv_cache"] is None
    assert found["float"]["divergence"]["kl"] == pytest.approx(0, abs=1e-9)
    assert found["int8-token"]["kv_cache"]["layers"] == ["int8-token-dynamic"] * 2
    # 8-bit codes and a bfloat16 scale for the 16 channels of a token's head
    assert found["int8-token"]["kv_cache"]["bits_per_value"] == 8 + 16 / 16
    assert 0 < found["int8-token"]["divergence"]["kl"] < found["int4-token"]["divergence"]["kl"]


def test_scales_that_were_never_stored_are_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["perplexity", str(folder), "--kv-cache", "int8-head"]) == 2
    assert "quantize --method none --kv-cache" in capsys.readouterr().err
