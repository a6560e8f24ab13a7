"""The demo on the model inside the package, with fewer windows than a user's run has."""

import io
import json
from pathlib import Path

import pytest
import torch

from cann_llm_quant.cli import demo
from cann_llm_quant.cli.main import main
from cann_llm_quant.cli.terminal import console


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo with little text; it leaves the number of threads as it was."""
    for name, value in {"SAMPLES": 2, "WINDOWS": 2, "NEW_TOKENS": 3}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_the_demo_shows_four_models_and_keeps_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "-o", str(tmp_path / "kept"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in shown["rows"]] == ["bfloat16", "int4 RTN", "int4 AWQ", "int4 GPTQ"]
    original, *quantized = shown["rows"]
    for row in quantized:
        assert row["perplexity"] < 1.5 * original["perplexity"]
        assert 0 < row["kl"] < 1
        assert 4 < row["bits_per_weight"] < 5
        assert row["bytes"] < original["bytes"]
        assert row["text"]
    table = io.StringIO()
    demo.draw(console(table), shown, tmp_path)
    for words in ("perplexity", "bits/weight", "int4 AWQ:", "int4 GPTQ:", "If the file", "quantize MODEL -o FOLDER"):
        assert words in table.getvalue()
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["awq", "gptq", "rtn"]


@pytest.mark.parametrize("method", ["rtn", "awq", "gptq"])
def test_the_demo_replaces_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(demo, "try_method", lambda *_: pytest.fail("work has begun"))
    (tmp_path / method).mkdir()
    (tmp_path / method / "mine.txt").write_text("mine", encoding="utf-8")
    assert main(["demo", "-o", str(tmp_path)]) == 2
    assert f"{tmp_path / method} exists already" in capsys.readouterr().err
    assert (tmp_path / method / "mine.txt").read_text(encoding="utf-8") == "mine"
