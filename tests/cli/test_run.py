"""`run`: where the prompt comes from, in which encoding, and which tokens it becomes. Field cases C57, C59."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import save_tiny

from cann_llm_quant.cli.run import prompt_ids, read_prompt, typed_text
from cann_llm_quant.errors import UsageError
from cann_llm_quant.runner.engine import LLMEngine

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}


def given(monkeypatch: pytest.MonkeyPatch, content: bytes, encoding: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding, errors="surrogateescape"))


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_c57_standard_input_is_utf8_in_every_locale(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    given(monkeypatch, "模型 é\n".encode(), encoding)
    assert read_prompt(None) == "模型 é\n"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_c59_standard_input_of_other_bytes_is_refused(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    given(monkeypatch, b"\xff\xfea\x00", encoding)
    with pytest.raises(UsageError, match="not UTF-8"):
        read_prompt(None)


def test_c57_an_option_that_the_locale_could_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert typed_text("模型 é", "-p") == "模型 é"
    assert typed_text(os.fsdecode("é".encode()), "-p") == "é"
    with pytest.raises(UsageError, match="text of -p is not UTF-8"):
        typed_text("\udcff\udcfe", "-p")
    with pytest.raises(UsageError, match="text of --stop is not UTF-8"):
        typed_text("\ud800", "--stop")


def test_c57_prompt_in_a_c_locale(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "模型", num_hidden_layers=1)
    command = [sys.executable, "-m", "cann_llm_quant", "run", str(model), "-p", "w5 模型", "--max-new-tokens", "2"]
    done = subprocess.run(
        [*command, "--stop", "é", "--json"], capture_output=True, check=False, env={**os.environ, **C_LOCALE}
    )
    assert (done.returncode, done.stderr) == (0, b"")
    answer = json.loads(done.stdout)
    assert answer["model"] == str(model)
    assert answer["prompt_tokens"] == 2


def chat_engine(folder: Path, template: str, *, adds_bos: bool) -> LLMEngine:
    """A tiny model whose tokenizer has this chat template and, by its own rule, BOS before a text."""
    from tokenizers.processors import TemplateProcessing

    engine = LLMEngine(save_tiny(folder, num_hidden_layers=1))
    if adds_bos:
        engine.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    engine.tokenizer.chat_template = template
    return engine


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize(
    ("written", "expected"),
    [("<s> w7 ", {False: [1, 7, 5], True: [1, 7, 5]}), ("w7 ", {False: [7, 5], True: [1, 7, 5]})],
)
def test_a_chat_has_bos_once_or_by_the_tokenizers_rule(
    tmp_path: Path, adds_bos: bool, written: str, expected: dict[bool, list[int]]
) -> None:
    engine = chat_engine(tmp_path, written + "{{ messages[0].content }}", adds_bos=adds_bos)
    assert prompt_ids(engine, "w5", chat=True) == expected[adds_bos]


def test_bos_after_white_space_counts(tmp_path: Path) -> None:
    engine = chat_engine(tmp_path, "{{ ' ' }}<s> {{ messages[0].content }}", adds_bos=True)
    assert prompt_ids(engine, "w5", chat=True) == [1, 5]


def test_a_reader_that_leaves_ends_the_answer(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", num_hidden_layers=1)
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "cann_llm_quant", "run", str(model), "-p", "w5", "--max-new-tokens", "100"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert done.returncode == 0
    assert b"1 new tokens; nobody read on" in done.stderr
