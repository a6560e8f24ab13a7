"""Folders that msModelSlim wrote, read by us and decoded number by number from the format's description."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.export.ascend_reader import AscendReader
from cann_llm_quant.export.ascend_types import scale_bias
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.quant.kv import KvScheme
from cann_llm_quant.quant.scheme import ActivationScheme

GOLDENS = Path(__file__).parent.parent / "data" / "goldens" / "msmodelslim"
NAMES = ("w8a16", "mixed")


def opened(name: str) -> AscendReader:
    return AscendReader(open_checkpoint(str(GOLDENS / name), accept_quantized=True))


@pytest.fixture(scope="module", params=NAMES)
def golden(request) -> tuple[AscendReader, dict[str, np.ndarray], dict[str, str]]:
    """Our reader, and the file's arrays and types."""
    folder = GOLDENS / request.param
    (weights,) = folder.glob("*.safetensors")
    # numpy has no bfloat16; only norms, embeddings and heads have it
    with weights.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
        kinds = {"F32": np.float32, "I8": np.int8, "I32": np.int32, "I64": np.int64}
        arrays = {}
        for name, entry in header.items():
            if entry.get("dtype") in kinds:
                begin, end = entry["data_offsets"]
                file.seek(start + begin)
                arrays[name] = np.frombuffer(file.read(end - begin), kinds[entry["dtype"]]).reshape(entry["shape"])
    description = json.loads((folder / "quant_model_description.json").read_text(encoding="utf-8"))
    return opened(request.param), arrays, description


def nibble(byte: int, high: int) -> int:
    value = (byte >> (4 * high)) & 15
    return value - 16 if value > 7 else value


def decoded(module: str, kind: str, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The weights in float64, by the format's formulas."""
    stored = arrays[f"{module}.weight"]
    if kind == "W8A8":
        bits = arrays[f"{module}.deq_scale"].astype(np.int32)
        scale = bits.view(np.float32).astype(np.float64) / arrays[f"{module}.input_scale"].astype(np.float64)
        return stored * scale[:, None]
    scale = arrays[f"{module}.weight_scale"].astype(np.float64)
    if kind == "W4A8_DYNAMIC":
        rows = [[nibble(int(byte) & 255, high) for byte in row] for row in stored for high in (0, 1)]
        return np.array(rows) * scale
    return (stored - arrays[f"{module}.weight_offset"].astype(np.float64)) * scale


def test_every_linear_has_the_weights_of_the_description(golden):
    reader, arrays, description = golden
    kinds = {name.removesuffix(".weight"): kind for name, kind in description.items() if name.endswith(".weight")}
    quantized = {module: kind for module, kind in kinds.items() if kind != "FLOAT"}
    assert reader.linears.keys() == quantized.keys()
    for module, kind in quantized.items():
        ours = reader.quantized(module).dequantize(torch.float64).numpy()
        np.testing.assert_allclose(ours, decoded(module, kind, arrays), rtol=3e-7, atol=0)


def test_the_models_map_is_whole_in_the_float_view(golden):
    reader, _, _ = golden
    view = PackedCheckpoint(open_checkpoint(str(GOLDENS / "mixed"), accept_quantized=True), opened("mixed"))
    assert set(arch_from_checkpoint(view).tensor_shapes()) <= set(view.tensors)
    assert {linear.dtype for linear in reader.linears.values()} <= {torch.bfloat16, torch.float32}


def test_inputs_and_cache_of_the_mixed_folder():
    reader = opened("mixed")
    q = reader.inputs("model.layers.0.self_attn.q_proj")
    arrays = load_file(GOLDENS / "mixed" / "quant_model_weights-00001-of-00001.safetensors")
    assert q.scheme == ActivationScheme("int8", False, False, "tensor")
    assert q.fixed.scale.numpy() == arrays["model.layers.0.self_attn.q_proj.input_scale"]
    assert q.fixed.zero_point.numpy() == arrays["model.layers.0.self_attn.q_proj.input_offset"]
    assert reader.inputs("model.layers.1.self_attn.o_proj").scheme == ActivationScheme("int8")
    assert reader.linears["model.layers.0.mlp.down_proj"].scheme.label() == "int4-sym-channel"
    assert "model.layers.1.mlp.down_proj" not in reader.linears
    assert {layer.k for layer in reader.kv_cache.layer_schemes()} == {KvScheme("int8", strategy="channel")}
    flat = arrays["model.layers.1.self_attn.v_proj.kv_cache_scale"]
    assert np.array_equal(reader.kv_scales()[1].v_scale.flatten().numpy(), flat)


def test_our_scale_bias_is_theirs():
    reader = opened("mixed")
    module = "model.layers.0.mlp.down_proj"
    arrays = load_file(GOLDENS / "mixed" / "quant_model_weights-00001-of-00001.safetensors")
    theirs = torch.from_numpy(arrays[f"{module}.scale_bias"])
    torch.testing.assert_close(scale_bias(reader.quantized(module), 16), theirs, rtol=1e-5, atol=1e-5)


def test_our_quant_bias_is_theirs():
    from cann_llm_quant.export.ascend_static import deq_scale_of, exact_quant_bias

    arrays = load_file(GOLDENS / "mixed" / "quant_model_weights-00001-of-00001.safetensors")
    for member in "qkv":
        prefix = f"model.layers.0.self_attn.{member}_proj."
        parts = {
            name.removeprefix(prefix): torch.from_numpy(a) for name, a in arrays.items() if name.startswith(prefix)
        }
        ours = exact_quant_bias(parts["weight"], deq_scale_of(parts), parts["input_offset"], parts["bias"])
        assert int((ours - parts["quant_bias"]).abs().max()) <= 1
