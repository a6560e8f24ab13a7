"""Flags for the head, the embedding and experts, as a user gives them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_text, save_tiny

from cann_llm_quant.cli.main import main
from cann_llm_quant.cli.quantize import expert_line
from cann_llm_quant.pipeline.expert_counts import ExpertCounts

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}


def shown(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["quantize", "any", "--show-recipe", "--json", *flags]) == 0
    return dict(json.loads(capsys.readouterr().out)["recipe"])


def test_bits_of_the_head_and_the_embedding_mean_schemes(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = shown(capsys, "--head-bits", "4", "--embedding-bits", "8", "--moe-all-experts")
    assert (recipe["head"]["bits"], recipe["head"]["group_size"]) == (4, "auto")
    assert (recipe["embedding"]["bits"], recipe["embedding"]["group_size"]) == (8, -1)
    assert recipe["moe_all_experts"] is True
    plain = shown(capsys)
    assert (plain["head"], plain["embedding"], plain["moe_all_experts"]) == (None, None, False)


def test_an_embedding_in_four_bits_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "any", "--show-recipe", "--embedding-bits", "4"]) == 2
    assert "one scale a row" in capsys.readouterr().err


def test_the_report_counts_experts_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny(tmp_path / "model", "qwen3_moe", num_hidden_layers=1, **EXPERTS)
    words = ["--data", str(save_text(tmp_path / "t.txt")), "--samples", "2", "--seq-len", "32", "--head-bits", "8"]
    assert main(["quantize", str(model), "-o", str(tmp_path / "out"), *words, "--json"]) == 0
    experts = json.loads(capsys.readouterr().out)["experts"]
    assert (experts["count"], experts["few_tokens"], experts["every_token"]) == (4, 128, False)
    assert 4 * experts["min_tokens"] <= 2 * 64 <= 4 * experts["max_tokens"]


def test_the_line_about_experts() -> None:
    counts = ExpertCounts(40, 0, 41.5, 247, few_tokens=128, few=34, unseen=1, borrowing=40, every_token=False)
    line = "40 saw 0 to 247 tokens, median 41.5; 34 under 128, 1 unseen; 40 also solved for others' tokens"
    assert expert_line(counts) == line
