"""MLX's layout against a literal reading of its definition, and its folders back in codes or, where those cannot say
them, in float.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from encoded_folders import exact_scales, save_encoded
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_linears import same, save_stored
from tiny_models import save_tiny
from torch import Tensor

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.export.mlx import BITS, MlxEncoder, encode
from cann_llm_quant.export.mlx_folder import MlxFolder, is_mlx
from cann_llm_quant.export.mlx_reader import MlxReader
from cann_llm_quant.quant.scheme import MXFP4, ActivationScheme, QuantizedTensor, Scheme, scheme_for

TYPES = (torch.bfloat16, torch.float16, torch.float32)
# Rounding the product moves weights by as much as a step.
BLURRED = (8, False, torch.bfloat16)


def random_weight(
    scheme: Scheme, out: int, columns: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> QuantizedTensor:
    random = torch.Generator().manual_seed(seed)
    groups = scheme.scale_shape(out, columns)
    codes = torch.randint(scheme.qmin, scheme.qmax + 1, (out, columns), generator=random).to(torch.int8)
    zeros = torch.randint(scheme.qmin, scheme.qmax + 1, groups, generator=random).to(torch.int8)
    scale = torch.rand(groups, generator=random) + 0.01
    weight = exact_scales(QuantizedTensor(codes, scale, None if scheme.symmetric else zeros, scheme))
    return QuantizedTensor(codes, weight.scale.to(dtype), weight.zero_point, scheme)


def literal_weight(tensors: dict[str, Tensor], bits: int) -> Tensor:
    """The definition, one element at a time, in float64."""
    words, scales = tensors["weight"].tolist(), tensors["scales"].to(torch.float64)
    biases = tensors["biases"].to(torch.float64)
    columns = len(words[0]) * 32 // bits
    weight = torch.empty(len(words), columns, dtype=torch.float64)
    for n, row in enumerate(words):
        stream = sum(word << (32 * place) for place, word in enumerate(row))
        for k in range(columns):
            group = k // (columns // scales.shape[1])
            weight[n, k] = (stream >> (k * bits) & ((1 << bits) - 1)) * scales[n, group] + biases[n, group]
    return weight


def save_folder(folder: Path, tensors: dict[str, Tensor], **section: object) -> Path:
    return save_stored(folder, tensors, "quantization", {"group_size": 32, "bits": 4, **section})


def opened(folder: Path) -> MlxFolder:
    return MlxFolder(open_checkpoint(str(folder), accept_quantized=True))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_stored_words_mean_the_weight_exactly_where_it_is_symmetric(bits: int) -> None:
    weight = random_weight(scheme_for(bits, 32, True), 5, 64)
    tensors = {name.removeprefix("m."): tensor for name, tensor in encode("m", weight).items()}
    assert torch.equal(literal_weight(tensors, bits), weight.dequantize(torch.float64))
    assert [tensor.dtype for tensor in tensors.values()] == [torch.uint32, torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize(("bits", "dtype"), [(4, torch.bfloat16), (6, torch.bfloat16), (8, torch.float16)])
def test_zero_points_move_weights_by_less_than_is_said(bits: int, dtype: torch.dtype) -> None:
    weight = random_weight(scheme_for(bits, 32, False), 5, 64, dtype=dtype)
    tensors = {name.removeprefix("m."): tensor for name, tensor in encode("m", weight).items()}
    steps = literal_weight(tensors, bits) - weight.dequantize(torch.float64)
    steps = (steps.view(5, 2, 32) / weight.scale.to(torch.float64).unsqueeze(-1)).abs().amax()
    limit = 2.0 ** (bits - (8 if dtype == torch.bfloat16 else 11))
    assert limit / 16 < float(steps) <= limit


def test_c19_codes_in_order_give_the_published_words() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(1, 2)
    weight = QuantizedTensor(codes, torch.ones(1, 1), None, scheme_for(4, 32, True))
    assert encode("m", weight)["m.weight"].tolist() == [[0x76543210, 0xFEDCBA98] * 2]


@settings(max_examples=40, deadline=None)
@given(
    form=st.tuples(st.sampled_from(BITS), st.booleans(), st.sampled_from(TYPES)).filter(lambda form: form != BLURRED),
    rows=st.integers(1, 9),
    groups=st.integers(1, 4),
    size=st.sampled_from([32, 64]),
    seed=st.integers(0, 1000),
)
def test_reading_what_was_written_gives_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory,
    form: tuple[int, bool, torch.dtype],
    rows: int,
    groups: int,
    size: int,
    seed: int,
) -> None:
    bits, symmetric, dtype = form
    weight = random_weight(scheme_for(bits, size, symmetric), rows, size * groups, seed, dtype)
    folder = save_folder(tmp_path_factory.mktemp("mlx"), encode("m", weight), bits=bits, group_size=size)
    reader = MlxReader(opened(folder))
    if weight.zero_point is not None and not bool(weight.zero_point.any()):  # no number tells the two schemes apart
        weight = replace(weight, zero_point=None, scheme=scheme_for(bits, size, True))
    assert same(reader.quantized("m"), weight)


def test_zero_points_that_rounding_blurs_are_read_in_float(tmp_path: Path) -> None:
    tensors = encode("m", random_weight(scheme_for(8, 32, False), 16, 64))
    folder = opened(save_folder(tmp_path / "f", tensors, bits=8))
    assert MlxReader(folder).linears == {}
    assert list(folder.tensors) == ["m.weight"]
    assert (folder.tensors["m.weight"].dtype, folder.tensors["m.weight"].shape) == (torch.bfloat16, (16, 64))
    literal = literal_weight({name.removeprefix("m."): tensor for name, tensor in tensors.items()}, 8)
    assert torch.equal(folder.load("m.weight"), literal.to(torch.bfloat16))


@pytest.mark.parametrize("part", ["fraction", "beyond"])
def test_biases_that_are_no_zero_point_make_a_float_weight(tmp_path: Path, part: str) -> None:
    tensors = encode("m", random_weight(scheme_for(4, 32, False), 4, 64, dtype=torch.float32))
    steps = {"fraction": 0.4, "beyond": 40.0}[part]
    tensors["m.biases"] = tensors["m.biases"] - steps * tensors["m.scales"]
    folder = opened(save_folder(tmp_path / "f", tensors))
    assert MlxReader(folder).linears == {}
    literal = literal_weight({name.removeprefix("m."): tensor for name, tensor in tensors.items()}, 4)
    torch.testing.assert_close(folder.load("m.weight"), literal.to(torch.float32), rtol=1e-6, atol=1e-6)


def test_empty_groups_are_whole_and_constant_ones_are_not(tmp_path: Path) -> None:
    tensors = encode("m", random_weight(scheme_for(4, 32, True), 4, 64))
    tensors["m.scales"][0, 0] = tensors["m.biases"][0, 0] = 0.0
    assert "m" in MlxReader(opened(save_folder(tmp_path / "empty", tensors))).linears
    tensors["m.biases"][0, 0] = 1.0
    assert "m" not in MlxReader(opened(save_folder(tmp_path / "constant", tensors))).linears


@pytest.mark.parametrize(
    ("section", "error", "message"),
    [
        ({"mode": "mxfp4"}, UnsupportedError, "mode 'mxfp4' is not read, only affine"),
        ({"bits": 7}, UnsupportedError, "7 bits are not read"),
        ({"bits": 8}, CheckpointError, "which are not those of 8 bits in groups of 32"),
        ({"group_size": 64}, CheckpointError, "which are not those of 4 bits in groups of 64"),
        ({"m": {"group_size": 32, "bits": 3}}, CheckpointError, "not those of 3 bits"),
        ({"m": False}, CheckpointError, r"'m' is False, but m\.scales is stored"),
    ],
)
def test_configs_that_cannot_be_meant(tmp_path: Path, section: dict, error: type[Exception], message: str) -> None:
    tensors = encode("m", random_weight(scheme_for(4, 32, True), 4, 64))
    with pytest.raises(error, match=message):
        opened(save_folder(tmp_path / "f", tensors, **section))


@pytest.mark.parametrize(
    ("part", "change", "error", "message"),
    [
        ("weight", lambda t: t.view(torch.int32), CheckpointError, "expected torch.uint32"),
        ("biases", lambda t: t[:, :1].contiguous(), CheckpointError, "not those of 4 bits in groups of 32"),
        ("biases", lambda t: t * torch.nan, CheckpointError, r"m\.biases holds NaN or infinity"),
        ("weight", lambda t: t[None], UnsupportedError, "is a stack of experts"),
    ],
)
def test_damaged_linears_are_refused(
    tmp_path: Path, part: str, change: object, error: type[Exception], message: str
) -> None:
    tensors = encode("m", random_weight(scheme_for(4, 32, True), 4, 64))
    assert callable(change)
    tensors[f"m.{part}"] = change(tensors[f"m.{part}"])
    with pytest.raises(error, match=message):
        opened(save_folder(tmp_path / "f", tensors))


@pytest.mark.parametrize(
    ("scheme", "activations", "shape", "message"),
    [
        (MXFP4, None, (64, 64), "is stored as mxfp4, and MLX holds integers only"),
        (scheme_for(4, 32, True), ActivationScheme(), (64, 64), "has inputs in int8"),
        (scheme_for(4, -1, True), None, (64, 64), "has one scale a row, and MLX has groups of 32, 64 or 128"),
        (scheme_for(4, 16, True), None, (64, 64), "has groups of 16, and MLX has groups of 32"),
        (Scheme("int4", True, "tile", None), None, (64, 64), "has a scale for each tile"),
        (scheme_for(4, 16, True), None, (64, 48), "has groups of 16"),
    ],
)
def test_what_the_layout_cannot_hold_is_said_before_work(
    scheme: Scheme, activations: ActivationScheme | None, shape: tuple[int, int], message: str
) -> None:
    encoder = MlxEncoder()
    assert message in (encoder.refusal("m", scheme, activations, shape) or "")
    nearest = encoder.nearest(scheme, shape)
    assert (nearest is None) == (shape[1] % 32 != 0)
    assert nearest is None or encoder.refusal("m", nearest, None, shape) is None


def test_a_folder_says_its_overrides_twice_and_reads_back(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "float", "qwen2", tie_word_embeddings=False)

    def scheme_of(module: str) -> Scheme | None:
        if module.endswith("layers.0.self_attn.o_proj"):
            return None
        return scheme_for(6, 64, True) if module == "lm_head" else scheme_for(4, 32, False)

    model, weights = save_encoded(source, tmp_path / "out", MlxEncoder(), scheme_of)
    assert "rounded to its type: weights move by up to 0.0625 of a step under bfloat16" in MlxEncoder().check(model)[0]
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert is_mlx(config)
    assert config["quantization"] == config["quantization_config"]
    assert config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
        "lm_head": {"group_size": 64, "bits": 6, "mode": "affine"},
    }
    reader = MlxReader(opened(tmp_path / "out"))
    assert all(same(reader.quantized(module), weight) for module, weight in weights.items())
    assert set(reader.linears) == set(weights)


def test_experts_that_mlx_lm_cannot_stack_are_refused(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "float", "qwen3_moe")
    with pytest.raises(UnsupportedError, match="mlx-lm loads no quantized experts of qwen3_moe"):
        save_encoded(source, tmp_path / "out", MlxEncoder(), lambda module: scheme_for(4, 32, True))


@pytest.mark.parametrize(("scale", "fits"), [(8184.0, True), (8192.0, False)])
def test_minima_beyond_float16_are_refused(scale: float, fits: bool) -> None:
    """A symmetric minimum is -8 scales; float16 ends at 65504, and 8 * 8192 is 65536."""
    scheme = scheme_for(4, 32, True)
    weight = QuantizedTensor(torch.zeros(2, 32, dtype=torch.int8), torch.full((2, 1), scale).half(), None, scheme)
    if fits:
        assert encode("m", weight)["m.biases"].tolist() == [[-8 * scale]] * 2
        return
    with pytest.raises(UnsupportedError, match=r"m: .* stores as float16, is beyond that under scales of up to 8192;"):
        encode("m", weight)
