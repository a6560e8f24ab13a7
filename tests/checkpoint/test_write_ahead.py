"""Units that a thread writes: in order, all of them, with their errors, and not too many at a time."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cann_llm_quant.checkpoint import write_ahead
from cann_llm_quant.checkpoint import writer as writer_module
from cann_llm_quant.checkpoint.write_ahead import WriteAhead
from cann_llm_quant.checkpoint.writer import CheckpointWriter
from cann_llm_quant.errors import CannQuantError, CheckpointError


def units(count: int) -> dict[str, dict[str, torch.Tensor]]:
    return {str(n): {f"w{n}": torch.full((100,), float(n))} for n in range(count)}


def write(writer: Any, wanted: dict[str, dict[str, torch.Tensor]]) -> None:
    with WriteAhead(writer) as ahead:
        for name, tensors in wanted.items():
            ahead.write_unit(name, tensors, {"unit": name})


@pytest.mark.parametrize("limit", [0, 900, 1 << 20])
def test_the_same_output_as_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(write_ahead, "_WAITING_BYTES", limit)
    with CheckpointWriter.open(tmp_path / "out", run={}) as writer:
        write(writer, units(7))
        assert list(writer.completed) == list(units(7))
        writer.finish({})
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: float(tensor[0]) for name, tensor in stored.items()} == {f"w{n}": float(n) for n in range(7)}


def test_an_error_of_a_unit_is_raised(tmp_path: Path) -> None:
    with (
        CheckpointWriter.open(tmp_path / "out", run={}) as writer,
        pytest.raises(CheckpointError, match="meta device"),
    ):
        write(writer, {"a": {"w": torch.empty(3, device="meta")}})


def test_no_more_waits_than_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 400 bytes each, two may wait under 900; a larger one waits alone."""
    monkeypatch.setattr(write_ahead, "_WAITING_BYTES", 900)
    with CheckpointWriter.open(tmp_path / "out", run={}) as writer, WriteAhead(writer) as ahead:
        for name, tensors in units(6).items():
            ahead.write_unit(name, tensors, {})
            assert len(ahead._pending) <= 2
        ahead.write_unit("large", {"w": torch.zeros(1000)}, {})
        assert len(ahead._pending) == 1


def test_a_unit_that_the_disk_refuses_ends_the_run_and_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units that were staged behind the refused one never count: the journal has no gap."""
    settle = writer_module.settle_file

    def refuse(path: Path) -> None:
        if path.name == "00001.safetensors":
            raise OSError(28, "No space left on device")
        settle(path)

    monkeypatch.setattr(writer_module, "settle_file", refuse)
    with (
        CheckpointWriter.open(tmp_path / "out", run={}) as writer,
        pytest.raises(CannQuantError, match=r"No space left.*resumes"),
    ):
        write(writer, units(4))
    monkeypatch.undo()
    with CheckpointWriter.open(tmp_path / "out", run={}) as writer:
        assert list(writer.completed) == ["0"]
        write(writer, {name: tensors for name, tensors in units(4).items() if name != "0"})
        writer.finish({})
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"w0", "w1", "w2", "w3"}


def test_behind_a_refused_unit_none_counts_though_the_disk_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota may spare small units, or space come back: the order of files would be another than without the error."""
    settle, refused = writer_module.settle_file, threading.Event()

    def refuse_once(path: Path) -> None:
        if path.name == "00001.safetensors" and not refused.is_set():
            refused.set()
            raise OSError(28, "No space left on device")
        settle(path)

    def write_slowly(ahead: WriteAhead) -> None:
        for name, tensors in units(6).items():
            ahead.write_unit(name, tensors, {})
            if name == "2":
                refused.wait(60)
                ahead._committer.submit(int).result()  # the refusal is dealt with before the next one is staged

    monkeypatch.setattr(writer_module, "settle_file", refuse_once)
    with (
        CheckpointWriter.open(tmp_path / "out", run={}) as writer,
        pytest.raises(CannQuantError, match="No space left"),
        WriteAhead(writer) as ahead,
    ):
        write_slowly(ahead)
    with CheckpointWriter.open(tmp_path / "out", run={}) as writer:
        assert list(writer.completed) == ["0"]


def test_a_unit_counts_only_when_the_disk_has_it(tmp_path: Path) -> None:
    with CheckpointWriter.open(tmp_path / "out", run={}) as writer:
        first, second = (writer.stage_unit(name, tensors, {}) for name, tensors in units(2).items())
        assert writer.completed == {}
        with pytest.raises(CheckpointError, match="'0' is already written"):
            writer.stage_unit("0", {"other": torch.zeros(1)}, {})
        with pytest.raises(CheckpointError, match="'1' cannot count"):
            writer.commit_unit(second)
        writer.commit_unit(first)
        assert list(writer.completed) == ["0"]
    with CheckpointWriter.open(tmp_path / "out", run={}) as writer:
        assert list(writer.completed) == ["0"]
        assert [path.name for path in (tmp_path / "out.partial" / "units").iterdir()] == ["00000.safetensors"]
