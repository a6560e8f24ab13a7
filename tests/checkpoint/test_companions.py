"""Companion files: whatever is chosen from a source can be written to an output, and their tokenizer's errors."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from model_folders import tensors, write_single

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.checkpoint.companion_tokenizer import tokenizer_of
from cann_llm_quant.checkpoint.companions import companion_files, is_companion
from cann_llm_quant.checkpoint.fingerprint import fingerprint
from cann_llm_quant.checkpoint.writer import CheckpointWriter
from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.runner.weights import _generation_config

ODD_NAMES = ["tokenizer.json.tmp", "tokenizer.JSON.TMP", "tokenizer\\evil.json", "vocab..json", "LICENSE\n", "*.model"]


def test_every_companion_of_a_source_can_be_published(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "additional_chat_templates").mkdir(parents=True)
    for name in (*ODD_NAMES, "tokenizer.json", "additional_chat_templates/a\\b.jinja"):
        (source / name).write_bytes(name.encode())
    (source / "additional_chat_templates" / "tool.jinja").write_bytes(b"t")
    found = companion_files(source)
    with CheckpointWriter.open(tmp_path / "out", run={}) as writer:
        writer.write_unit("u", {"w": torch.zeros(1)}, {})
        writer.finish(found)
    for name, data in found.items():
        assert (tmp_path / "out" / name).read_bytes() == data
    assert set(found) == {
        "tokenizer.json",
        "vocab..json",
        "LICENSE\n",
        "*.model",
        "additional_chat_templates/tool.jinja",
    }


@pytest.mark.parametrize("name", ODD_NAMES[:3])
def test_names_that_the_writer_refuses_are_no_companions(name: str) -> None:
    assert not is_companion(name)


def test_a_missing_or_broken_tokenizer_is_told_of_the_model_not_of_a_private_copy(tmp_path: Path) -> None:
    folder = write_single(tmp_path / "model", tensors())
    with open_checkpoint(str(folder)) as checkpoint:
        with pytest.raises(CheckpointError, match=f"^{folder} holds no tokenizer"):
            tokenizer_of(checkpoint)
        (folder / "tokenizer.json").write_bytes(b"{")
        with pytest.raises(CheckpointError, match=rf"^{folder}/tokenizer\.json is not valid JSON"):
            tokenizer_of(checkpoint)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", "[" * 100_000),
        ("tokenizer.json", json.dumps({"truncation": "x\n\x1b[31m" + "y" * 100_000})),
        ("tokenizer.json", json.dumps({"y" * 100_000: 1})),
    ],
)
def test_what_a_tokenizer_file_holds_is_not_repeated_whole(tmp_path: Path, file: str, content: str) -> None:
    folder = write_single(tmp_path / "model", tensors())
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / file).write_text(content, encoding="utf-8")
    with open_checkpoint(str(folder)) as checkpoint, pytest.raises(CheckpointError) as refusal:
        tokenizer_of(checkpoint)
    assert str(refusal.value).startswith(f"{folder}/{file} is not")
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 1000


@pytest.mark.parametrize("content", ["[" * 100_000, "{", "[1]"])
def test_a_generation_config_that_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    folder = write_single(tmp_path / "model", tensors())
    (folder / "generation_config.json").write_text(content, encoding="utf-8")
    with (
        open_checkpoint(str(folder)) as checkpoint,
        pytest.raises(CheckpointError, match=rf"^{folder}/generation_config\.json "),
    ):
        _generation_config(checkpoint)


def test_a_fingerprint_does_not_depend_on_the_locale(tmp_path: Path) -> None:
    """In a C locale every non-ASCII byte of a name reaches Python as a lone surrogate."""
    target = tmp_path / "权重.safetensors"
    target.write_bytes(b"weights")
    undecoded = tmp_path / target.name.encode().decode("ascii", "surrogateescape")
    assert fingerprint(b"{}", [(undecoded, b"")]) == fingerprint(b"{}", [(target, b"")])


def test_a_folder_whose_name_is_not_utf_8_is_read(tmp_path: Path) -> None:
    plain = write_single(tmp_path / "model", tensors())
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/mod\xe8le"))
    shutil.copytree(plain, folder)
    with open_checkpoint(str(folder)) as checkpoint, open_checkpoint(str(plain)) as expected:
        assert torch.equal(checkpoint.load("a.weight"), expected.load("a.weight"))
        assert checkpoint.fingerprint() == expected.fingerprint()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        open_checkpoint(str(folder))
