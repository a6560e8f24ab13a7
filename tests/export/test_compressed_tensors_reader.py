"""compressed-tensors checkpoints of other writers: llm-compressor's own files, older forms, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import is_match, match_targets
from hypothesis import given, settings
from hypothesis import strategies as st
from native_folders import save_native
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny
from torch import Tensor

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.errors import CheckpointError, InputError, UnsupportedError
from cann_llm_quant.export.compressed_tensors_config import CompressedTensorsConfig, Group
from cann_llm_quant.export.compressed_tensors_forms import unpack_words
from cann_llm_quant.export.compressed_tensors_reader import CompressedTensorsReader
from cann_llm_quant.export.kv_scales import applied_scales
from cann_llm_quant.export.kv_section import KvCache
from cann_llm_quant.export.native_reader import open_native
from cann_llm_quant.quant.pack import pack_int32
from cann_llm_quant.quant.scheme import MXFP4, MXFP8, NVFP4, ActivationScheme, Scheme

GOLDENS = Path(__file__).resolve().parents[1] / "data/goldens/llm_compressor"
OLD_PACKING = json.loads((GOLDENS / "old_packing.json").read_text(encoding="utf-8"))
Q = "model.layers.0.self_attn.q_proj"


def reader_of(folder: Path) -> CompressedTensorsReader:
    return CompressedTensorsReader(open_checkpoint(str(folder), accept_quantized=True))


def decompressed(folder: Path) -> dict[str, Tensor]:
    """Every quantized weight by compressed-tensors' own code, in float32: its product has the type of the scale."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(_known(config)).config_groups.values()
    stored = load_file(folder / "model.safetensors")
    modules = {name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")}
    return {module: _decompress(module, stored, scheme) for module in modules}


def _known(config: dict[str, Any]) -> dict[str, Any]:
    """The section without what a loader takes out of it before."""
    loader = ("sparsity_config", "transform_config", "version")
    return {key: value for key, value in config.items() if key not in loader}


def _decompress(module: str, stored: dict[str, Tensor], scheme: QuantizationScheme) -> Tensor:
    parts = {n.removeprefix(f"{module}."): t for n, t in stored.items() if n.startswith(f"{module}.weight")}
    parts["weight_scale"] = parts["weight_scale"].to(torch.float32)
    compressor = BaseCompressor.get_value_from_registry(str(scheme.format))
    return compressor.decompress(parts, scheme)["weight"].to(torch.float32)


@pytest.mark.parametrize("name", ["w4a16-gptq", "w4a16-asym-kv8", "w8a8", "fp8"])
def test_weights_of_llm_compressor_are_those_that_compressed_tensors_reads(name: str) -> None:
    expected = decompressed(GOLDENS / name)
    reader = reader_of(GOLDENS / name)
    assert reader.linears.keys() == expected.keys()
    assert len(expected) == 7
    plain = load_file(GOLDENS / "float" / "model.safetensors")
    for module, weight in expected.items():
        ours = reader.quantized(module).dequantize(torch.float32)
        assert torch.equal(ours, weight), module
        assert reader.linears[module].dtype == torch.bfloat16
        source = plain[f"{module}.weight"].to(torch.float32)
        assert float((ours - source).square().mean() / source.square().mean()) < 0.03


def test_inputs_of_llm_compressor_are_read() -> None:
    assert reader_of(GOLDENS / "w8a8").linears[Q].activations == ActivationScheme("int8")
    fp8 = reader_of(GOLDENS / "fp8")
    inputs = fp8.inputs(Q)
    stored = load_file(GOLDENS / "fp8" / "model.safetensors")[f"{Q}.input_scale"]
    assert inputs is not None
    assert inputs.scheme == ActivationScheme("fp8_e4m3", True, False, "tensor")
    assert inputs.fixed is not None
    assert torch.equal(inputs.fixed.scale, stored)
    assert reader_of(GOLDENS / "w4a16-gptq").inputs(Q) is None


def test_c39_kv_scheme_of_llm_compressor_is_read_with_its_scales() -> None:
    reader = reader_of(GOLDENS / "w4a16-asym-kv8")
    (layer,) = reader.kv_cache.layer_schemes()
    assert layer.k is not None
    assert layer.k.label() == "fp8_e4m3-tensor"
    assert reader.kv_cache.scales == "model"
    (scales,) = applied_scales(open_checkpoint(str(GOLDENS / "w4a16-asym-kv8"), accept_quantized=True), 1)
    stored = load_file(GOLDENS / "w4a16-asym-kv8" / "model.safetensors")["model.layers.0.self_attn.k_scale"]
    assert scales.k_scale is not None
    assert torch.equal(scales.k_scale.flatten(), stored.to(torch.float32))


TARGETS = ["Linear", Q, "model.layers.0", r"re:.*self_attn.*", r"re:.*q_proj$", r"re:model\.layers\.1.*", "re:q_proj"]
MODULES = [Q, "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"]


@given(
    st.lists(st.sampled_from(TARGETS), min_size=1, max_size=4, unique=True),
    st.lists(st.sampled_from(TARGETS), max_size=1),
    st.sampled_from(MODULES),
)
@settings(max_examples=150, deadline=None)
def test_targets_and_ignore_choose_as_compressed_tensors_does(targets: list[str], ignore: list[str], name: str) -> None:
    linear = torch.nn.Linear(1, 1)
    theirs = [] if is_match(name, linear, ignore) else match_targets(name, linear, targets)
    groups = tuple(Group(target, (target,), None, Scheme(), None) for target in targets)
    ours = CompressedTensorsConfig(groups, tuple(ignore), KvCache(), None).group_of(name)
    assert (ours.name if ours else None) == (theirs[0] if theirs else None)


WRITTEN = [
    (Scheme("int2", True, "group", 32), None),
    (Scheme("int3", False, "group", 32), None),
    (Scheme("int5", True, "channel", None), None),
    (Scheme("int8", True, "channel", None), ActivationScheme("int8")),
    (Scheme("int4", True, "tensor", None), None),
    (Scheme("fp8_e4m3", True, "tile", None), ActivationScheme("fp8_e4m3", True, True, "group", 32)),
    (Scheme("fp8_e4m3", True, "group", 32), None),
    (MXFP4, ActivationScheme("fp4_e2m1", True, True, "group", 32)),
    (MXFP8, None),
    (NVFP4, None),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("reader") / "m", num_hidden_layers=1, intermediate_size=160)


@pytest.mark.parametrize(("scheme", "inputs"), WRITTEN, ids=lambda v: v.label() if isinstance(v, Scheme) else "")
def test_every_scheme_reads_the_same_without_the_inference_config(
    tiny: Path, tmp_path: Path, scheme: Scheme, inputs: ActivationScheme | None
) -> None:
    out = save_native(tiny, tmp_path / "out", scheme, inputs)
    reader = reader_of(out)
    with open_native(out) as native:
        assert reader.linears.keys() == native.modules
        for module in reader.linears:
            theirs, ours = native.quantized(module), reader.quantized(module)
            assert theirs is not None
            assert torch.equal(ours.codes.view(torch.int8), theirs.codes.view(torch.int8))
            assert torch.equal(ours.dequantize(), theirs.dequantize())
            assert reader.linears[module].activations == inputs


def test_mixed_groups_and_experts_are_told_apart(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "m", "qwen3_moe", num_hidden_layers=1)
    first = save_native(model, tmp_path / "a", Scheme("int4", True, "group", 32))
    second = save_native(model, tmp_path / "b", Scheme("int8", True, "channel", None), ActivationScheme("int8"))
    stored, other = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    kept = {name: tensor for name, tensor in stored.items() if ".self_attn." not in name}
    kept |= {name: tensor for name, tensor in other.items() if ".self_attn." in name}
    save_file(kept, first / "model.safetensors")
    sections = [json.loads((out / "config.json").read_text("utf-8"))["quantization_config"] for out in (first, second)]
    experts, attention = (section["config_groups"]["group_0"] for section in sections)
    experts["targets"] = [r"re:.*\.experts\.\d+\..*"]
    config = edit_config(first, format="mixed-precision", config_groups={"group_0": experts, "group_1": attention})
    assert config["ignore"] == ["lm_head"]
    reader = reader_of(first)
    schemes = {module: linear.scheme.label() for module, linear in reader.linears.items()}
    assert schemes[Q] == "int8-sym-channel"
    assert schemes["model.layers.0.mlp.experts.3.down_proj"] == "int4-sym-g32"
    assert "model.layers.0.mlp.gate" not in schemes
    assert reader.linears["model.layers.0.mlp.experts.3.down_proj"].activations is None
    assert all(reader.quantized(module).shape == reader.linears[module].shape for module in schemes)


@pytest.mark.parametrize("bits", [3, 5, 6])
def test_words_of_versions_before_0_18_hold_whole_codes(bits: int) -> None:
    words = torch.tensor(OLD_PACKING[str(bits)]["weight_packed"], dtype=torch.int32)
    codes = (torch.arange(128) % (1 << bits) - (1 << (bits - 1))).to(torch.int8)
    assert torch.equal(unpack_words(words, bits, 64), codes.view(2, 64))


def stretched(folder: Path, bits: int) -> dict[str, Tensor]:
    """An asymmetric model of one linear [64, 64] in groups of 32, all of whose codes count upwards."""
    half = 1 << (bits - 1)
    codes = (torch.arange(64 * 64) % (1 << bits) - half).to(torch.int8).view(64, 64)
    zeros = (torch.arange(64 * 2) % (1 << bits) - half).to(torch.int8).view(64, 2)
    shutil.copytree(GOLDENS / "w4a16-asym-kv8", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if "weight_" not in name or name.startswith(Q)}
    tensors[f"{Q}.weight_packed"] = pack_int32(codes, bits)
    tensors[f"{Q}.weight_zero_point"] = pack_int32(zeros, bits, dim=0)
    save_file(tensors, folder / "model.safetensors")
    section = json.loads((folder / "config.json").read_text("utf-8"))["quantization_config"]
    section["config_groups"]["group_0"]["weights"]["num_bits"] = bits
    edit_config(folder, config_groups=section["config_groups"])
    return tensors


def edit_config(folder: Path, **section: Any) -> dict[str, Any]:
    """Fields of the quantization section replaced."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["quantization_config"] |= section
    path.write_text(json.dumps(config), encoding="utf-8")
    return config["quantization_config"]


@pytest.mark.parametrize("bits", [3, 5, 6])
def test_old_and_new_packing_give_the_same_codes(tmp_path: Path, bits: int) -> None:
    """Zero points [64, 2] in the golden count along rows of 2; the weight's first two rows are the golden's."""
    tensors = stretched(tmp_path / "new", bits)
    new = reader_of(tmp_path / "new").quantized(Q)
    golden = {name: torch.tensor(words, dtype=torch.int32) for name, words in OLD_PACKING[str(bits)].items()}
    period = len(golden["weight_packed"])
    first = golden["weight_packed"][:1]
    assert torch.equal(unpack_words(first, bits, 64)[0], new.codes[0])
    rows = [new.codes[row].tolist() for row in range(64)]
    assert period == 2
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    old = tensors | {
        f"{Q}.weight_packed": torch.tensor([old_words(row, bits) for row in rows], dtype=torch.int32),
        f"{Q}.weight_zero_point": golden["weight_zero_point"],
    }
    save_file(old, tmp_path / "old" / "model.safetensors")
    read = reader_of(tmp_path / "old").quantized(Q)
    assert torch.equal(read.codes, new.codes)
    assert read.zero_point is not None
    assert new.zero_point is not None
    assert torch.equal(read.zero_point, new.zero_point)


def old_words(codes: list[int], bits: int) -> list[int]:
    """Whole codes into words one by one, as signed 32-bit numbers."""
    words = []
    for start in range(0, len(codes), 32 // bits):
        word = 0
        for place, code in enumerate(codes[start : start + 32 // bits]):
            word |= (code + (1 << (bits - 1))) << (bits * place)
        words.append(word - (1 << 32) if word >= 1 << 31 else word)
    return words


def test_c18_unpacked_zero_points_are_refused_with_both_shapes(tmp_path: Path) -> None:
    tensors = stretched(tmp_path / "m", 4)
    tensors[f"{Q}.weight_zero_point"] = torch.zeros(64, 2, dtype=torch.int8)
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"is int8 \[64, 2\], expected int32 \[8, 2\].*not packed"):
        reader_of(tmp_path / "m")


def test_c18_zero_points_packed_along_the_groups_are_refused(tmp_path: Path) -> None:
    tensors = stretched(tmp_path / "m", 4)
    tensors[f"{Q}.weight_zero_point"] = torch.zeros(64, 1, dtype=torch.int32)
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"int32 \[64, 1\], expected int32 \[8, 2\].*packed along the groups"):
        reader_of(tmp_path / "m")


def test_c20_stored_group_indices_are_honoured(tmp_path: Path) -> None:
    """Columns scattered over groups: each is dequantized with its own group's numbers, one by one."""
    tensors = stretched(tmp_path / "m", 4)
    index = (torch.arange(64, dtype=torch.int32) * 7 % 64) // 32
    tensors[f"{Q}.weight_g_idx"] = index
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    weight = reader_of(tmp_path / "m").quantized(Q)
    dense, scale, zero = weight.dequantize(), tensors[f"{Q}.weight_scale"].tolist(), weight.zero_point
    assert zero is not None
    for row, column in [(0, 0), (3, 1), (63, 63), (20, 40)]:
        group = int(index[column])
        expected = (int(weight.codes[row, column]) - int(zero[row, group])) * scale[row][group]
        assert float(dense[row, column]) == pytest.approx(expected, rel=1e-6)
    tensors[f"{Q}.weight_g_idx"] = torch.full((64,), -1, dtype=torch.int32)
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    assert reader_of(tmp_path / "m").quantized(Q).group_index is None
    tensors[f"{Q}.weight_g_idx"] = index + 1
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    with pytest.raises(CheckpointError, match="names groups from 1 to 2, the scales have 2"):
        reader_of(tmp_path / "m").quantized(Q)


def test_act_order_without_indices_is_refused(tmp_path: Path) -> None:
    stretched(tmp_path / "m", 4)
    section = json.loads((tmp_path / "m/config.json").read_text("utf-8"))["quantization_config"]
    section["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    edit_config(tmp_path / "m", config_groups=section["config_groups"])
    with pytest.raises(CheckpointError, match="weight_g_idx is missing"):
        reader_of(tmp_path / "m")


def weights(**fields: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32} | fields}
    return {"config_groups": {"group_0": group}}


def with_group(**fields: Any) -> dict[str, Any]:
    section = weights()
    section["config_groups"]["group_0"] |= fields
    return section


REFUSED = [
    ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    ({"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "hadamard"),
    ({"quantization_status": "frozen"}, "save_compressed=True"),
    (with_group(format="marlin-24"), "marlin-24"),
    (with_group(format="mxfp6-pack-quantized"), "mxfp6"),
    (with_group(output_activations={"num_bits": 8}), "outputs of linears"),
    (weights(num_bits=7), "int of 7 bits"),
    (weights(type="float", num_bits=8, strategy="block", block_structure=[64, 64], group_size=None), "64"),
    (with_group(weights=None, input_activations={"num_bits": 8}), "inputs are quantized without weights"),
    (with_group(input_activations={"num_bits": 8, "strategy": "channel", "dynamic": True}), "int8 by channel"),
    (with_group(input_activations={"num_bits": 8, "strategy": "token", "dynamic": False}), "static activation"),
    ({"kv_cache_scheme": {"num_bits": 4, "strategy": "tensor"}}, "KV cache in int4"),
    ({"config_groups": {"W4A16": ["Linear"]}}, "preset"),
]


@pytest.mark.parametrize(("section", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_ours_cannot_hold_is_refused_by_name(tmp_path: Path, section: dict[str, Any], words: str) -> None:
    shutil.copytree(GOLDENS / "w4a16-gptq", tmp_path / "m")
    edit_config(tmp_path / "m", **section)
    with pytest.raises(UnsupportedError, match=words) as caught:
        reader_of(tmp_path / "m")
    assert "\n" not in str(caught.value)


DAMAGES = [
    (lambda t: t.pop(f"{Q}.weight_scale"), r"q_proj.weight_scale is missing"),
    (lambda t: t.pop(f"{Q}.weight_shape"), r"weight_shape must hold two numbers"),
    (lambda t: t.pop(f"{Q}.weight_packed"), r"weight is in no file"),
    (lambda t: t.update({f"{Q}.weight_scale": torch.ones(64, 3)}), r"\[64, 3\], expected \[64, 2\]"),
    (lambda t: t.update({f"{Q}.weight_shape": torch.tensor([32, 64])}), r"says 32 x 64, but .* has 64 rows"),
    (lambda t: t.update({f"{Q}.weight_packed": torch.zeros(64, 9, dtype=torch.int32)}), r"expected int32 \[64, 8\]"),
    (lambda t: t.update({f"{Q}.weight_packed": torch.zeros(64, 8)}), r"no matrix in int4"),
    (lambda t: t.update({"model.x.weight": torch.zeros(2, 2, dtype=torch.int8)}), r"model.x.weight_scale is missing"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_damaged_tensors_are_refused_before_any_weight_is_read(tmp_path: Path, damage: Any, words: str) -> None:
    shutil.copytree(GOLDENS / "w4a16-gptq", tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    with pytest.raises(InputError, match=words):
        reader_of(tmp_path / "m")


def test_c22_codes_that_the_config_does_not_speak_of_are_refused(tmp_path: Path) -> None:
    shutil.copytree(GOLDENS / "w4a16-gptq", tmp_path / "m")
    edit_config(tmp_path / "m", ignore=["lm_head", "re:.*q_proj"])
    with pytest.raises(CheckpointError, match="q_proj is stored in codes, but no target"):
        reader_of(tmp_path / "m")
