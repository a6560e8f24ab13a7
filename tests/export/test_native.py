"""The native layout against compressed-tensors' own decompressor, and what a broken file is told."""

import json

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.export import native
from cann_llm_quant.export.inference_config import schema, shipped_schema
from cann_llm_quant.export.quantization_config import quantization_config
from cann_llm_quant.quant.pack import packed_length
from cann_llm_quant.quant.rtn import solve
from cann_llm_quant.quant.scheme import MXFP4, MXFP8, NVFP4, ActivationScheme, QuantizedTensor, Scheme


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
    st.sampled_from([2, 3, 4, 5, 6, 8]),
    st.sampled_from([16, 32, 40, None]),
    st.booleans(),
    st.integers(0, 99),
)
INT8 = ActivationScheme()
SOLVED = [
    (Scheme("int8", True, "channel", None), INT8),
    (Scheme("int8", True, "tensor", None), INT8),
    (Scheme("int8", False, "channel", None), INT8),
    (Scheme("int8", True, "group", 32), INT8),
    (Scheme("int4", True, "tensor", None), None),
    (Scheme("int3", False, "tensor", None), None),
    (Scheme("fp8_e4m3", True, "channel", None), None),
    (Scheme("fp8_e4m3", True, "tensor", None), None),
    (Scheme("fp8_e4m3", True, "tile", None), None),
    (Scheme("fp8_e4m3", True, "group", 32), None),
    (MXFP4, None),
    (MXFP8, None),
    (NVFP4, None),
]


def theirs(module_tensors: dict[str, torch.Tensor], scheme: Scheme, activations: ActivationScheme | None):
    """The float matrix that compressed-tensors' own reader makes of these tensors under our config."""
    stored = {name.removeprefix("m."): tensor for name, tensor in module_tensors.items()}
    config = quantization_config({"m": scheme}, [], {} if activations is None else {"m": activations})
    (group,) = QuantizationConfig.model_validate(config).config_groups.values()
    return BaseCompressor.get_value_from_registry(config["format"]).decompress(stored, group)["weight"]


@settings(max_examples=60, deadline=None)
@given(weights)
def test_compressed_tensors_decompresses_the_same_matrix(weight: QuantizedTensor) -> None:
    # compressed-tensors 0.20.1 raises for zero points of several groups that are packed in one row of words
    one_word = packed_length(weight.shape[0], weight.scheme.bits) == 1
    assume(weight.zero_point is None or weight.zero_point.shape[1] == 1 or not one_word)
    assert torch.equal(theirs(native.encode("m", weight), weight.scheme, None), weight.dequantize(torch.bfloat16))


@pytest.mark.parametrize("size", [(192, 160), (7, 32), (256, 128)])
@pytest.mark.parametrize(("scheme", "activations"), SOLVED, ids=lambda v: v.label() if isinstance(v, Scheme) else None)
def test_c35_every_layout_means_the_same_to_compressed_tensors_and_to_us(
    scheme: Scheme, activations: ActivationScheme | None, size: tuple[int, int]
) -> None:
    w = torch.randn(*size, generator=torch.Generator().manual_seed(size[0]))
    weight = solve(w, scheme, torch.bfloat16)
    stored = native.encode("m", weight, activations)
    assert all(tensor.is_contiguous() for tensor in stored.values())
    assert torch.equal(theirs(stored, scheme, activations).to(torch.bfloat16), weight.dequantize(torch.bfloat16))
    back = native.decode("m", stored, scheme)
    assert torch.equal(back.codes.view(torch.int8), weight.codes.view(torch.int8))
    assert torch.equal(back.dequantize(), weight.dequantize())
    assert back.global_scale == weight.global_scale
    if scheme.dtype == "fp8_e4m3":
        assert not bool(((stored["m.weight"].view(torch.uint8) & 127) == 127).any())  # C14


@settings(max_examples=60, deadline=None)
@given(weights)
def test_decode_inverts_encode(weight: QuantizedTensor) -> None:
    back = native.decode("m", native.encode("m", weight), weight.scheme)
    assert torch.equal(back.codes, weight.codes)
    assert torch.equal(back.scale, weight.scale)
    assert back.scheme == weight.scheme
    if weight.zero_point is not None:
        assert back.zero_point is not None
        assert torch.equal(back.zero_point, weight.zero_point)


def test_golden_bytes_of_the_float_layouts() -> None:
    """Nibbles of all 16 fp4 codes, low one first; e8m0 bytes are exponents plus 127; NVFP4 scales are divided."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    mx = solve(torch.cat([values, values * 0.5])[None], MXFP4, torch.float32)
    stored = native.encode("m", mx)
    assert stored["m.weight_packed"][0, :8].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert stored["m.weight_scale"].tolist() == [[127]]
    nv = native.encode("m", solve(values[None], NVFP4, torch.float32))
    assert nv["m.weight_packed"][0].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert nv["m.weight_scale"].view(torch.uint8).tolist() == [[0x7E]]  # 448
    assert nv["m.weight_global_scale"].tolist() == [448.0]


def test_a_damaged_float_layout_is_refused() -> None:
    w = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    scheme = Scheme("fp8_e4m3", True, "channel", None)
    stored = native.encode("m", solve(w, scheme, torch.float32))
    stored["m.weight"].view(torch.uint8)[1, 2] = 0xFF
    with pytest.raises(CheckpointError, match="weight holds NaN"):
        native.decode("m", stored, scheme)
    with pytest.raises(CheckpointError, match=r"weight_scale is \[4, 1\], expected \[1, 1\]"):
        native.decode("m", stored, Scheme("fp8_e4m3", True, "tile", None))
    with pytest.raises(CheckpointError, match=r"does not fit a weight of \[4, 32\]"):
        native.decode("m", stored, Scheme("fp8_e4m3", True, "group", 48))
    with pytest.raises(CheckpointError, match="weight_packed is missing"):
        native.decode("m", stored, MXFP4)
    with pytest.raises(CheckpointError, match=r"weight_scale is torch\.float32, expected torch\.uint8"):
        native.decode("m", stored, MXFP8)
    mx = native.encode("m", solve(w, MXFP4, torch.float32))
    mx["m.weight_scale"][2, 0] = 255
    with pytest.raises(CheckpointError, match="weight_scale holds NaN"):
        native.decode("m", mx, MXFP4)


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


@pytest.mark.parametrize("scheme", [Scheme("int4", True, "group", 32), Scheme("int8", True, "channel", None)])
def test_scales_that_are_no_numbers_are_refused_before_they_travel(scheme: Scheme) -> None:
    scale = torch.ones(scheme.scale_shape(8, 64))
    scale[3, 0] = float("nan")
    stored = native.encode("m", QuantizedTensor(torch.zeros(8, 64, dtype=torch.int8), scale, None, scheme))
    with pytest.raises(CheckpointError, match=r"m\.weight_scale holds NaN or infinity"):
        native.decode("m", stored, scheme)


@pytest.mark.parametrize("broken", ["weight_scale", "weight_shape"])
def test_missing_tensor_is_named(broken: str) -> None:
    stored = native.encode("m", random_weight(8, 32, 4, 16, True, 0))
    del stored[f"m.{broken}"]
    with pytest.raises(CheckpointError, match=f"m.{broken} is missing"):
        native.decode("m", stored, Scheme("int4", True, "group", 16))


def test_c18_zero_points_of_the_wrong_shape_are_refused_with_both_shapes() -> None:
    stored = native.encode("m", random_weight(8, 32, 4, 16, False, 0))
    stored["m.weight_zero_point"] = torch.zeros(8, 2, dtype=torch.int32)
    with pytest.raises(CheckpointError, match=r"is \[8, 2\], expected \[1, 2\]"):
        native.decode("m", stored, Scheme("int4", False, "group", 16))


def test_quantization_config_is_one_that_compressed_tensors_accepts() -> None:
    g64, g128 = Scheme("int4", True, "group", 64), Scheme("int4", True, "group", 128)
    schemes = {f"model.layers.{i}.mlp.{n}_proj": g64 if n == "up" else g128 for i in range(2) for n in ("up", "down")}
    config = quantization_config(schemes, ["lm_head"])
    parsed = QuantizationConfig.model_validate(config)
    assert [group.targets for group in parsed.config_groups.values()] == [
        [r"re:.*\.mlp\.up_proj$"],
        [r"re:.*\.mlp\.down_proj$"],
    ]
    assert parsed.ignore == ["lm_head"]
    schemes["model.layers.1.mlp.up_proj"] = g128
    targets = [g["targets"] for g in quantization_config(schemes, [])["config_groups"].values()]
    assert targets[0] == ["model.layers.0.mlp.up_proj"]
    assert targets[1] == [r"re:.*\.mlp\.down_proj$", "model.layers.1.mlp.up_proj"]
    json.dumps(config)


def test_weights_and_inputs_together_choose_groups_and_layouts() -> None:
    """W8A8 beside W8A16 are two groups of one weight scheme; each group says its layout (the W4A8 trap)."""
    int8, int4 = Scheme("int8", True, "channel", None), Scheme("int4", True, "group", 32)
    fp8 = Scheme("fp8_e4m3", True, "tile", None)
    schemes = {"a.q": int8, "a.o": int8, "a.up": int4, "a.down": fp8, "a.gate": NVFP4, "a.k": MXFP8}
    inputs = {
        "a.q": ActivationScheme("int8", True, False, "tensor"),
        "a.up": ActivationScheme(),
        "a.down": ActivationScheme("fp8_e4m3", True, True, "group", 128),
        "a.gate": ActivationScheme("fp4_e2m1", True, True, "group", 16),
        "a.k": ActivationScheme("fp8_e4m3", True, True, "group", 32),
    }
    config = quantization_config(schemes, ["lm_head"], inputs)
    assert config["format"] == "mixed-precision"
    formats = [group["format"] for group in config["config_groups"].values()]
    assert formats == [
        "int-quantized",
        "pack-quantized",
        "pack-quantized",
        "float-quantized",
        "nvfp4-pack-quantized",
        "mxfp8-quantized",
    ]
    parsed = list(QuantizationConfig.model_validate(config).config_groups.values())
    assert [p.input_activations and p.input_activations.strategy for p in parsed] == [
        "tensor",
        None,
        "token",
        "group",
        "tensor_group",
        "group",
    ]
    assert parsed[3].weights.block_structure == [128, 128]
    assert parsed[4].weights.scale_dtype == torch.float8_e4m3fn
    assert parsed[4].input_activations.dynamic == "local"
    assert parsed[5].weights.scale_dtype == parsed[5].input_activations.scale_dtype == torch.uint8
    assert parsed[3].input_activations.scale_dtype is None


def test_the_shipped_schema_is_current_and_valid() -> None:
    assert shipped_schema() == json.loads(json.dumps(schema()))
    Draft202012Validator.check_schema(schema())
