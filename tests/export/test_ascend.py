"""The AscendV1 encoder and reader: golden bytes, formulas in float64, round trips of whole folders."""

import json
from pathlib import Path

import pytest
import torch
from ascend_folders import INT4, INT8, STATIC, STATIC_ASYM, TOKEN, by_suffix, group, input_of, save_ascend
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_models import save_tiny

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.export.ascend import AscendEncoder
from cann_llm_quant.export.ascend_reader import AscendReader
from cann_llm_quant.export.ascend_static import exact_quant_bias, float_bits, from_float_bits
from cann_llm_quant.export.ascend_types import (
    decode_linear,
    encode_linear,
    pack_columns,
    pack_rows,
    scale_bias,
    unpack_columns,
    unpack_rows,
)
from cann_llm_quant.export.kv_cache import kv_plan
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.quant.kv import KvPlan, KvScales, KvScheme, LayerKv
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    """A model with biases on q, k and v."""
    return save_tiny(tmp_path_factory.mktemp("qwen") / "model", "qwen2", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama") / "model", "llama", tie_word_embeddings=True)


def opened(folder: Path) -> AscendReader:
    return AscendReader(open_checkpoint(str(folder), accept_quantized=True))


def assert_same(read: QuantizedTensor, written: QuantizedTensor) -> None:
    assert torch.equal(read.codes, written.codes)
    assert torch.equal(read.scale.float(), written.scale.float().expand(read.scale.shape))
    zeros = torch.zeros_like(read.codes[:1, :1])
    assert torch.equal(
        zeros if read.zero_point is None else read.zero_point,
        zeros if written.zero_point is None else written.zero_point,
    )


def test_c19_ascend_int4_pairs_are_twos_complement_low_half_first():
    column = torch.tensor([[-8], [7]], dtype=torch.int8)
    assert pack_rows(column).view(torch.uint8).tolist() == [[0x78]]
    assert pack_columns(column.T).view(torch.uint8).tolist() == [[0x78]]
    row = torch.arange(-8, 8, dtype=torch.int8).view(1, 16)
    golden = [0x98, 0xBA, 0xDC, 0xFE, 0x10, 0x32, 0x54, 0x76]
    assert pack_columns(row).view(torch.uint8).flatten().tolist() == golden
    assert pack_rows(row.T.contiguous()).view(torch.uint8).flatten().tolist() == golden
    for low in range(-8, 8):
        for high in range(-8, 8):
            pair = torch.tensor([[low], [high]], dtype=torch.int8)
            assert pack_rows(pair).view(torch.uint8).item() == (low & 15) | ((high & 15) << 4)
            assert torch.equal(unpack_rows(pack_rows(pair)), pair)
            assert torch.equal(unpack_columns(pack_columns(pair.T)), pair.T)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["W8A8_DYNAMIC", "W8A16", "W4A8_DYNAMIC", "W4A16"]),
    st.integers(1, 6),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_what_is_written_is_read_back_bit_for_bit(kind, rows, groups, grouped, symmetric, seed):
    generator = torch.Generator().manual_seed(seed)
    out, size, grouped = 8 * rows, 32, grouped and kind in ("W4A8_DYNAMIC", "W4A16")
    symmetric = symmetric or kind in ("W8A8_DYNAMIC", "W4A8_DYNAMIC")
    scheme = Scheme(
        "int4" if kind[1] == "4" else "int8", symmetric, *(("group", size) if grouped else ("channel", None))
    )
    shape = (out, groups if grouped else 1)
    codes = torch.randint(scheme.qmin, scheme.qmax + 1, (out, groups * size), generator=generator, dtype=torch.int8)
    scale = torch.rand(shape, generator=generator).clamp(min=1e-3).to(torch.float16)
    zero = None if symmetric else torch.randint(scheme.qmin, scheme.qmax + 1, shape, generator=generator).to(torch.int8)
    written = QuantizedTensor(codes, scale, zero, scheme)
    stored = encode_linear("m", kind, written, None, None, dtype=torch.float16)
    read = decode_linear("m", kind, {name.removeprefix("m."): tensor for name, tensor in stored.items()}, scheme)
    assert_same(read, written)
    assert torch.equal(read.dequantize(), written.dequantize())


@pytest.mark.parametrize(("columns", "slices"), [(64, 1), (64, 16), (96, 16), (40, 16)])
@pytest.mark.parametrize("scheme", [INT4, Scheme("int4", True, "group", 8)])
def test_scale_bias_is_eight_times_the_sums_of_slices(scheme, columns, slices):
    generator = torch.Generator().manual_seed(columns)
    codes = torch.randint(-8, 8, (6, columns), generator=generator, dtype=torch.int8)
    scale = torch.rand(6, columns // scheme.columns_per_scale(columns), generator=generator)
    weight = QuantizedTensor(codes, scale, None, scheme)
    w = weight.dequantize(torch.float64)
    parts = [8 * part.sum(1) for part in w.tensor_split(slices, dim=1)]
    expected = torch.stack(parts, dim=1)
    if columns % slices == 0:
        torch.testing.assert_close(scale_bias(weight, slices).double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(scale_bias(weight, slices).double().sum(1), expected.sum(1), rtol=1e-5, atol=1e-4)


def test_static_tensors_compute_what_the_float_linear_does():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (16, 32), generator=generator, dtype=torch.int8)
    weight = QuantizedTensor(codes, torch.rand(16, 1, generator=generator) / 100, None, INT8)
    bias = torch.randn(16, generator=generator)
    inputs = input_of(STATIC_ASYM)
    stored = encode_linear("m", "W8A8", weight, inputs, bias, dtype=torch.bfloat16)
    x = torch.randn(5, 32, generator=generator)
    x_q = (x.double() / stored["m.input_scale"].double() + stored["m.input_offset"].double()).round().clamp(-128, 127)
    y = (x_q @ stored["m.weight"].double().T + stored["m.quant_bias"].double()) * stored["m.deq_scale"].double()
    expected = inputs(x).dequantize().double() @ weight.dequantize(torch.float64).T + bias.double()
    half_a_step = stored["m.deq_scale"].double() / 2
    assert bool(((y - expected).abs() <= half_a_step * 1.001).all())
    assert {name: tensor.dtype for name, tensor in stored.items() if tensor.dtype != torch.float32} == {
        "m.weight": torch.int8,
        "m.quant_bias": torch.int32,
    }


def test_quant_bias_takes_the_offset_out_by_hand():
    codes = torch.tensor([[1, 2, 3], [-4, 0, 4]], dtype=torch.int8)
    deq_scale = torch.tensor([0.5, 0.25])
    assert exact_quant_bias(codes, deq_scale, torch.tensor([-7.0]), torch.tensor([1.0, -2.0])).tolist() == [44.0, -8.0]
    assert exact_quant_bias(codes, deq_scale, torch.tensor([0.0]), None).tolist() == [0.0, 0.0]


def test_deq_scale_of_float16_models_holds_float32_bits():
    assert float_bits(torch.tensor([1.0, 0.5])).tolist() == [0x3F800000, 0x3F000000]
    scale = torch.rand(7)
    assert torch.equal(from_float_bits(float_bits(scale)), scale)


MIXED = by_suffix(
    {
        "q_proj": (INT8, STATIC_ASYM),
        "k_proj": (INT8, STATIC_ASYM),
        "v_proj": (INT8, STATIC_ASYM),
        "o_proj": (INT8, TOKEN),
        "gate_proj": (INT8, None),
        "up_proj": (INT8, None),
        "0.mlp.down_proj": (group(32), None),
    }
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_folder_of_every_type_reads_back_bit_for_bit(tmp_path, dtype):
    source = save_tiny(tmp_path / "source", "qwen2", dtype=dtype, tie_word_embeddings=False)
    written = save_ascend(source, tmp_path / "out", MIXED)
    reader = opened(tmp_path / "out")
    assert reader.linears.keys() == written.keys()
    for module, weight in written.items():
        read, linear = reader.quantized(module), reader.linears[module]
        assert_same(read, weight)
        assert (read.scheme, linear.shape, linear.dtype) == (weight.scheme, weight.shape, dtype)
    q = reader.inputs("model.layers.1.self_attn.q_proj")
    expected = input_of(STATIC_ASYM)
    assert (q.scheme, q.fixed.scale, q.fixed.zero_point) == (
        STATIC_ASYM,
        expected.fixed.scale,
        expected.fixed.zero_point,
    )
    assert reader.inputs("model.layers.0.self_attn.o_proj").scheme == TOKEN
    assert reader.inputs("model.layers.0.mlp.down_proj") is None


def test_the_float_view_is_the_source_with_rounded_weights(qwen, tmp_path):
    written = save_ascend(qwen, tmp_path / "out", MIXED)
    checkpoint = open_checkpoint(str(tmp_path / "out"), accept_quantized=True)
    view = PackedCheckpoint(checkpoint, AscendReader(checkpoint))
    source = load_file(qwen / "model.safetensors")
    assert view.tensors.keys() == source.keys()
    for name, tensor in source.items():
        module = name.removesuffix(".weight")
        expected = written[module].dequantize() if module in written else tensor
        assert torch.equal(view.load(name), expected)


def test_c25_the_description_names_every_tensor(qwen, tmp_path):
    save_ascend(qwen, tmp_path / "out", MIXED)
    description = json.loads((tmp_path / "out/quant_model_description.json").read_text(encoding="utf-8"))
    stored = load_file(tmp_path / "out/quant_model_weights.safetensors")
    tensors = {name: value for name, value in description.items() if "." in name}
    assert tensors.keys() == stored.keys()
    layer = "model.layers.0"
    assert tensors[f"{layer}.self_attn.q_proj.deq_scale"] == tensors[f"{layer}.self_attn.k_proj.weight"] == "W8A8"
    assert tensors[f"{layer}.self_attn.q_proj.bias"] == tensors["model.embed_tokens.weight"] == "FLOAT"
    assert tensors["model.layers.1.mlp.down_proj.weight"] == "FLOAT"
    assert (description["version"], description["group_size"]) == ("1.0.0", 32)
    config = json.loads((tmp_path / "out/config.json").read_text(encoding="utf-8"))
    assert config["torch_dtype"] == "bfloat16"
    assert "quantization_config" not in config


def test_a_tied_head_is_described_though_not_stored(llama, tmp_path):
    save_ascend(llama, tmp_path / "out", lambda module: (INT8, TOKEN))
    description = json.loads((tmp_path / "out/quant_model_description.json").read_text(encoding="utf-8"))
    assert description["lm_head.weight"] == "FLOAT"
    assert "lm_head.weight" not in load_file(tmp_path / "out/quant_model_weights.safetensors")
    assert len(opened(tmp_path / "out").linears) == 14


@pytest.mark.parametrize(("size", "stored"), [(64, [32, 64]), (None, [64, 32])])
def test_mindie_reads_w4a16_with_zero_points(llama, tmp_path, size, stored):
    scheme = Scheme("int4", False, "channel", None) if size is None else Scheme("int4", False, "group", size)
    written = save_ascend(llama, tmp_path / "out", by_suffix({"o_proj": (scheme, None)}), AscendEncoder("mindie"))
    config = json.loads((tmp_path / "out/config.json").read_text(encoding="utf-8"))
    assert config["quantize"] == "w4a16"
    tensors = load_file(tmp_path / "out/quant_model_weights.safetensors")
    assert list(tensors["model.layers.0.self_attn.o_proj.weight"].shape) == stored
    reader = opened(tmp_path / "out")
    for module, weight in written.items():
        assert_same(reader.quantized(module), weight)
        assert reader.linears[module].scheme == scheme


def test_experts_of_int4_by_row_take_int8_inputs(tmp_path):
    source = save_tiny(tmp_path / "source", "qwen3_moe")
    choose = lambda module: (INT4, TOKEN) if ".experts." in module else (INT8, TOKEN)  # noqa: E731
    written = save_ascend(source, tmp_path / "out", choose)
    reader = opened(tmp_path / "out")
    down = "model.layers.0.mlp.experts.3.down_proj"
    tensors = load_file(tmp_path / "out/quant_model_weights.safetensors")
    assert tensors[f"{down}.weight"].shape == (32, 32)
    assert tensors[f"{down}.scale_bias"].shape == (64, 16)
    assert tensors["model.layers.0.mlp.experts.3.up_proj.scale_bias"].shape == (32, 1)
    assert reader.description.group_size == 0
    for module, weight in written.items():
        assert_same(reader.quantized(module), weight)
        assert reader.inputs(module).scheme == TOKEN


def c8_plan(strategy: str) -> KvPlan:
    scheme = KvScheme("int8", strategy=strategy)
    shape = scheme.scale_shape(2, 1, 16)
    scales = [
        KvScales(k_scale=torch.rand(shape) + layer, v_scale=torch.rand(shape) + 2 * layer) for layer in (1.0, 2.0)
    ]
    return KvPlan((LayerKv(scheme, scheme),) * 2, tuple(scales))


@pytest.mark.parametrize("strategy", ["channel", "head", "tensor"])
def test_c8_scales_of_every_channel(llama, tmp_path, strategy):
    plan = c8_plan(strategy)
    save_ascend(
        llama,
        tmp_path / "out",
        by_suffix({"q_proj": (INT8, TOKEN), "k_proj": (INT8, TOKEN), "v_proj": (INT8, TOKEN)}),
        kv=plan,
    )
    description = json.loads((tmp_path / "out/quant_model_description.json").read_text(encoding="utf-8"))
    assert description["kv_cache_type"] == description["kv_quant_type"] == "C8"
    assert description["model.layers.1.self_attn.v_proj.kv_cache_offset"] == "C8"
    tensors = load_file(tmp_path / "out/quant_model_weights.safetensors")
    flat = plan.scales[1].k_scale.expand(2, 1, 16).flatten()
    assert torch.equal(tensors["model.layers.1.self_attn.k_proj.kv_cache_scale"], flat)
    reader = opened(tmp_path / "out")
    assert (
        reader.kv_cache.layer_schemes()
        == (LayerKv(KvScheme("int8", strategy="channel"), KvScheme("int8", strategy="channel")),) * 2
    )
    for read, written in zip(reader.kv_scales(), plan.scales, strict=True):
        assert torch.equal(read.k_scale, written.k_scale.expand(2, 1, 16))
        assert torch.equal(read.v_scale, written.v_scale.expand(2, 1, 16))
        assert read.k_zero is read.v_zero is None
    checkpoint = open_checkpoint(str(tmp_path / "out"), accept_quantized=True)
    view = PackedCheckpoint(checkpoint, reader)
    assert not [name for name in view.tensors if "kv_cache" in name]
    for read, written in zip(kv_plan(view).scales, plan.scales, strict=True):
        assert torch.equal(read.k_scale, written.k_scale.expand(2, 1, 16))


def test_a_cache_alone_lies_beside_float_weights(llama, tmp_path):
    save_ascend(llama, tmp_path / "out", lambda module: None, kv=c8_plan("channel"))
    description = json.loads((tmp_path / "out/quant_model_description.json").read_text(encoding="utf-8"))
    assert description["model_quant_type"] == "FLOAT"
    assert opened(tmp_path / "out").kv_scales()[0].v_scale.shape == (2, 1, 16)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "announces an int8 KV cache, but no kv_cache_scale"),
        ({"hidden_size": [1], "head_dim": None}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": 10**12}, "layers cannot lie in"),
    ],
)
def test_c39_an_announced_cache_without_scales_or_sizes_is_refused(llama, tmp_path, config, words):
    out = tmp_path / "out"
    save_ascend(llama, out, lambda module: None)
    for name, change in (("quant_model_description.json", {"kv_cache_type": "C8"}), ("config.json", config)):
        document = json.loads((out / name).read_text(encoding="utf-8"))
        (out / name).write_text(json.dumps(document | change), encoding="utf-8")
    with pytest.raises(CheckpointError, match=words):
        opened(out)


def test_narrow_integers_are_stored_in_wider_ones(llama, tmp_path):
    choose = by_suffix(
        {
            "o_proj": (Scheme("int3", True, "group", 32), None),
            "down_proj": (Scheme("int6", True, "channel", None), TOKEN),
        }
    )
    written = save_ascend(llama, tmp_path / "out", choose)
    reader = opened(tmp_path / "out")
    for module, weight in written.items():
        assert torch.equal(reader.quantized(module).dequantize(), weight.dequantize())
    assert reader.linears["model.layers.0.self_attn.o_proj"].scheme == group(32)
    assert STATIC.symmetric
