"""`quantize`'s flags of the KV cache: what they write into the recipe, what they refuse, what the command prints."""

import json
from pathlib import Path

import pytest
from tiny_models import save_text, save_tiny

from cann_llm_quant.cli.main import main


def test_flags_write_the_section_of_the_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["--kv-cache", "first 30%: fp8_e5m2, int8-head", "--kv-sink-tokens", "4", "--kv-recent-tokens", "64"]
    flags += ["--kv-sensitive", "numbers,names", "--kv-headroom", "1.1", "--kv-percentile", "99.9", "--kv-smooth"]
    assert main(["quantize", "M", "--show-recipe", *flags]) == 0
    section = json.loads(capsys.readouterr().out)["kv_cache"]
    assert section == {
        "scheme": "first 30%: fp8_e5m2, int8-head",
        "bits": None,
        "candidates": None,
        "sink_tokens": 4,
        "recent_tokens": 64,
        "sensitive": ["numbers", "names"],
        "page_size": 32,
        "headroom": 1.1,
        "percentile": 99.9,
        "scale": None,
        "smooth": True,
    }
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps({"kv_cache": section}), encoding="utf-8")
    assert main(["quantize", "M", "--show-recipe", "--recipe", str(file), "--kv-page-size", "16"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_cache"] == section | {"page_size": 16}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kv-sink-tokens", "4"], "--kv-sink-tokens is for a quantized KV cache; add --kv-cache"),
        (["--kv-cache", "int9"], "'int9' is no KV cache format"),
        (["--method", "none"], "add --kv-cache"),
        (["--method", "none", "--kv-cache", "int8", "--head-bits", "8"], "leave out head"),
        (["--kv-cache", "int4", "--kv-scale", "1.0"], "are for stored scales"),
    ],
)
def test_what_contradicts_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert main(["quantize", "M", "--show-recipe", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 1


def test_the_closing_lines_say_formats_float_pages_and_clipping(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, text = save_tiny(tmp_path / "model"), save_text(tmp_path / "text.txt")
    flags = ["--method", "none", "--kv-cache", "0: fp8_e4m3, k=int8-head v=float", "--kv-percentile", "90"]
    flags += ["--kv-sink-tokens", "4", "--kv-sensitive", "numbers", "--samples", "2", "--seq-len", "32"]
    assert main(["quantize", str(model), "-o", str(tmp_path / "out"), "--data", str(text), *flags]) == 0
    streams = capsys.readouterr()
    shown = " ".join(streams.out.split())
    assert "method none, weights are as they were" in shown
    assert "kv cache fp8_e4m3-tensor in layer 0; k int8-head, v float in layer 1" in shown
    assert "kv in float the first 4 tokens, pages with numbers; pages of 32 tokens" in shown
    assert "of the calibration's values on average, most in layer" in shown
    assert "125 of 128 tokens are numbers; their pages stay in float" in streams.err
    assert main(["inspect", str(tmp_path / "out")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "kv cache fp8_e4m3-tensor in layer 0; k int8-head, v float in layer 1, 3 stored scales" in shown
