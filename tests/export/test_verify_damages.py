"""Outputs damaged by hand, as a careless or hostile writer would: each damage is named, sound outputs stay silent."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from native_folders import save_native
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny
from torch import Tensor

from cann_llm_quant.export.layouts import ExportOptions, export_model
from cann_llm_quant.export.verify import verify
from cann_llm_quant.export.verify_findings import Findings
from cann_llm_quant.export.verify_groups import check_codes
from cann_llm_quant.export.verify_json import repeated_keys
from cann_llm_quant.quant.scheme import ActivationScheme, QuantizedTensor, Scheme

DOWN = "model.layers.0.mlp.down_proj"
NORM = "model.layers.0.input_layernorm.weight"
KINDS = {
    "native": (Scheme("int4", True, "group", 32), None),
    "compressed-tensors": (Scheme("int4", False, "group", 32), None),
    "awq": (Scheme("int4", False, "group", 32), None),
    "gptq": (Scheme("int4", False, "group", 32), None),
    "mlx": (Scheme("int4", True, "group", 32), None),
    "ascend": (Scheme("int8", True, "channel", None), ActivationScheme("int8")),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("damages") / "m", "qwen2", num_hidden_layers=1)


@pytest.fixture(scope="module")
def outputs(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sound output in each layout, without SHA256SUMS."""
    folder = tmp_path_factory.mktemp("damages")
    found = {}
    for layout, (scheme, inputs) in KINDS.items():
        native = save_native(tiny, folder / f"{layout}-source", scheme, inputs)
        out = native if layout == "native" else export_model(native, folder / layout, layout, ExportOptions()).path
        (out / "SHA256SUMS").unlink(missing_ok=True)
        found[layout] = out
    return found


def damaged(outputs: dict[str, Path], layout: str, tmp_path: Path, change: Callable[[Path], Any]) -> Path:
    out = shutil.copytree(outputs[layout], tmp_path / "out")
    change(out)
    return out


def lines(out: Path, source: Path | None = None) -> list[str]:
    found = verify(str(out), None if source is None else str(source)).findings.faults
    return [fault.line() for fault in found]


def weights(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


def edit(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def edited(folder: Path) -> None:
        tensors = load_file(weights(folder))
        change(tensors)
        save_file(tensors, weights(folder), metadata={"format": "pt"})

    return edited


def in_json(name: str, **change: Any) -> Callable[[Path], None]:
    def edited(folder: Path) -> None:
        path = folder / name
        document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        path.write_text(json.dumps(document | change), encoding="utf-8")

    return edited


def double_a_scale(tensors: dict[str, Tensor]) -> None:
    (name,) = (n for n in tensors if n.startswith(DOWN) and n.endswith(("weight_scale", "scales")))
    tensors[name].view(-1)[5] *= 2


def flip_a_bit(tensors: dict[str, Tensor]) -> None:
    """The highest bit of one code, in whichever tensor holds them."""
    (name,) = (n for n in tensors if n in {f"{DOWN}.{end}" for end in ("weight", "weight_packed", "qweight")})
    tensors[name].view(torch.uint8).view(-1)[100] ^= 0x80


def swap_two(tensors: dict[str, Tensor]) -> None:
    for name in [n for n in tensors if ".mlp.gate_proj." in n]:
        other = name.replace("gate_proj", "up_proj")
        tensors[name], tensors[other] = tensors[other].clone(), tensors[name].clone()


def change_a_gain(tensors: dict[str, Tensor]) -> None:
    tensors[NORM][3] *= 1.5


AGAINST = [
    (double_a_scale, f"{DOWN}: 1 of"),
    (flip_a_bit, f"{DOWN}: 1 code is farther from the source's weight"),
    (swap_two, "model.layers.0.mlp.gate_proj: "),
    (change_a_gain, f"{NORM}: 1 of 64 gains are neither the source's nor undone"),
]


@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize(("change", "words"), AGAINST, ids=[change.__name__ for change, _ in AGAINST])
def test_damaged_numbers_show_against_the_float_source(
    outputs: dict[str, Path], tiny: Path, tmp_path: Path, layout: str, change: Any, words: str
) -> None:
    assert lines(outputs[layout], tiny) == []
    found = lines(damaged(outputs, layout, tmp_path, edit(change)), tiny)
    assert any(line.startswith(words) for line in found), found


def only_settings(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")


def lost_link(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").symlink_to(folder / "gone")


def foreign_index(folder: Path) -> None:
    names = dict.fromkeys(load_file(weights(folder)), weights(folder).name)
    index = {"weight_map": names | {NORM: "gone.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def more_weights(folder: Path) -> None:
    save_file({"model.extra.weight": torch.ones(4)}, folder / "more.safetensors")


def key_twice(name: str, key: str) -> Callable[[Path], None]:
    def edited(folder: Path) -> None:
        text = (folder / name).read_text(encoding="utf-8") if (folder / name).is_file() else "{}"
        rest = text.lstrip().removeprefix("{")
        comma = "" if rest.strip() == "}" else ","
        (folder / name).write_text(f'{{"{key}": 1, "\\u{ord(key[0]):04x}{key[1:]}": 2{comma}{rest}', encoding="utf-8")

    return edited


FILES = [
    ("native", in_json("config.json", num_hidden_layers=2), "says 2 layers, but no tensor is of layer 1"),
    ("native", in_json("config.json", num_hidden_layers=0), "num_hidden_layers"),
    ("native", in_json("config.json", eos_token_id=500), "eos_token_id is 500, but the model has 128 tokens"),
    ("native", in_json("config.json", bos_token_id=-1), "bos_token_id is -1, but the model has 128 tokens"),
    ("native", in_json("generation_config.json", eos_token_id=[2, 128]), "eos_token_id is 128, but the model has 128"),
    ("native", only_settings, "tokenizer_config.json: has no vocabulary beside it"),
    ("native", lost_link, "is a link to what is not there"),
    ("native", foreign_index, "places 1 tensors in gone.safetensors, which is not there"),
    ("native", more_weights, "no index names: more.safetensors"),
    ("native", lambda out: (out / "a.json").write_text("{"), "a.json: is not valid JSON"),
    (
        "native",
        key_twice("config.json", "vocab_size"),
        "config.json: holds the same key twice in one object: vocab_size",
    ),
    ("native", key_twice("inference_config.json", "note"), "the same key twice in one object: note"),
    ("gptq", key_twice("quantize_config.json", "bits"), "the same key twice in one object: bits"),
    ("ascend", key_twice("quant_model_description.json", "a"), "the same key twice in one object: a"),
    ("native", key_twice("model.safetensors.index.json", "weight_map"), "the same key twice in one object: weight_map"),
]


@pytest.mark.parametrize(("layout", "change", "words"), FILES, ids=[words[:48] for *_, words in FILES])
def test_damaged_files_are_named(
    outputs: dict[str, Path], tmp_path: Path, layout: str, change: Any, words: str
) -> None:
    assert lines(outputs[layout]) == []
    found = lines(damaged(outputs, layout, tmp_path, change))
    assert any(words in line for line in found), found


def test_a_tensor_that_a_header_names_twice_is_a_fault(outputs: dict[str, Path], tmp_path: Path) -> None:
    """The safetensors library takes the last of the two in silence, as Python's JSON does."""

    def twice(folder: Path) -> None:
        data = weights(folder).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        other = json.dumps({NORM: {"dtype": "BF16", "shape": [2, 32], "data_offsets": [0, 128]}})[:-1]
        header = (other + "," + data[9 : 8 + length].decode()).encode()
        weights(folder).write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])

    out = damaged(outputs, "native", tmp_path, twice)
    with safe_open(weights(out), framework="pt") as opened:
        assert opened.get_slice(NORM).get_shape() == [64]
    (line,) = lines(out)
    assert f"the header: holds the same key twice in one object: {NORM}" in line


def test_keys_are_compared_within_one_object_and_after_escapes() -> None:
    assert repeated_keys(b'{"a": {"b": 1}, "b": [{"a": 1}, {"a": 2}]}') == []
    assert repeated_keys(b'{"x": [{"a": 1, "\\u0061": 2, "c": 1, "c": 1, "c": 2}]}') == ["a", "c"]


def test_links_out_of_the_folder_and_a_missing_tokenizer_are_remarked(outputs: dict[str, Path], tmp_path: Path) -> None:
    def outside(folder: Path) -> None:
        shutil.move(folder / "config.json", tmp_path / "config.json")
        (folder / "config.json").symlink_to(tmp_path / "config.json")
        for file in folder.glob("tokenizer*"):
            file.unlink()

    result = verify(str(damaged(outputs, "native", tmp_path, outside)))
    assert result.passed
    assert "links lead out of the folder, which a copy may leave behind: config.json" in result.findings.remarks
    assert any("no tokenizer is in the folder" in remark for remark in result.findings.remarks)


def test_a_folder_of_the_hubs_cache_may_consist_of_links(outputs: dict[str, Path], tmp_path: Path) -> None:
    blobs = shutil.copytree(outputs["native"], tmp_path / "blobs")
    snapshot = tmp_path / "snapshots/0"
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    result = verify(str(snapshot))
    assert result.passed
    assert not any("links lead out" in remark for remark in result.findings.remarks)


def test_two_digests_of_one_file_are_a_fault(outputs: dict[str, Path], tmp_path: Path) -> None:
    out = damaged(outputs, "native", tmp_path, lambda out: None)
    (out / "SHA256SUMS").write_text(f"{'0' * 64}  a\n{'1' * 64}  a\n", encoding="utf-8")
    assert any("line 2 gives a another digest" in line for line in lines(out))


@pytest.mark.parametrize("scattered", [False, True], ids=["runs", "act-order"])
@pytest.mark.parametrize("sign", [1, -1])
def test_clipping_explains_what_no_rounding_does(scattered: bool, sign: int) -> None:
    """Weights far beyond the range are clipped to its end; the same distance inside it is damage."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (64, 128), generator=generator, dtype=torch.int8)
    order = torch.randperm(128, generator=generator) if scattered else torch.arange(128)
    group = (order // 32).to(torch.int32)
    weight = QuantizedTensor(
        codes, torch.full((64, 4), sign * 0.5), None, Scheme("int4", True, "group", 32), None, group
    )
    expected = weight.dequantize() + torch.empty(64, 128).uniform_(-0.25, 0.25, generator=generator)
    expected[codes == 7] += sign * 5.0
    findings = Findings()
    check_codes("m", weight, expected, findings)
    assert findings.faults == []
    row, column = (int(n) for n in (codes == 0).nonzero()[7])
    expected[row, column] += 1.6
    check_codes("m", weight, expected, findings)
    (fault,) = findings.faults
    assert f"(row {row}, column {column})" in fault.line()
