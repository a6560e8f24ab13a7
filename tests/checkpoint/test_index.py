"""Which files make up a model, and indexes that lie (C27, reading side)."""

import json
import shutil

import pytest
import torch
from model_folders import read_index, tensors, write_config, write_index, write_sharded, write_single
from safetensors.torch import save_file

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.errors import CheckpointError

STATE = tensors()
PARTS = [{"a.weight": STATE["a.weight"]}, {"b.weight": STATE["b.weight"]}, {"c.weight": STATE["c.weight"]}]


@pytest.mark.parametrize("index", [True, False])
def test_shards_with_and_without_an_index(tmp_path, index):
    folder = write_sharded(tmp_path / "m", PARTS, index=index)
    with open_checkpoint(str(folder)) as checkpoint:
        assert list(checkpoint.tensors) == list(STATE)
        assert checkpoint.tensors["b.weight"].file == "model-00002-of-00003.safetensors"
        for name, tensor in STATE.items():
            assert torch.equal(checkpoint.load(name), tensor)


def refusal(folder) -> str:
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(str(folder))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_c27_index_names_an_absent_shard(tmp_path):
    folder = write_sharded(tmp_path / "m", PARTS)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "names model-00002-of-00003.safetensors, which is not in" in refusal(folder)


def test_c27_index_places_a_tensor_wrongly(tmp_path):
    folder = write_sharded(tmp_path / "m", PARTS)
    first, third = "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"
    write_index(folder, read_index(folder) | {"a.weight": third, "c.weight": first})
    message = refusal(folder)
    assert "'a.weight'" in message
    assert "model-00003" in message
    assert "model-00001" in message


def test_c27_index_lists_a_tensor_that_nobody_holds(tmp_path):
    folder = write_sharded(tmp_path / "m", PARTS)
    write_index(folder, read_index(folder) | {"ghost.weight": "model-00003-of-00003.safetensors"})
    assert "'ghost.weight'" in refusal(folder)


def test_c27_index_lacks_a_tensor(tmp_path):
    folder = write_sharded(tmp_path / "m", [PARTS[0], PARTS[1] | PARTS[2]])
    weight_map = read_index(folder)
    del weight_map["c.weight"]
    write_index(folder, weight_map)
    assert "'c.weight', which the index lacks" in refusal(folder)


def test_c29_index_that_skips_a_whole_shard(tmp_path):
    folder = write_sharded(tmp_path / "m", PARTS)
    weight_map = read_index(folder)
    del weight_map["c.weight"]
    write_index(folder, weight_map)
    assert "does not mention model-00003-of-00003.safetensors" in refusal(folder)


def test_c29_unknown_extra_tensors_are_listed(tmp_path):
    extra = {"model.mtp.0.eh_proj.weight": torch.ones(2, 2), "rotary.inv_freq": torch.ones(4)}
    folder = write_single(tmp_path / "m", STATE | extra)
    with open_checkpoint(str(folder)) as checkpoint:
        assert set(checkpoint.tensors) == set(STATE) | set(extra)


def test_c27_stale_total_size_is_accepted(tmp_path):
    folder = write_sharded(tmp_path / "m", PARTS)
    write_index(folder, read_index(folder), total_size=1)
    open_checkpoint(str(folder)).close()


@pytest.mark.parametrize(
    "target", ["../m2/model-00001-of-00003.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "a\\b", 7, None, ""]
)
def test_index_never_leads_out_of_its_folder(tmp_path, target):
    folder = write_sharded(tmp_path / "m", PARTS)
    shutil.copytree(folder, tmp_path / "m2")
    write_index(folder, read_index(folder) | {"a.weight": target})
    assert "'a.weight'" in refusal(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "\udcff", "[" * 100000])
def test_index_that_is_no_index(tmp_path, text):
    folder = write_sharded(tmp_path / "m", PARTS)
    (folder / "model.safetensors.index.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert "model.safetensors.index.json" in refusal(folder)


def test_single_file_beside_an_index_of_others_is_ambiguous(tmp_path):
    folder = write_sharded(tmp_path / "m", PARTS)
    save_file(STATE, folder / "model.safetensors")
    assert "both model.safetensors and an index" in refusal(folder)


def test_one_name_in_two_files(tmp_path):
    folder = tmp_path / "m"
    write_config(folder)
    save_file(PARTS[0], folder / "x.safetensors")
    save_file(PARTS[0], folder / "y.safetensors")
    assert "in both x.safetensors and y.safetensors" in refusal(folder)


def test_missing_number_without_an_index(tmp_path):
    folder = write_sharded(tmp_path / "m", PARTS, index=False)
    (folder / "model-00003-of-00003.safetensors").unlink()
    assert "not model-00003-of-00003.safetensors" in refusal(folder)


def test_standard_name_wins_over_a_second_copy(tmp_path):
    folder = write_single(tmp_path / "m", STATE)
    save_file(STATE, folder / "consolidated.safetensors")
    assert {info.file for info in open_checkpoint(str(folder)).tensors.values()} == {"model.safetensors"}


def test_links_into_a_blob_store_work_as_in_the_hub_cache(tmp_path):
    source = write_sharded(tmp_path / "source", PARTS)
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(source.iterdir())):
        shutil.copy(file, blobs / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    with open_checkpoint(str(snapshot)) as checkpoint:
        assert torch.equal(checkpoint.load("c.weight"), STATE["c.weight"])
        assert checkpoint.fingerprint() == open_checkpoint(str(source)).fingerprint()


def test_index_of_another_name(tmp_path):
    folder = write_sharded(tmp_path / "m", PARTS)
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    (folder / "model.safetensors.index.json").rename(folder / "diffusion.safetensors.index.json")
    assert len(open_checkpoint(str(folder)).tensors) == len(index["weight_map"])
