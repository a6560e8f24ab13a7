"""`.bin` weights: refused by default, read as data only when admitted (C60)."""

import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from model_folders import tensors, write_config, write_single

from cann_llm_quant.checkpoint import open_checkpoint, pickle_reader
from cann_llm_quant.errors import CheckpointError

STATE = tensors() | {"half": torch.ones(3, dtype=torch.bfloat16), "strided": torch.arange(12.0).view(3, 4).T}


def write_bin(folder, state, legacy=False, name="pytorch_model.bin"):
    write_config(folder)
    torch.save(state, folder / name, _use_new_zipfile_serialization=not legacy)
    return folder


class TouchesMarker:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


@pytest.mark.parametrize("legacy", [False, True])
def test_both_formats_read_exactly(tmp_path, legacy):
    folder = write_bin(tmp_path / "m", STATE, legacy)
    with open_checkpoint(str(folder), allow_pickle=True) as checkpoint:
        assert set(checkpoint.tensors) == set(STATE)
        for name, tensor in STATE.items():
            loaded = checkpoint.load(name)
            info = checkpoint.tensors[name]
            assert torch.equal(loaded, tensor)
            assert loaded.is_contiguous()
            assert (info.dtype, info.shape, info.nbytes) == (loaded.dtype, tuple(loaded.shape), loaded.nbytes)
            loaded.zero_()
        assert torch.equal(checkpoint.load("a.weight"), STATE["a.weight"])


@pytest.mark.parametrize("legacy", [False, True])
def test_shards_with_an_index(tmp_path, legacy):
    folder = tmp_path / "m"
    write_config(folder)
    files = {}
    for i, name in enumerate(STATE):
        files[name] = f"pytorch_model-{i + 1:05d}-of-{len(STATE):05d}.bin"
        torch.save({name: STATE[name]}, folder / files[name], _use_new_zipfile_serialization=not legacy)
    (folder / "training_args.bin").write_bytes(b"left by a trainer")
    with open_checkpoint(str(folder), allow_pickle=True) as checkpoint:
        assert {name: info.file for name, info in checkpoint.tensors.items()} == files
        for name in [*STATE, *STATE]:
            assert torch.equal(checkpoint.load(name), STATE[name])


def test_without_the_flag_the_message_tells_about_it(tmp_path):
    folder = write_bin(tmp_path / "m", STATE)
    with pytest.raises(CheckpointError, match="--allow-pickle"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("allow", [False, True])
def test_c60_code_in_a_pickle_never_runs(tmp_path, legacy, allow):
    marker = tmp_path / "marker"
    folder = write_bin(tmp_path / "m", {"a.weight": torch.ones(2), "evil": TouchesMarker(marker)}, legacy)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(str(folder), allow_pickle=allow)
    assert not marker.exists()
    assert "\n" not in str(error.value)
    assert "pytorch_model.bin" in str(error.value)


@pytest.mark.parametrize("allow", [False, True])
def test_c60_safetensors_are_taken_where_both_forms_are_present(tmp_path, allow):
    marker = tmp_path / "marker"
    folder = write_single(tmp_path / "m", tensors())
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(TouchesMarker(marker)))
    with open_checkpoint(str(folder), allow_pickle=allow) as checkpoint:
        assert torch.equal(checkpoint.load("a.weight"), STATE["a.weight"])
    assert not marker.exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short", b"<html>not found</html>", bytes(100)])
def test_damaged_file_is_one_line(tmp_path, content):
    write_config(tmp_path / "m")
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(str(tmp_path / "m"), allow_pickle=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("legacy", [False, True])
def test_c37_truncated_file(tmp_path, legacy):
    folder = write_bin(tmp_path / "m", STATE, legacy)
    path = folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        open_checkpoint(str(folder), allow_pickle=True)


@pytest.mark.parametrize("state", [[torch.ones(2)], {"model": {"a": torch.ones(2)}}, {"a": 3}, {1: torch.ones(2)}])
def test_only_flat_mappings_of_tensors(tmp_path, state):
    with pytest.raises(CheckpointError, match="mapping of names to tensors"):
        open_checkpoint(str(write_bin(tmp_path / "m", state)), allow_pickle=True)


def test_threads_that_ask_at_once_read_a_file_of_the_old_format_once(tmp_path, monkeypatch):
    folder, times = write_bin(tmp_path / "m", STATE, legacy=True), []
    read = pickle_reader._read

    def slow_read(path, mapped):
        times.append(path)
        time.sleep(0.2)  # so that all have asked before the first has its answer
        return read(path, mapped)

    with open_checkpoint(str(folder), allow_pickle=True) as checkpoint, ThreadPoolExecutor(4) as pool:
        monkeypatch.setattr(pickle_reader, "_read", slow_read)
        loaded = list(pool.map(checkpoint.load, [*STATE] * 2))
    assert len(times) == 1
    assert all(torch.equal(tensor, wanted) for tensor, wanted in zip(loaded, [*STATE.values()] * 2, strict=True))
