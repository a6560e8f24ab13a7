"""Good and broken folders and byte files collected from practice, against what safetensors and torch make of them."""

import json

import pytest
import torch
from safetensors import safe_open

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.checkpoint.safetensors_reader import SafetensorsShard
from cann_llm_quant.errors import CheckpointError, InputError

pytestmark = pytest.mark.shared

REFUSED = {  # folder: what the message must say; the other bad_ folders are for who reads config and shapes
    "bad_config_not_json": "config.json is not valid JSON",
    "bad_index_missing_shard": "names model-00002-of-00003.safetensors",
    "bad_index_missing_tensor": "mlp.up_proj.weight', which the index lacks",
    "bad_index_path_escape": "not a plain file name",
    "bad_index_wrong_file": "it is in model-00001-of-00002.safetensors",
    "bad_lfs_pointer": "git lfs pull",
    "bad_no_weights": "has no weights",
    "bad_pickle_code": "refused",
    "bad_truncated_file": "describes 524912 bytes, the file has 200000",
}


@pytest.fixture(scope="session")
def wild(shared):
    return shared / "data" / "wild"


def test_every_malformed_file_is_refused_and_every_good_one_read(wild):
    expected = json.loads((wild / "expected.json").read_text(encoding="utf-8"))["behaviour"]
    files = sorted((wild / "malformed_safetensors").iterdir())
    assert len(files) == 28
    for path in files:
        if expected[f"malformed_safetensors/{path.name}"].startswith("loads"):
            with safe_open(path, framework="pt") as reference:
                shard = SafetensorsShard(path)
                assert set(shard.tensors) == set(reference.keys())
                for name in shard.tensors:
                    theirs, ours = reference.get_tensor(name), shard.load(name)
                    assert (theirs.dtype, theirs.shape) == (ours.dtype, ours.shape)
                    assert theirs.reshape(-1).view(torch.uint8).tolist() == ours.reshape(-1).view(torch.uint8).tolist()
        else:
            with pytest.raises(CheckpointError) as error:
                SafetensorsShard(path)
            assert str(path) in str(error.value)
            assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", REFUSED)
def test_broken_folders(wild, name):
    with pytest.raises(InputError) as error:
        open_checkpoint(str(wild / name), allow_pickle=True)
    assert REFUSED[name] in str(error.value)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_good_folders(wild):
    reference = {}
    with safe_open(wild / "no_format_metadata" / "model.safetensors", framework="pt") as file:
        reference = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    names = sorted(path.name for path in wild.iterdir() if path.is_dir() and path.name not in REFUSED)
    names.remove("malformed_safetensors")
    assert len(names) == 15 + 4
    for name in names:
        with open_checkpoint(str(wild / name), allow_pickle=True) as checkpoint:
            for tensor, info in checkpoint.tensors.items():
                loaded = checkpoint.load(tensor)
                assert (info.dtype, info.shape, info.nbytes) == (loaded.dtype, tuple(loaded.shape), loaded.nbytes)
            if name in ("bin_only_legacy", "bin_only_zip", "sharded_bin", "sharded_safetensors"):
                assert set(checkpoint.tensors) == set(reference)
                assert all(torch.equal(checkpoint.load(t).float(), reference[t].float()) for t in reference)
