"""Units that a thread writes: in order, all of them, with their errors, and not too many at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cann_llm_quant.checkpoint import write_ahead
from cann_llm_quant.checkpoint.write_ahead import WriteAhead
from cann_llm_quant.checkpoint.writer import CheckpointWriter
from cann_llm_quant.errors import CheckpointError


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
