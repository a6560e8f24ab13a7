"""Values and texts of the command line: sizes, durations, recipes from flags, progress."""

import contextlib
import math
import os
from pathlib import Path
from typing import Any

import pytest

from cann_llm_quant.cli.failure import describe
from cann_llm_quant.cli.options import parse_size
from cann_llm_quant.cli.progress import LiveProgress, Step, show_progress
from cann_llm_quant.cli.recipe_flags import FIELDS, resolve_recipe
from cann_llm_quant.cli.terminal import LONGEST, duration, one_line, printable, size, strict_json
from cann_llm_quant.errors import CheckpointError, UsageError

NOTHING: dict[str, Any] = dict.fromkeys(FIELDS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5GB", 5_000_000_000),
        ("2GiB", 2_147_483_648),
        ("40kb", 40_000),
        ("1.5 MB", 1_500_000),
        ("512MiB", 536_870_912),
        ("123", 123),
        ("7b", 7),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "huge", "-1GB", "5XB", "1e9", "0.5.5GB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["9" * 400 + "TB", "9" * 400, "9223372036854775808", "99999999TiB"])
def test_more_than_any_machine_holds_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="more than any machine holds") as caught:
        parse_size(text)
    assert len(str(caught.value)) < 120


def test_numbers_for_people() -> None:
    assert [size(n) for n in (0, 999, 1000, 269_060_552, 5.5e12)] == ["0 B", "999 B", "1.0 kB", "269.1 MB", "5.50 TB"]
    assert [duration(s) for s in (0.04, 12.4, 185, 7385)] == ["0.0 s", "12 s", "3:05", "2:03:05"]


def test_text_for_a_terminal() -> None:
    assert one_line(" a\n  b\r\nc ") == "a b c"
    assert printable("a\tb\n\x07\x9b语") == "a\tb\n\\x07\\x9b语"


def test_strict_json_holds_only_what_json_can() -> None:
    value = {"a": (math.nan, [math.inf, 1.5]), "p": Path("x"), "n": None, 3: True, "s": "\udce6\udca8\udca1 \ud800"}
    assert strict_json(value) == {"a": [None, [None, 1.5]], "p": "x", "n": None, "3": True, "s": "模 �"}


def test_flags_override_the_recipe_file_and_ignore_comes_last(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "method: rtn\nscheme: {bits: 8, group_size: 32}\nrules: [{match: ['re:.*'], scheme: {bits: 8}}]\n",
        encoding="utf-8",
    )
    recipe = resolve_recipe(file, {**NOTHING, "bits": 4, "seed": 7}, ["model.layers.0.self_attn.q_proj"])
    assert recipe.method == "rtn"
    assert (recipe.scheme.bits, recipe.scheme.group_size) == (4, 32)
    assert recipe.calibration.seed == 7
    assert [(rule.match, rule.scheme) for rule in recipe.rules][-1] == (("model.layers.0.self_attn.q_proj",), "skip")
    assert len(recipe.rules) == 2


def test_plain_progress_writes_news_only(tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    with log.open("w", encoding="utf-8") as stream, show_progress("windows", stream) as progress:
        progress(Step("prepare", message="llama, 2 layers"))
        progress(Step("prepare", message="few windows", warning=True))
        for done in range(1, 50):
            progress(Step("calibrate", done, 100, "layer 1/2"))
        for done in range(50, 60):
            progress(Step("propagate", done, 100, "layer 1/2", error=0.125))
        progress(Step("solve", 100, 100, "layer 2/2", error=0.25))
    lines = log.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "prepare: llama, 2 layers"
    assert lines[1] == "warning: few windows"
    assert lines[2].startswith("calibrate 1%  layer 1/2  memory ")
    assert "propagate 50%" in lines[3]
    assert "windows/s  eta " in lines[3]
    assert "layer 1/2  output error 0.125  memory " in lines[3]
    assert "solve 100%" in lines[4]
    assert len(lines) == 5


def read_all(master: int) -> str:
    """What was written to a closed pseudo-terminal."""
    chunks = []
    with contextlib.suppress(OSError):  # Linux reports the end as an error
        while chunk := os.read(master, 65536):
            chunks.append(chunk)
    os.close(master)
    return b"".join(chunks).decode()


def test_live_progress_draws_bar_layer_and_error() -> None:
    master, slave = os.openpty()
    with open(slave, "w", encoding="utf-8") as stream, show_progress("windows", stream) as progress:
        assert isinstance(progress, LiveProgress)
        progress(Step("calibrate", 1, 4, "layer 1/2"))
        progress(Step("calibrate", 2, 4, "layer 1/2", error=0.125, message="smoothing undone", warning=True))
        progress.live.refresh()
    drawn = read_all(master)
    for text in ("calibrate", "50%", "layer 1/2", "output error 0.125", "memory", "warning: smoothing undone"):
        assert text in drawn


def test_a_message_of_any_length_is_shown_in_part() -> None:
    code, message = describe(CheckpointError(f"tensor {'x' * 100_000} is missing"))
    assert (code, message[:9]) == (2, "tensor xx")
    assert message.endswith("… (100018 characters)")
    assert len(message) < LONGEST + 30
    assert describe(KeyError("x" * 100_000))[1].endswith("rerun with --debug for the traceback")
