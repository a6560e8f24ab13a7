"""The native layout against compressed-tensors' own decompressor, and what a broken file is told."""

import json

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.export import native
from cann_llm_quant.export.inference_config import schema, shipped_schema
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme


def random_weight(out: int, columns: int, bits: int, group: int | None, symmetric: bool, seed: int) -> QuantizedTensor:
    generator = torch.Generator().manual_seed(seed)
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    groups = 1 if group is None else columns // group
    codes = torch.randint(low, high, (out, columns), generator=generator, dtype=torch.int8)
    scale = (torch.rand(out, groups, generator=generator) + 0.1).to(torch.bfloat16)
    zeros = None if symmetric else torch.randint(low, high, (out, groups), generator=generator, dtype=torch.int8)
    scheme = Scheme(f"int{bits}", symmetric, "channel" if group is None else "group", group)  # type: ignore[arg-type]
    return QuantizedTensor(codes, scale, zeros, scheme)


weights = st.builds(
    lambda out, groups, bits, group, symmetric, seed: random_weight(
        out, groups * group if group else groups * 8, bits, group, symmetric, seed
    ),
    st.integers(1, 40),
    st.integers(1, 4),
    st.sampled_from([4, 8]),
    st.sampled_from([16, 32, 40, None]),
    st.booleans(),
    st.integers(0, 99),
)


@settings(max_examples=60, deadline=None)
@given(weights)
def test_compressed_tensors_decompresses_the_same_matrix(weight: QuantizedTensor) -> None:
    stored = {name.removeprefix("m."): tensor for name, tensor in native.encode("m", weight).items()}
    scheme = weight.scheme
    arguments = QuantizationArgs(
        num_bits=scheme.bits,
        type="int",
        symmetric=scheme.symmetric,
        strategy=scheme.strategy,
        group_size=scheme.group_size,
        dynamic=False,
    )
    theirs = PackedQuantizationCompressor.decompress(stored, QuantizationScheme(targets=["Linear"], weights=arguments))
    expected = weight.dequantize(torch.bfloat16)
    assert torch.equal(theirs["weight"].to(torch.bfloat16), expected)


@settings(max_examples=60, deadline=None)
@given(weights)
def test_decode_inverts_encode(weight: QuantizedTensor) -> None:
    back = native.decode("m", native.encode("m", weight), [weight.scheme.bits])
    assert torch.equal(back.codes, weight.codes)
    assert torch.equal(back.scale, weight.scale)
    assert back.scheme.symmetric == weight.scheme.symmetric
    if weight.zero_point is not None:
        assert back.zero_point is not None
        assert torch.equal(back.zero_point, weight.zero_point)


def test_c18_c19_golden_words() -> None:
    """int4 -8..7 as offset-binary nibbles, lowest first; zero points packed along the rows."""
    codes = torch.arange(-8, 8, dtype=torch.int8)
    weight = QuantizedTensor(
        codes.repeat(16, 1), torch.ones(16, 1), codes.view(16, 1).clone(), Scheme("int4", False, "channel", None)
    )
    stored = native.encode("m", weight)
    words = [0x76543210, 0xFEDCBA98 - (1 << 32)]
    assert stored["m.weight_packed"][0].tolist() == words
    assert stored["m.weight_zero_point"].tolist() == [[words[0]], [words[1]]]
    assert stored["m.weight_shape"].tolist() == [16, 16]


@pytest.mark.parametrize("broken", ["weight_scale", "weight_shape"])
def test_missing_tensor_is_named(broken: str) -> None:
    stored = native.encode("m", random_weight(8, 32, 4, 16, True, 0))
    del stored[f"m.{broken}"]
    with pytest.raises(CheckpointError, match=f"m.{broken} is missing"):
        native.decode("m", stored)


def test_c18_zero_points_of_the_wrong_shape_are_refused_with_both_shapes() -> None:
    stored = native.encode("m", random_weight(8, 32, 4, 16, False, 0))
    stored["m.weight_zero_point"] = torch.zeros(8, 2, dtype=torch.int32)
    with pytest.raises(CheckpointError, match=r"is \[8, 2\], expected \[1, 2\]"):
        native.decode("m", stored)


def test_quantization_config_is_one_that_compressed_tensors_accepts() -> None:
    g64, g128 = Scheme("int4", True, "group", 64), Scheme("int4", True, "group", 128)
    schemes = {f"model.layers.{i}.mlp.{n}_proj": g64 if n == "up" else g128 for i in range(2) for n in ("up", "down")}
    config = native.quantization_config(schemes, ["lm_head"])
    parsed = QuantizationConfig.model_validate(config)
    assert [group.targets for group in parsed.config_groups.values()] == [
        [r"re:.*\.mlp\.up_proj$"],
        [r"re:.*\.mlp\.down_proj$"],
    ]
    assert parsed.ignore == ["lm_head"]
    schemes["model.layers.1.mlp.up_proj"] = g128
    targets = [g["targets"] for g in native.quantization_config(schemes, [])["config_groups"].values()]
    assert targets[0] == ["model.layers.0.mlp.up_proj"]
    assert targets[1] == [r"re:.*\.mlp\.down_proj$", "model.layers.1.mlp.up_proj"]
    json.dumps(config)


def test_the_shipped_schema_is_current_and_valid() -> None:
    assert shipped_schema() == json.loads(json.dumps(schema()))
    Draft202012Validator.check_schema(schema())
