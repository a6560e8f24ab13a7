"""AWQ's layout against a literal reading of its definition, nibble by nibble, and against its published words."""

import json
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
from cann_llm_quant.export.awq import AwqEncoder, encode, pack_rows, unpack_rows
from cann_llm_quant.export.awq_reader import AwqReader
from cann_llm_quant.quant.scheme import MXFP8, ActivationScheme, QuantizedTensor, Scheme, scheme_for

# Where output feature j of a run of eight lies in a word, from the lowest nibble: as the kernels unpack them.
PLACE = {0: 0, 1: 4, 2: 1, 3: 5, 4: 2, 5: 6, 6: 3, 7: 7}


def random_weight(scheme: Scheme, out: int, columns: int, seed: int = 0) -> QuantizedTensor:
    random = torch.Generator().manual_seed(seed)
    groups = scheme.scale_shape(out, columns)
    codes = torch.randint(-8, 8, (out, columns), generator=random).to(torch.int8)
    zeros = torch.randint(-8, 8, groups, generator=random).to(torch.int8)
    scale = torch.rand(groups, generator=random) + 0.01
    return exact_scales(QuantizedTensor(codes, scale, None if scheme.symmetric else zeros, scheme))


def literal_weight(tensors: dict[str, Tensor]) -> Tensor:
    """The definition, one element at a time, in float64."""
    qweight, qzeros, scales = tensors["qweight"], tensors["qzeros"], tensors["scales"].to(torch.float64)
    columns, out, width = len(qweight), scales.shape[1], len(qweight) // len(scales)

    def nibble(words: Tensor, row: int, n: int) -> int:
        return int(words[row, n // 8]) >> (4 * PLACE[n % 8]) & 15

    weight = torch.empty(out, columns, dtype=torch.float64)
    for n in range(out):
        for k in range(columns):
            group = k // width
            weight[n, k] = (nibble(qweight, k, n) - nibble(qzeros, group, n)) * scales[group, n]
    return weight


def save_folder(folder: Path, tensors: dict[str, Tensor], **section: object) -> Path:
    return save_stored(folder, tensors, "quantization_config", {"quant_method": "awq", **section})


def read(folder: Path, module: str = "m") -> QuantizedTensor:
    with open_checkpoint(str(folder), accept_quantized=True) as checkpoint:
        return AwqReader(checkpoint).quantized(module)


def test_c19_fields_in_order_give_the_published_word() -> None:
    words = pack_rows(torch.arange(8, dtype=torch.uint8)[:, None])
    assert words.tolist() == [[0x75316420]]


def test_c19_all_codes_in_all_places_come_back() -> None:
    fields = torch.stack([torch.arange(16, dtype=torch.uint8).roll(shift) for shift in range(16)])
    assert torch.equal(unpack_rows(pack_rows(fields)), fields)


@pytest.mark.parametrize("symmetric", [True, False])
def test_stored_words_mean_the_weight(symmetric: bool) -> None:
    weight = random_weight(scheme_for(4, 16, symmetric), 24, 48)
    tensors = {name.removeprefix("m."): tensor for name, tensor in encode("m", weight).items()}
    assert torch.equal(literal_weight(tensors), weight.dequantize(torch.float64))
    assert [tensors[part].dtype for part in ("qweight", "qzeros", "scales")] == [torch.int32] * 2 + [torch.float16]


@settings(max_examples=30, deadline=None)
@given(
    symmetric=st.booleans(),
    stated=st.booleans(),
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    size=st.sampled_from([-1, 16, 32]),
    seed=st.integers(0, 1000),
)
def test_reading_what_was_written_gives_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory,
    symmetric: bool,
    stated: bool,
    rows: int,
    columns: int,
    size: int,
    seed: int,
) -> None:
    weight = random_weight(scheme_for(4, size, symmetric), 8 * rows, 32 * columns, seed)
    section = {"group_size": size} | ({"sym": symmetric} if stated else {})
    assert same(read(save_folder(tmp_path_factory.mktemp("awq"), encode("m", weight), **section)), weight)


def test_other_writers_put_sym_over_any_zero_points(tmp_path: Path) -> None:
    weight = random_weight(scheme_for(4, 32, False), 16, 64)
    assert same(read(save_folder(tmp_path / "f", encode("m", weight), sym=True, version="GEMM")), weight)


@pytest.mark.parametrize(
    ("section", "error", "message"),
    [
        ({"version": "gemv"}, UnsupportedError, "AWQ version 'gemv' is not read, only gemm"),
        ({"format": "gemv_fast"}, UnsupportedError, "'gemv_fast' is not read"),
        ({"backend": "llm-awq"}, UnsupportedError, "llm-awq has a layout of its own"),
        ({"bits": 8}, UnsupportedError, "AWQ of 8 bits is not read"),
        ({"group_size": 64}, CheckpointError, "2 groups of scales for 64 columns, which the config's group_size 64"),
        ({"group_size": -1}, CheckpointError, "group_size -1 does not give"),
        ({"group_size": "32"}, CheckpointError, "must be a whole number"),
    ],
)
def test_configs_that_cannot_be_meant(tmp_path: Path, section: dict, error: type[Exception], message: str) -> None:
    tensors = encode("m", random_weight(scheme_for(4, 32, False), 16, 64))
    with pytest.raises(error, match=message):
        read(save_folder(tmp_path / "f", tensors, **section))


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("qweight", lambda t: t.t().contiguous(), "those of no AWQ gemm linear"),
        ("qzeros", lambda t: t[:1].contiguous(), "those of no AWQ gemm linear"),
        ("qzeros", lambda t: t.to(torch.int16), r"m\.qzeros is torch\.int16, expected torch\.int32"),
        ("scales", lambda t: t[0].contiguous(), r"m\.scales is \[16\], expected a matrix"),
        ("scales", lambda t: t * torch.inf, "holds NaN or infinity"),
    ],
)
def test_damaged_linears_are_refused_in_one_line(tmp_path: Path, part: str, change: object, message: str) -> None:
    tensors = encode("m", random_weight(scheme_for(4, 32, False), 16, 64))
    assert callable(change)
    tensors[f"m.{part}"] = change(tensors[f"m.{part}"])
    with pytest.raises(CheckpointError, match=message) as caught:
        read(save_folder(tmp_path / "f", tensors))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "activations", "shape", "message"),
    [
        (scheme_for(8, 32, True), None, (64, 64), "has 8-bit codes, and AWQ holds 4 bits"),
        (scheme_for(3, 32, True), None, (64, 64), "has 3-bit codes"),
        (MXFP8, None, (64, 64), "is stored as mxfp8, and AWQ holds integers only"),
        (scheme_for(4, 32, True), ActivationScheme(), (64, 64), "has inputs in int8"),
        (scheme_for(4, 32, True), None, (60, 64), "has 60 rows, and AWQ packs them in runs of 8"),
        (scheme_for(4, 256, True), None, (64, 512), "has groups of 256, and AWQ's readers take 16, 32, 64, 128"),
    ],
)
def test_what_the_layout_cannot_hold_is_said_before_work(
    scheme: Scheme, activations: ActivationScheme | None, shape: tuple[int, int], message: str
) -> None:
    encoder = AwqEncoder()
    assert message in (encoder.refusal("m", scheme, activations, shape) or "")
    nearest = encoder.nearest(scheme, shape)
    assert (nearest is None) == (shape[0] % 8 != 0)
    assert nearest is None or encoder.refusal("m", nearest, None, shape) is None


def test_scattered_columns_are_refused() -> None:
    weight = random_weight(scheme_for(4, 32, False), 16, 64)
    index = torch.arange(64, dtype=torch.int32) % 2
    scattered = QuantizedTensor(weight.codes, weight.scale, weight.zero_point, weight.scheme, group_index=index)
    with pytest.raises(UnsupportedError, match="scattered over groups, which AWQ cannot say"):
        AwqEncoder().encode("m", scattered, None, None)


def test_a_folder_names_its_float_linears_and_reads_back(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "float", "qwen2", tie_word_embeddings=False)

    def scheme_of(module: str) -> Scheme | None:
        if module.endswith(("lm_head", "layers.0.self_attn.o_proj")):
            return None
        return scheme_for(4, 32, "layers.0" in module)

    model, weights = save_encoded(source, tmp_path / "out", AwqEncoder(), scheme_of)
    assert AwqEncoder().check(model) == []
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["quantization_config"] == {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "modules_to_not_convert": ["model.layers.0.self_attn.o_proj", "lm_head"],
    }
    with open_checkpoint(str(tmp_path / "out"), accept_quantized=True) as checkpoint:
        reader = AwqReader(checkpoint)
        assert set(reader.linears) == set(weights)
        assert all(same(reader.quantized(module), weight) for module, weight in weights.items())


@pytest.mark.parametrize(
    ("scheme_of", "message"),
    [
        (lambda module: scheme_for(4, 16 if "q_proj" in module else 32, True), "AWQ has one size for all"),
        (lambda module: scheme_for(4, 32, True), "lm_head is quantized, and AWQ's loaders take the output head in"),
        (lambda module: None, "no linear is in codes"),
    ],
)
def test_models_that_no_loader_takes_are_refused(tmp_path: Path, scheme_of: object, message: str) -> None:
    source = save_tiny(tmp_path / "float")
    assert callable(scheme_of)
    with pytest.raises(UnsupportedError, match=message):
        save_encoded(source, tmp_path / "out", AwqEncoder(), scheme_of)
