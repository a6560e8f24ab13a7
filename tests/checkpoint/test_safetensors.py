"""One safetensors file against the library that wrote it, and every kind of damage."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from cann_llm_quant.checkpoint.safetensors_reader import DTYPES, SafetensorsShard
from cann_llm_quant.errors import CheckpointError, UnsupportedError


def raw_file(path: Path, header: object, data: bytes) -> Path:
    text = json.dumps(header).encode("utf-8")
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_equals_the_library(tmp_path, dtype):
    codes = torch.randint(0, 2, (3, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    state = {"x": codes.view(dtype), "scalar": torch.tensor(1, dtype=torch.uint8).bool(), "empty": torch.zeros(0, 3)}
    save_file(state, tmp_path / "m.safetensors")
    shard = SafetensorsShard(tmp_path / "m.safetensors")
    expected = load_file(tmp_path / "m.safetensors")
    assert set(shard.tensors) == set(expected)
    for name, info in shard.tensors.items():
        loaded = shard.load(name)
        assert (loaded.dtype, loaded.shape) == (expected[name].dtype, expected[name].shape)
        assert (info.dtype, info.shape, info.file) == (loaded.dtype, tuple(loaded.shape), "m.safetensors")
        assert info.nbytes == loaded.numel() * loaded.element_size()
        assert torch.equal(loaded.reshape(-1).view(torch.uint8), expected[name].reshape(-1).view(torch.uint8))


def test_loaded_tensor_owns_its_memory(tmp_path):
    save_file({"x": torch.arange(6.0)}, tmp_path / "m.safetensors")
    shard = SafetensorsShard(tmp_path / "m.safetensors")
    first = shard.load("x")
    first.zero_()
    (tmp_path / "m.safetensors").rename(tmp_path / "elsewhere")
    assert torch.equal(first, torch.zeros(6))
    assert load_file(tmp_path / "elsewhere")["x"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("lost", [1, 50, 1000])
def test_c37_truncation_names_path_expected_and_real_size(tmp_path, lost):
    path = tmp_path / "model-00002-of-00003.safetensors"
    save_file({"x": torch.zeros(1000), "y": torch.zeros(1000)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-lost])
    with pytest.raises(CheckpointError) as error:
        SafetensorsShard(path)
    assert str(path) in str(error.value)
    assert str(len(whole)) in str(error.value)
    assert str(len(whole) - lost) in str(error.value)


def test_lfs_pointer_is_recognized(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 538112\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"git-lfs pointer.*git lfs pull"):
        SafetensorsShard(path)


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"t": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, bytes(16)),
        ({"t": {"dtype": "F32", "shape": [2], "data_offsets": [16, 0]}}, bytes(16)),
        ({"t": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, bytes(8)),
        ({"t": {"dtype": "INT4", "shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
        ({"t": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
        ({"t": [1, 2]}, bytes(8)),
        (["t"], b""),
        ({"t": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, bytes(8)),
    ],
)
def test_contradictory_headers_are_refused_in_one_line(tmp_path, header, data):
    path = raw_file(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(CheckpointError) as error:
        SafetensorsShard(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=64))
def test_arbitrary_bytes_are_refused_in_one_line(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("bytes") / "x.safetensors"
    path.write_bytes(data)
    try:
        load_file(path)
    except SafetensorError:
        with pytest.raises(CheckpointError) as refusal:
            SafetensorsShard(path)
        assert str(path) in str(refusal.value)
        assert "\n" not in str(refusal.value)
    else:
        SafetensorsShard(path)


def test_types_that_torch_lacks_are_named(tmp_path):
    header = {"t": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}
    with pytest.raises(UnsupportedError, match=r"'t'.*F6_E2M3"):
        SafetensorsShard(raw_file(tmp_path / "x.safetensors", header, bytes(3)))


def test_file_that_shrinks_between_opening_and_loading(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"x": torch.zeros(100)}, path)
    shard = SafetensorsShard(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="4 bytes early"):
        shard.load("x")
