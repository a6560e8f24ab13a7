"""The door: configs, sources that are already quantized, companions, fingerprints, unreadable files."""

import errno
import json
from pathlib import Path

import pytest
import torch
from model_folders import tensors, write_config, write_sharded, write_single
from safetensors.torch import save_file

from cann_llm_quant.checkpoint import Checkpoint, open_checkpoint
from cann_llm_quant.checkpoint.fingerprint import SAMPLE_BYTES, SAMPLES, fingerprint, sample_offsets
from cann_llm_quant.errors import CheckpointError, InputError, UnsupportedError

STATE = tensors()
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def refusal(folder, **options) -> str:
    with pytest.raises(InputError) as error:
        open_checkpoint(str(folder), **options)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2
    return str(error.value)


def test_folder_is_read_whole(tmp_path):
    folder = write_single(tmp_path / "m", STATE, note="ü")
    with open_checkpoint(str(folder)) as checkpoint:
        assert isinstance(checkpoint.path, Path)
        assert checkpoint.config["note"] == "ü"
        assert {name: info.shape for name, info in checkpoint.tensors.items()} == dict.fromkeys(STATE, (4, 6))
        assert torch.equal(checkpoint.load("b.weight"), STATE["b.weight"])


def test_missing_tensor_is_named(tmp_path):
    checkpoint: Checkpoint = open_checkpoint(str(write_single(tmp_path / "m", STATE)))
    with pytest.raises(CheckpointError, match=r"no tensor 'x\.weight'"):
        checkpoint.load("x.weight")


@pytest.mark.parametrize(("text", "reason"), [("{", "not valid JSON"), ("[1]", "JSON list"), ('"x"', "JSON str")])
def test_config_that_is_no_config(tmp_path, text, reason):
    folder = write_single(tmp_path / "m", STATE)
    (folder / "config.json").write_text(text, encoding="utf-8")
    message = refusal(folder)
    assert str(folder / "config.json") in message
    assert reason in message


def test_c59_missing_config_and_missing_weights(tmp_path):
    folder = write_single(tmp_path / "m", STATE)
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(folder)
    write_config(tmp_path / "empty")
    assert "has no weights" in refusal(tmp_path / "empty")


@pytest.mark.parametrize("victim", ["config.json", "model.safetensors"])
def test_c59_unreadable_file(tmp_path, monkeypatch, victim):
    folder = write_single(tmp_path / "m", STATE)
    real = Path.open

    def denied(self, *args, **kwargs):
        if self.name == victim:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", denied)
    message = refusal(folder)
    assert str(folder / victim) in message
    assert "Permission denied" in message


def test_weight_file_instead_of_its_folder(tmp_path):
    folder = write_single(tmp_path / "m", STATE)
    assert "pass the folder" in refusal(folder / "model.safetensors")


def test_c34_stale_quantization_field_is_an_error(tmp_path):
    folder = write_single(tmp_path / "m", STATE, quantization_config=FP8)
    message = refusal(folder)
    assert "fp8" in message
    assert "--ignore-source-quant" in message


def test_c34_stale_quantization_field_is_dropped_on_request(tmp_path):
    folder = write_single(tmp_path / "m", STATE, quantization_config=FP8)
    checkpoint = open_checkpoint(str(folder), ignore_source_quant=True)
    assert "quantization_config" not in checkpoint.config
    assert checkpoint.config["model_type"] == "llama"
    assert "quantization_config" in json.loads((folder / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("value", [None, {}])
def test_c34_empty_field_says_nothing(tmp_path, value):
    open_checkpoint(str(write_single(tmp_path / "m", STATE, quantization_config=value))).close()


QUANTIZED = {
    "gptq": {"a.qweight": torch.ones(2, 2, dtype=torch.int32), "a.qzeros": torch.ones(1, 1, dtype=torch.int32)},
    "compressed-tensors": {"a.weight_packed": torch.ones(2, 2, dtype=torch.int32), "a.weight_scale": torch.ones(2, 1)},
    "fp8": {"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1, 1)},
    "bitsandbytes": {"a.weight": torch.ones(2, 2, dtype=torch.uint8), "a.weight.absmax": torch.ones(2)},
    "int8": {"a.weight": torch.ones(2, 2, dtype=torch.int8)},
}


@pytest.mark.parametrize("method", QUANTIZED)
@pytest.mark.parametrize("ignore", [False, True])
def test_c34_really_quantized_source_is_refused_by_method(tmp_path, method, ignore):
    folder = write_single(tmp_path / "m", STATE | QUANTIZED[method], quantization_config={"quant_method": method})
    with pytest.raises(UnsupportedError, match=rf"already quantized \({method}: tensor 'a\."):
        open_checkpoint(str(folder), ignore_source_quant=ignore)
    with open_checkpoint(str(folder), accept_quantized=True) as checkpoint:
        for name, tensor in QUANTIZED[method].items():
            assert torch.equal(checkpoint.load(name).view(torch.uint8), tensor.view(torch.uint8))


def test_c34_quantized_tensors_without_a_config_field(tmp_path):
    folder = write_single(tmp_path / "m", QUANTIZED["gptq"])
    assert "already quantized" in refusal(folder)


def test_integer_buffers_of_float_models_are_no_quantization(tmp_path):
    buffers = {"position_ids": torch.arange(4), "attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8)}
    open_checkpoint(str(write_single(tmp_path / "m", STATE | buffers))).close()


def test_c57_path_with_spaces_and_letters_of_many_scripts(tmp_path):
    folder = write_single(tmp_path / "模型 é" / "мо дель", STATE)
    (folder / "chat_template.jinja").write_bytes("你好".encode())
    with open_checkpoint(str(folder)) as checkpoint:
        assert torch.equal(checkpoint.load("a.weight"), STATE["a.weight"])
        assert checkpoint.companion_files() == {"chat_template.jinja": "你好".encode()}


def test_companions_are_byte_for_byte_and_complete(tmp_path):
    folder = write_single(tmp_path / "m", STATE)
    travels = [
        *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"),
        *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json", "spiece.model"),
        *("generation_config.json", "preprocessor_config.json", "LICENSE", "LICENSE.txt", "README.md", "qwen.tiktoken"),
        "additional_chat_templates/tool_use.jinja",
    ]
    stays = [
        *("tokenization_x.py", "tokenizer_tool.py", "modeling.py", "training_args.bin", "optimizer.pt", "notes.txt"),
        *("model.safetensors.index.json", "additional_chat_templates/code.py", "sub/tokenizer.json"),
    ]
    (folder / "additional_chat_templates").mkdir()
    (folder / "sub").mkdir()
    for i, name in enumerate(travels + stays):
        if name != "model.safetensors.index.json":
            (folder / name).write_bytes(f"\r\n\xff {i}".encode("latin-1"))
    found = open_checkpoint(str(folder)).companion_files()
    assert set(found) == set(travels)
    assert all(found[name] == (folder / name).read_bytes() for name in travels)


def test_companion_that_is_an_lfs_pointer(tmp_path):
    folder = write_single(tmp_path / "m", STATE)
    (folder / "tokenizer.json").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    checkpoint = open_checkpoint(str(folder))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is a git-lfs pointer"):
        checkpoint.companion_files()


def test_fingerprint_sees_config_layout_and_data_but_not_the_place(tmp_path):
    def digest(folder) -> str:
        return open_checkpoint(str(folder)).fingerprint()

    base = digest(write_single(tmp_path / "a", STATE))
    assert digest(write_single(tmp_path / "b", STATE)) == base
    changed = STATE | {"c.weight": STATE["c.weight"].clone()}
    changed["c.weight"][-1, -1] += 1
    others = [
        digest(write_single(tmp_path / "c", STATE, hidden_size=5)),
        digest(write_single(tmp_path / "d", changed)),
        digest(write_single(tmp_path / "e", {**STATE, "d.weight": torch.ones(1)})),
        digest(write_sharded(tmp_path / "f", [STATE])),
    ]
    assert len({base, *others}) == 1 + len(others)


def test_fingerprint_samples_reach_both_ends(tmp_path):
    for size in (0, 1, SAMPLE_BYTES, SAMPLES * SAMPLE_BYTES, SAMPLES * SAMPLE_BYTES + 1, 10**9):
        offsets = sample_offsets(size)
        assert len(offsets) <= SAMPLES
        assert offsets == sorted(set(offsets))
        if size:
            assert offsets[0] == 0
            assert offsets[-1] < size <= offsets[-1] + SAMPLE_BYTES
    path = tmp_path / "big"
    data = bytearray(3_000_000)
    path.write_bytes(data)
    before = fingerprint(b"", [(path, b"")])
    data[-1] = 1
    path.write_bytes(data)
    assert fingerprint(b"", [(path, b"")]) != before


def test_empty_weights(tmp_path):
    write_config(tmp_path / "m")
    save_file({}, tmp_path / "m" / "model.safetensors")
    assert "hold no tensors" in refusal(tmp_path / "m")
