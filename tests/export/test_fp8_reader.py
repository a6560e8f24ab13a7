"""FP8 sources: tiles, rows and whole matrices against the literal product, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.errors import CheckpointError, InputError, UnsupportedError
from cann_llm_quant.export.fp8_reader import Fp8Reader
from cann_llm_quant.export.packed import open_packed
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.export.unreadable import METHODS, refuse_unreadable
from cann_llm_quant.quant.scheme import ActivationScheme

ONES = torch.ones(8)
M = "model.layers.0.mlp.up_proj"
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def save(folder: Path, tensors: dict[str, Tensor], **section: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {"model_type": "qwen3", "torch_dtype": "bfloat16", "quantization_config": section or BLOCKS}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def reader_of(folder: Path) -> Fp8Reader:
    return Fp8Reader(open_checkpoint(str(folder), accept_quantized=True))


def codes(out: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(out, columns, generator=generator) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)


def test_c35_partial_tiles_are_scaled_by_their_own_number_exactly(tmp_path: Path) -> None:
    """192 x 160 by 128 x 128: every weight times the scale at [row // 128, column // 128], in float64."""
    weight, scale = codes(192, 160), torch.tensor([[0.013, 0.7], [2.0**-5, 0.003]])
    reader = reader_of(save(tmp_path / "m", {f"{M}.weight": weight, f"{M}.weight_scale_inv": scale}))
    assert reader.linears[M].scheme.label() == "fp8_e4m3-tile"
    assert reader.linears[M].shape == (192, 160)
    ours = reader.quantized(M).dequantize(torch.float32)
    double, wide = weight.to(torch.float64), scale.to(torch.float64)
    for row, column in [(0, 0), (127, 127), (127, 128), (128, 127), (128, 128), (191, 159), (0, 159), (191, 0)]:
        expected = double[row, column] * wide[row // 128, column // 128]
        assert float(ours[row, column]) == float(expected.to(torch.float32))
    expected = double * wide.repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)[:, :160]
    assert torch.equal(ours, expected.to(torch.float32))
    with PackedCheckpoint(reader._checkpoint, reader, None) as checkpoint:
        assert torch.equal(checkpoint.load(f"{M}.weight"), expected.to(torch.float32).to(torch.bfloat16))
        assert list(checkpoint.tensors) == [f"{M}.weight"]
        assert "quantization_config" not in checkpoint.config


def test_auto_round_says_the_same_of_tiles_under_its_own_name(tmp_path: Path) -> None:
    """The section as AutoRound 0.16.1 writes it for its scheme FP8_BLOCK."""
    section = BLOCKS | {"quant_method": "auto-round", "packing_format": "auto_round:fp8", "data_type": "fp", "bits": 8}
    section |= {"act_bits": 8, "act_data_type": "fp", "act_dynamic": True, "group_size": [128, 128], "sym": True}
    tensors = {f"{M}.weight": codes(192, 256), f"{M}.weight_scale_inv": torch.rand(2, 2) + 0.01}
    with (
        open_packed(save(tmp_path / "own", tensors, **section)) as found,
        open_packed(save(tmp_path / "fp8", tensors)) as expected,
    ):
        assert found.reader.layout == "fp8"
        assert found.reader.linears == expected.reader.linears
        assert found.reader.linears[M].activations is not None
        assert torch.equal(found.load(f"{M}.weight"), expected.load(f"{M}.weight"))
    section |= {"spinquant_config": {"r4": True}}
    with pytest.raises(UnsupportedError, match="spinquant_config"):
        open_packed(save(tmp_path / "rotated", tensors, **section))


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_c35_any_shape_reads_as_the_literal_product(
    tmp_path_factory: pytest.TempPathFactory, out: int, columns: int, seed: int
) -> None:
    weight = codes(out, columns, seed)
    scale = torch.rand(-(-out // 128), -(-columns // 128), generator=torch.Generator().manual_seed(seed)) + 0.01
    folder = save(tmp_path_factory.mktemp("fp8") / "m", {f"{M}.weight": weight, f"{M}.weight_scale_inv": scale})
    rows, places = torch.arange(out) // 128, torch.arange(columns) // 128
    expected = (weight.to(torch.float64) * scale.to(torch.float64)[rows][:, places]).to(torch.float32)
    assert torch.equal(reader_of(folder).quantized(M).dequantize(), expected)


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8"])
def test_both_methods_open_as_sources(tmp_path: Path, method: str) -> None:
    tensors = {f"{M}.weight": codes(8, 8), f"{M}.weight_scale": torch.full((8, 1), 0.5), "model.norm.weight": ONES}
    folder = save(tmp_path / "m", tensors, quant_method=method)
    with open_packed(folder) as checkpoint:
        assert torch.equal(checkpoint.load(f"{M}.weight"), 0.5 * tensors[f"{M}.weight"].to(torch.float32))
        assert torch.equal(checkpoint.load("model.norm.weight"), ONES)


@pytest.mark.parametrize("shape", [(), (1,), (48,), (48, 1)])
def test_one_scale_a_matrix_and_one_a_row(tmp_path: Path, shape: tuple[int, ...]) -> None:
    weight = codes(48, 32)
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.1
    tensors = {f"{M}.weight": weight, f"{M}.weight_scale": scale, f"{M}.bias": torch.ones(48)}
    reader = reader_of(save(tmp_path / "m", tensors, quant_method="fp8", activation_scheme="dynamic"))
    expected = (weight.to(torch.float64) * scale.to(torch.float64).reshape(-1, 1)).to(torch.float32)
    assert torch.equal(reader.quantized(M).dequantize(), expected)
    assert reader.linears[M].activations == ActivationScheme("fp8_e4m3")
    assert f"{M}.bias" not in reader.linears[M].tensors


def test_static_inputs_have_their_stored_range(tmp_path: Path) -> None:
    tensors = {f"{M}.weight": codes(8, 8), f"{M}.weight_scale": torch.tensor(0.5)}
    with pytest.raises(CheckpointError, match=r"up_proj.input_scale is missing"):
        reader_of(save(tmp_path / "a", tensors, quant_method="fp8", activation_scheme="static"))
    tensors[f"{M}.input_scale"] = torch.tensor(0.25)
    inputs = reader_of(save(tmp_path / "b", tensors, quant_method="fp8", activation_scheme="static")).inputs(M)
    assert inputs is not None
    assert inputs.fixed is not None
    assert inputs.fixed.scale.tolist() == [0.25]


def test_tiles_have_inputs_by_128_columns_where_these_divide(tmp_path: Path) -> None:
    tensors = {f"{M}.weight": codes(8, 256), f"{M}.weight_scale_inv": torch.ones(1, 2)}
    tensors |= {"x.weight": codes(8, 160), "x.scale": torch.ones(1, 2).to(torch.float8_e8m0fnu)}
    reader = reader_of(save(tmp_path / "m", tensors))
    assert reader.linears[M].activations == ActivationScheme("fp8_e4m3", True, True, "group", 128)
    assert reader.linears["x"].activations is None
    assert torch.equal(reader.quantized("x").dequantize(), tensors["x.weight"].to(torch.float32))


ONE = {f"{M}.weight": codes(192, 160)}
REFUSED = [
    (ONE, BLOCKS, CheckpointError, rf"tensor {M}.weight_scale_inv is missing"),
    (ONE | {f"{M}.weight_scale_inv": torch.ones(2, 1)}, BLOCKS, CheckpointError, r"\[2, 1\], expected \[2, 2\]"),
    (ONE | {f"{M}.weight_scale": torch.ones(160)}, BLOCKS, CheckpointError, r"\[160\], expected one number"),
    (ONE | {f"{M}.weight_scale_inv": torch.ones(2, 2).int()}, BLOCKS, CheckpointError, "expected a float type"),
    (
        ONE | {f"{M}.weight_scale_inv": torch.ones(2, 2), f"{M}.weight_scale": torch.ones(1)},
        BLOCKS,
        CheckpointError,
        "two scales",
    ),
    (ONE, BLOCKS | {"weight_block_size": [64, 64]}, UnsupportedError, r"\[64, 64\]"),
    (ONE, BLOCKS | {"fmt": "e5m2"}, UnsupportedError, "e5m2"),
    ({f"{M}.weight": torch.zeros(2, 2).to(torch.float8_e5m2)}, BLOCKS, UnsupportedError, "stored as float8_e5m2"),
]


@pytest.mark.parametrize(("tensors", "section", "kind", "words"), REFUSED, ids=[row[3] for row in REFUSED])
def test_c35_what_cannot_be_meant_is_refused_by_name(
    tmp_path: Path, tensors: dict[str, Tensor], section: dict[str, Any], kind: type[InputError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        reader_of(save(tmp_path / "m", tensors, **section))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_damaged_numbers_are_named(tmp_path: Path, bad: float) -> None:
    tensors = ONE | {f"{M}.weight_scale_inv": torch.tensor([[1.0, bad], [1.0, 1.0]])}
    with pytest.raises(CheckpointError, match="weight_scale_inv holds NaN or infinity"):
        reader_of(save(tmp_path / "m", tensors)).quantized(M)
    broken = codes(192, 160)
    broken.view(torch.uint8)[3, 5] = 0x7F
    tensors = {f"{M}.weight": broken, f"{M}.weight_scale_inv": torch.ones(2, 2)}
    with pytest.raises(CheckpointError, match="weight holds NaN"):
        reader_of(save(tmp_path / "n", tensors)).quantized(M)


@pytest.mark.parametrize("method", METHODS)
def test_codes_of_other_libraries_are_refused_by_name_with_advice(method: str) -> None:
    with pytest.raises(UnsupportedError, match=r"quant_method .* give the float model") as caught:
        refuse_unreadable(Path("m"), {"quantization_config": {"quant_method": method}}, [])
    assert METHODS[method][0] in str(caught.value)


@pytest.mark.parametrize("name", ["a.SCB", "a.weight.absmax", "a.weight.quant_map"])
def test_bitsandbytes_is_known_by_its_tensors(name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"bitsandbytes \(tensor {name}\)"):
        refuse_unreadable(Path("m"), {}, ["a.weight", name])
    refuse_unreadable(Path("m"), {"quantization_config": {"quant_method": "fp8"}}, ["a.weight"])


def test_tiles_are_read_under_the_name_of_other_scales_too(tmp_path: Path) -> None:
    """As vLLM reads them: both names are multiplied by."""
    weight, scale = codes(192, 160), torch.tensor([[0.5, 2.0], [4.0, 0.25]])
    reader = reader_of(save(tmp_path / "m", {f"{M}.weight": weight, f"{M}.weight_scale": scale}))
    assert reader.linears[M].scheme.label() == "fp8_e4m3-tile"
    expected = weight.float() * scale.repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)[:, :160]
    assert torch.equal(reader.quantized(M).dequantize(), expected)


def test_an_unknown_kind_of_inputs_is_refused(tmp_path: Path) -> None:
    tensors = {f"{M}.weight": codes(8, 8), f"{M}.weight_scale": torch.tensor(0.5)}
    with pytest.raises(CheckpointError, match="activation_scheme must be static or dynamic, found 'local'"):
        reader_of(save(tmp_path / "m", tensors, quant_method="fp8", activation_scheme="local"))
