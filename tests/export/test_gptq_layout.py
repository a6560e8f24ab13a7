"""GPTQ's layout against a literal reading of its definition, word by word, and against its published words."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from encoded_folders import exact_scales, save_encoded
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from stored_linears import same, save_stored
from tiny_models import save_tiny
from torch import Tensor

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.export.gptq import GptqEncoder, encode
from cann_llm_quant.export.gptq_reader import GptqReader
from cann_llm_quant.quant.scheme import MXFP4, ActivationScheme, QuantizedTensor, Scheme, scheme_for


def random_weight(scheme: Scheme, out: int, columns: int, seed: int = 0, lowest_zero: int = 1) -> QuantizedTensor:
    """Random codes and scales; zero points from `qmin + lowest_zero` on."""
    random = torch.Generator().manual_seed(seed)
    groups = scheme.scale_shape(out, columns)
    codes = torch.randint(scheme.qmin, scheme.qmax + 1, (out, columns), generator=random).to(torch.int8)
    zeros = torch.randint(scheme.qmin + lowest_zero, scheme.qmax + 1, groups, generator=random).to(torch.int8)
    scale = torch.rand(groups, generator=random) + 0.01
    return exact_scales(QuantizedTensor(codes, scale, None if scheme.symmetric else zeros, scheme))


def field(words: list[int], index: int, bits: int) -> int:
    """Bits [index * bits, (index + 1) * bits) of 32-bit words, counted from the lowest of the first."""
    stream = sum((word & 0xFFFFFFFF) << (32 * place) for place, word in enumerate(words))
    return stream >> (index * bits) & ((1 << bits) - 1)


def literal_weight(tensors: dict[str, Tensor], bits: int, version: int) -> Tensor:
    """The definition, one element at a time, in float64."""
    qweight, qzeros = tensors["qweight"], tensors["qzeros"]
    scales, index = tensors["scales"].to(torch.float64), tensors["g_idx"].tolist()
    out = qweight.shape[1]
    weight = torch.empty(out, len(index), dtype=torch.float64)
    for n in range(out):
        words = qweight[:, n].tolist()
        zeros = [(field(row, n, bits) + (2 - version)) % (1 << bits) for row in qzeros.tolist()]
        for k, group in enumerate(index):
            weight[n, k] = (field(words, k, bits) - zeros[group]) * scales[group, n]
    return weight


def save_folder(folder: Path, tensors: dict[str, Tensor], **section: object) -> Path:
    return save_stored(folder, tensors, "quantization_config", {"quant_method": "gptq", **section})


def read(folder: Path, module: str = "m") -> QuantizedTensor:
    with open_checkpoint(str(folder), accept_quantized=True) as checkpoint:
        return GptqReader(checkpoint).quantized(module)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", [1, 2])
def test_stored_words_mean_the_weight(bits: int, symmetric: bool, version: Literal[1, 2]) -> None:
    weight = random_weight(scheme_for(bits, 16, symmetric), 32, 64)
    tensors = {name.removeprefix("m."): tensor for name, tensor in encode("m", weight, version).items()}
    assert torch.equal(literal_weight(tensors, bits, version), weight.dequantize(torch.float64))
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "qweight": torch.int32,
        "qzeros": torch.int32,
        "scales": torch.float16,
        "g_idx": torch.int32,
    }


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4, 5, 6, 8]),
    symmetric=st.booleans(),
    version=st.sampled_from([1, 2]),
    rows=st.integers(1, 3),
    columns=st.integers(1, 4),
    size=st.sampled_from([-1, 16, 32]),
    seed=st.integers(0, 1000),
)
def test_reading_what_was_written_gives_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory,
    bits: int,
    symmetric: bool,
    version: Literal[1, 2],
    rows: int,
    columns: int,
    size: int,
    seed: int,
) -> None:
    scheme = scheme_for(bits, size, symmetric)
    weight = random_weight(scheme, 32 * rows, 32 * columns, seed, lowest_zero=2 - version)
    form = "gptq" if version == 1 else "gptq_v2"
    folder = tmp_path_factory.mktemp("gptq")
    save_folder(folder, encode("m", weight, version), group_size=size, sym=symmetric, checkpoint_format=form)
    assert same(read(folder), weight)


@pytest.mark.parametrize(("version", "word"), [(1, 0x77777777), (2, 0x88888888)])
def test_c17_symmetric_zero_words(version: Literal[1, 2], word: int) -> None:
    tensors = encode("m", random_weight(scheme_for(4, 32, True), 32, 64), version)
    assert {int(value) & 0xFFFFFFFF for value in tensors["m.qzeros"].flatten()} == {word}


@pytest.mark.parametrize("stated", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize("version", [1, 2])
def test_c17_a_symmetric_linear_tells_its_version_whatever_the_field_says(
    tmp_path: Path, stated: str | None, version: Literal[1, 2]
) -> None:
    weight = random_weight(scheme_for(4, 32, True), 32, 64)
    section: dict[str, object] = {"sym": True, "group_size": 32}
    section |= {} if stated is None else {"checkpoint_format": stated}
    assert same(read(save_folder(tmp_path / "f", encode("m", weight, version), **section)), weight)


@pytest.mark.parametrize(("stated", "version"), [("gptq", 1), (None, 1), ("gptq_v2", 2)])
def test_c17_an_asymmetric_linear_follows_the_field(tmp_path: Path, stated: str | None, version: int) -> None:
    tensors = encode("m", random_weight(scheme_for(4, 32, False), 32, 64), 1)
    section: dict[str, object] = {"sym": False, "group_size": 32}
    section |= {} if stated is None else {"checkpoint_format": stated}
    weight = read(save_folder(tmp_path / "f", tensors, **section))
    parts = {name.removeprefix("m."): tensor for name, tensor in tensors.items()}
    assert torch.equal(weight.dequantize(torch.float64), literal_weight(parts, 4, version))


def test_c17_v1_and_v2_zeros_in_the_side_file(tmp_path: Path) -> None:
    tensors = encode("m", random_weight(scheme_for(4, 32, False), 32, 64), 2)
    folder = save_folder(tmp_path / "f", tensors, bits=4)
    side = folder / "quantize_config.json"
    side.write_text(json.dumps({"checkpoint_format": "gptq_v2", "sym": False}), encoding="utf-8")
    assert torch.equal(read(folder).zero_point, random_weight(scheme_for(4, 32, False), 32, 64).zero_point)
    save_folder(folder, tensors, checkpoint_format="gptq")
    with pytest.raises(CheckpointError, match=r"checkpoint_format is 'gptq', but quantize_config.json says 'gptq_v2'"):
        read(folder)


def test_zero_points_that_contradict_sym_are_refused(tmp_path: Path) -> None:
    tensors = encode("m", random_weight(scheme_for(4, 32, False), 32, 64), 1)
    with pytest.raises(CheckpointError, match=r"the config says sym, but m\.qzeros holds"):
        read(save_folder(tmp_path / "f", tensors, sym=True))


def test_version_1_refuses_the_zero_point_that_it_cannot_store() -> None:
    weight = random_weight(scheme_for(4, 32, False), 32, 64, lowest_zero=0)
    with pytest.raises(UnsupportedError, match=r"layers\.0\.q has a group whose zero point .* export to gptq_v2"):
        encode("layers.0.q", weight, 1)
    assert "m.qzeros" in encode("m", weight, 2)


def test_c20_scattered_columns_keep_their_groups(tmp_path: Path) -> None:
    scheme = scheme_for(4, 32, False)
    weight = random_weight(scheme, 64, 128)
    index = torch.randperm(128, generator=torch.Generator().manual_seed(3)).to(torch.int32) // 32
    scattered = QuantizedTensor(weight.codes, weight.scale, weight.zero_point, scheme, group_index=index)
    with pytest.raises(UnsupportedError, match="scattered over groups; write it with act order"):
        GptqEncoder(1).encode("m", scattered, None, None)
    tensors = GptqEncoder(1, act_order=True).encode("m", scattered, None, None)
    loaded = read(save_folder(tmp_path / "f", tensors, sym=False, group_size=32, desc_act=True))
    assert same(loaded, scattered)
    parts = {name.removeprefix("m."): tensor for name, tensor in tensors.items()}
    assert torch.equal(loaded.dequantize(torch.float64), literal_weight(parts, 4, 1))


def test_c20_groups_of_unequal_sizes_are_read(tmp_path: Path) -> None:
    tensors = encode("m", random_weight(scheme_for(4, 32, False), 32, 64), 2)
    tensors["m.g_idx"] = torch.tensor([0] * 50 + [1] * 14, dtype=torch.int32)
    weight = read(save_folder(tmp_path / "f", tensors, sym=False, group_size=32, checkpoint_format="gptq_v2"))
    parts = {name.removeprefix("m."): tensor for name, tensor in tensors.items()}
    assert torch.equal(weight.dequantize(torch.float64), literal_weight(parts, 4, 2))


def test_a_short_last_group_is_cut_into_the_common_divisor(tmp_path: Path) -> None:
    tensors = encode("m", random_weight(scheme_for(4, 32, False), 32, 96), 2)
    for part in ("qzeros", "scales"):
        tensors[f"m.{part}"] = tensors[f"m.{part}"][:2].contiguous()
    tensors["m.g_idx"] = torch.arange(96, dtype=torch.int32) // 64
    weight = read(save_folder(tmp_path / "f", tensors, sym=False, group_size=64, checkpoint_format="gptq_v2"))
    assert weight.scheme == scheme_for(4, 32, False)
    parts = {name.removeprefix("m."): tensor for name, tensor in tensors.items()}
    assert torch.equal(weight.dequantize(torch.float64), literal_weight(parts, 4, 2))


def test_files_without_g_idx_have_groups_of_neighbours(tmp_path: Path) -> None:
    weight = random_weight(scheme_for(4, 32, False), 32, 64)
    tensors = encode("m", weight, 1)
    del tensors["m.g_idx"]
    assert same(read(save_folder(tmp_path / "f", tensors, sym=False)), weight)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("qzeros", lambda t: t[:, :3].contiguous(), "those of no GPTQ linear of 2, 3, 4, 5, 6, 8 bits"),
        ("scales", lambda t: t[:1].contiguous(), "those of no GPTQ linear"),
        ("scales", lambda t: t.to(torch.int32), "expected a float type"),
        ("scales", lambda t: t.to(torch.float8_e4m3fn), "expected a float type of 16 or 32 bits"),
        ("qweight", lambda t: t.to(torch.int64), r"qweight is torch\.int64, expected torch\.int32"),
        ("g_idx", lambda t: t[:5].contiguous(), r"g_idx is torch\.int32 \[5\], expected int32 \[64\]"),
        ("g_idx", lambda t: t + 1, "names groups 1 to 2 of 2; the file is damaged"),
        ("scales", lambda t: t * torch.nan, "holds NaN"),
    ],
)
def test_damaged_linears_are_refused_in_one_line(tmp_path: Path, part: str, change: object, message: str) -> None:
    tensors = encode("m", random_weight(scheme_for(4, 32, False), 32, 64), 1)
    assert callable(change)
    tensors[f"m.{part}"] = change(tensors[f"m.{part}"])
    with pytest.raises(CheckpointError, match=message) as caught:
        read(save_folder(tmp_path / "f", tensors, sym=False, group_size=32))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "error", "message"),
    [
        ({"checkpoint_format": "gptq_p"}, UnsupportedError, "checkpoint_format 'gptq_p' is not read"),
        ({"checkpoint_format": "marlin"}, UnsupportedError, "'marlin' is not read"),
        ({"is_marlin_format": True}, UnsupportedError, "Marlin's layout is not read"),
        ({"pack_dtype": "int8"}, UnsupportedError, "pack_dtype is 'int8'"),
        ({"group_size": 0}, CheckpointError, "group_size is 0"),
        ({"group_size": 0.5}, CheckpointError, "group_size must be a whole number"),
        ({"sym": "yes"}, CheckpointError, "sym must be true or false"),
        ({"dynamic": {"+:[": {"bits": 8}}}, CheckpointError, "is no regular expression"),
        ({"dynamic": {"a": 8}}, CheckpointError, "must be an object"),
    ],
)
def test_configs_that_cannot_be_meant(tmp_path: Path, section: dict, error: type[Exception], message: str) -> None:
    tensors = encode("m", random_weight(scheme_for(4, 32, False), 32, 64), 1)
    with pytest.raises(error, match=message):
        read(save_folder(tmp_path / "f", tensors, **section))


def test_missing_zero_points_are_named(tmp_path: Path) -> None:
    tensors = encode("m", random_weight(scheme_for(4, 32, True), 32, 64), 1)
    del tensors["m.qzeros"]
    with pytest.raises(CheckpointError, match=r"tensor m\.qzeros is missing"):
        read(save_folder(tmp_path / "f", tensors, sym=True))


def test_scales_and_biases_beyond_float16_are_refused() -> None:
    weight = random_weight(scheme_for(4, 32, True), 32, 64)
    large = QuantizedTensor(weight.codes, weight.scale.float() * 1e6, None, weight.scheme)
    with pytest.raises(UnsupportedError, match=r"m\.scales holds .* beyond float16"):
        encode("m", large, 1)
    with pytest.raises(UnsupportedError, match=r"m\.bias holds 1e\+06, beyond float16"):
        encode("m", weight, 1, torch.full((32,), 1e6))


@pytest.mark.parametrize(
    ("scheme", "activations", "shape", "message"),
    [
        (scheme_for(5, 32, True), None, (64, 64), "has 5-bit codes, and GPTQ holds 2, 3, 4 or 8 bits"),
        (MXFP4, None, (64, 64), "is stored as mxfp4, and GPTQ holds integers only"),
        (scheme_for(4, 32, True), ActivationScheme(), (64, 64), "has inputs in int8, and GPTQ stores weights only"),
        (scheme_for(4, 32, True), None, (64, 48), "is 64 x 48, and GPTQ packs rows and columns in runs of 32"),
        (scheme_for(4, 8, True), None, (64, 64), "has groups of 8, and GPTQ's readers take 16, 32"),
        (Scheme("int4", True, "tile", None), None, (64, 64), "has a scale for each tile"),
    ],
)
def test_what_the_layout_cannot_hold_is_said_before_work(
    scheme: Scheme, activations: ActivationScheme | None, shape: tuple[int, int], message: str
) -> None:
    encoder = GptqEncoder(2)
    assert message in (encoder.refusal("m", scheme, activations, shape) or "")
    nearest = encoder.nearest(scheme, shape)
    assert (nearest is None) == (shape[1] % 32 != 0)
    assert nearest is None or encoder.refusal("m", nearest, None, shape) is None
    assert encoder.refusal("m", scheme_for(3, -1, False), None, (64, 96)) is None


def mixed(module: str) -> Scheme | None:
    """Eight bits for one matrix of the second layer and the head, float for one, 4 bits for the others."""
    if module.endswith(("layers.1.mlp.down_proj", "lm_head")):
        return scheme_for(8, -1, False)
    return None if module.endswith("layers.0.self_attn.o_proj") else scheme_for(4, 32, True)


def test_mixed_widths_are_written_as_overrides_and_read_back(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "float", "qwen2", tie_word_embeddings=False)
    encoder = GptqEncoder(2)
    model, weights = save_encoded(source, tmp_path / "out", encoder, mixed)
    warnings = encoder.check(model)
    assert [warning.partition(":")[0] for warning in warnings] == [
        "schemes differ between linears",
        "lm_head is in codes",
    ]
    section = json.loads((tmp_path / "out" / "quantize_config.json").read_text(encoding="utf-8"))
    assert section == json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    eight = {"bits": 8, "group_size": -1, "sym": False}
    assert section["dynamic"] == {
        r"-:^model\.layers\.0\.self_attn\.o_proj$": {},
        r"+:^model\.layers\.1\.mlp\.down_proj$": eight,
        r"+:^lm_head$": eight,
    }
    assert (section["bits"], section["sym"], section["lm_head"], section["desc_act"]) == (4, True, True, False)
    with open_checkpoint(str(tmp_path / "out"), accept_quantized=True) as checkpoint:
        reader = GptqReader(checkpoint)
        assert reader.layout == "gptq_v2"
        assert all(same(reader.quantized(module), weight) for module, weight in weights.items())
        assert set(reader.linears) == set(weights)
        assert checkpoint.tensors["model.layers.0.self_attn.q_proj.bias"].dtype == torch.float16
        assert checkpoint.tensors["model.norm.weight"].dtype == torch.bfloat16


def test_linears_left_in_float_everywhere_are_named_for_transformers(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "float")
    model, _ = save_encoded(
        source,
        tmp_path / "out",
        GptqEncoder(1),
        lambda module: scheme_for(4, 32, True) if module.endswith(("q_proj", "k_proj", "v_proj")) else None,
    )
    assert GptqEncoder(1).check(model) == []
    section = json.loads((tmp_path / "out" / "quantize_config.json").read_text(encoding="utf-8"))
    assert section["modules_in_block_to_quantize"] == [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]]
    assert r"-:^model\.layers\.1\.mlp\.gate_up_proj$" in section["dynamic"]


def test_asymmetric_version_1_and_divided_fusion_groups_are_warned_of(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "float")
    encoder = GptqEncoder(1)

    def scheme_of(module: str) -> Scheme | None:
        if module.endswith("lm_head"):
            return None
        return scheme_for(8, -1, True) if module.endswith("layers.0.mlp.up_proj") else scheme_for(4, 32, True)

    model, _ = save_encoded(source, tmp_path / "out", encoder, scheme_of)
    assert any("gate_proj and model.layers.0.mlp.up_proj differ in scheme" in text for text in encoder.check(model))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" in stored


def test_an_embedding_in_codes_becomes_float(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "float")
    embedding = "model.embed_tokens"
    model, _ = save_encoded(source, tmp_path / "out", GptqEncoder(2), lambda module: scheme_for(4, 32, True))
    model = replace(model, schemes={**model.schemes, embedding: scheme_for(8, -1, True)})
    with pytest.raises(UnsupportedError, match=r"model\.embed_tokens is quantized, and GPTQ stores only linears in"):
        GptqEncoder(2).check(model)
    encoder = GptqEncoder(2, floats=frozenset({embedding}))
    assert encoder.check(model) == [
        "written in float, where GPTQ's readers take no codes: model.embed_tokens",
        "lm_head is in codes: GPTQModel, vLLM and SGLang read that, transformers loads a random head instead",
    ]
    assert encoder.refusal(embedding, model.schemes[embedding], None, (128, 64)) is None
    weight = random_weight(scheme_for(8, -1, True), 128, 64)
    stored = encoder.encode(embedding, weight, None, None)
    assert list(stored) == [f"{embedding}.weight"]
    assert torch.equal(stored[f"{embedding}.weight"], weight.dequantize(torch.float16))
    section = json.loads(encoder.files(model, {})["quantize_config.json"])
    assert (section["bits"], section["dynamic"]) == (4, {})
