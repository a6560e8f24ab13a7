"""Quantized sources with fused matrices: every part has the codes that it would have had alone."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from encoded_folders import save_encoded
from native_folders import round_weight, save_native
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny

from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.export import awq, gptq
from cann_llm_quant.export.packed import open_source
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.quant.scheme import Scheme

CONFIG = {
    "model_type": "phi3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}
SHAPES = {"q": (32, 32), "k": (16, 32), "v": (16, 32), "gate": (48, 32), "up": (48, 32)}


def save_phi3(folder: Path) -> dict[str, torch.Tensor]:
    """A model of one layer whose q, k, v and whose gate and up are one matrix each; returns the parts."""
    generator = torch.Generator().manual_seed(0)
    parts = {role: torch.randn(shape, generator=generator) for role, shape in SHAPES.items()}
    layer = "model.layers.0."
    state = {
        "model.embed_tokens.weight": torch.randn(40, 32, generator=generator),
        "model.norm.weight": torch.ones(32),
        "lm_head.weight": torch.randn(40, 32, generator=generator),
        f"{layer}input_layernorm.weight": torch.ones(32),
        f"{layer}post_attention_layernorm.weight": torch.ones(32),
        f"{layer}self_attn.qkv_proj.weight": torch.cat([parts["q"], parts["k"], parts["v"]]),
        f"{layer}self_attn.o_proj.weight": torch.randn(32, 32, generator=generator),
        f"{layer}mlp.gate_up_proj.weight": torch.cat([parts["gate"], parts["up"]]),
        f"{layer}mlp.down_proj.weight": torch.randn(32, 48, generator=generator),
    }
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return parts


def foreign(folder: Path, scheme: Scheme) -> tuple[Path, dict[str, torch.Tensor]]:
    """The model in compressed-tensors' layout, as other tools leave it."""
    parts = save_phi3(folder / "float")
    out = save_native(folder / "float", folder / "packed", scheme)
    (out / "inference_config.json").unlink()
    return out, parts


@pytest.mark.parametrize(
    "scheme",
    [Scheme("int4", True, "group", 16), Scheme("int4", False, "group", 16), Scheme("int8", True, "channel", None)],
    ids=lambda scheme: scheme.label(),
)
def test_c33_parts_have_the_codes_that_they_would_have_alone(tmp_path: Path, scheme: Scheme) -> None:
    packed, parts = foreign(tmp_path, scheme)
    with open_source(str(packed)) as source:
        assert isinstance(source, PackedCheckpoint)
        assert source.config["model_type"] == "llama"
        assert "quantization_config" not in source.config
        arch = arch_from_checkpoint(source)
        for role, weight in parts.items():
            module = arch.layers[0].linear(role).module
            expected, actual = round_weight(weight, scheme), source.quantized(module)
            assert actual is not None
            assert torch.equal(actual.codes, expected.codes)
            assert torch.equal(actual.scale, expected.scale)
            assert (actual.zero_point is None) == scheme.symmetric
            if expected.zero_point is not None:
                assert torch.equal(actual.zero_point, expected.zero_point)
            assert torch.equal(source.load(f"{module}.weight"), expected.dequantize())
            assert source.tensors[f"{module}.weight"].shape == tuple(weight.shape)


def test_one_scale_of_a_matrix_is_that_of_every_part(tmp_path: Path) -> None:
    packed, parts = foreign(tmp_path, Scheme("fp8_e4m3", True, "tensor", None))
    expected = torch.cat([parts[role] for role in "qkv"]).abs().max() / 448
    with open_source(str(packed)) as source:
        for role in "qkv":
            weight = source.load(f"model.layers.0.self_attn.{role}_proj.weight")
            # three bits of mantissa, or the last step of the subnormal numbers
            error = (weight - parts[role]).abs()
            assert (error <= torch.maximum(parts[role].abs() / 16, expected / 512)).all()


def test_tiles_over_several_parts_are_refused(tmp_path: Path) -> None:
    packed, _ = foreign(tmp_path, Scheme("fp8_e4m3", True, "tile", None))
    with pytest.raises(UnsupportedError, match=r"_proj is .*tiles .*; give the float model"):
        open_source(str(packed))


def test_our_own_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    save_phi3(tmp_path / "float")
    packed = save_native(tmp_path / "float", tmp_path / "packed", Scheme("int8", True, "channel", None))
    assert set(load_file(packed / "model.safetensors")) >= {"model.layers.0.self_attn.qkv_proj.weight_packed"}
    with open_source(str(packed)) as source:
        assert "model.layers.0.self_attn.qkv_proj.weight" in source.tensors


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_qwen_1_with_biases_as_gptq_and_awq_store_it(tmp_path: Path, method: str) -> None:
    generator, scheme = torch.Generator().manual_seed(1), Scheme("int4", False, "group", 16)
    parts = {role: torch.randn(32, 32, generator=generator) for role in "qkv"}
    bias, module = torch.randn(96, generator=generator).half(), "transformer.h.0.attn.c_attn"
    weight = round_weight(torch.cat([parts[role] for role in "qkv"]), scheme)
    weight = replace(weight, scale=weight.scale.half(), zero_point=weight.zero_point.clamp(min=-7))
    stored = gptq.encode(module, weight, 1, bias) if method == "gptq" else awq.encode(module, weight, bias)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    section = {"quant_method": method, "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
    section |= {"zero_point": True, "version": "gemm"} if method == "awq" else {}
    config = {"model_type": "qwen", "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": section}), encoding="utf-8")
    with open_source(str(tmp_path)) as source:
        assert isinstance(source, PackedCheckpoint)
        assert source.config["model_type"] == "qwen2"
        for index, role in enumerate("qkv"):
            own, rows = f"model.layers.0.self_attn.{role}_proj", slice(32 * index, 32 * (index + 1))
            actual = source.quantized(own)
            assert actual is not None
            assert torch.equal(actual.dequantize(), weight.dequantize()[rows])
            assert torch.equal(actual.codes, weight.codes[rows])
            assert torch.equal(source.load(f"{own}.bias"), bias[rows])


@pytest.mark.parametrize("block", ["mlp", "block_sparse_moe"])
def test_experts_of_mixtral_under_the_names_of_peers(tmp_path: Path, block: str) -> None:
    """`mlp` as GPTQModel has it, `block_sparse_moe` as AutoRound; patterns in the config are of those names too."""

    def scheme_of(module: str) -> Scheme | None:
        return Scheme("int4", not module.endswith("w2"), "group", 32) if ".experts." in module else None

    source = save_tiny(tmp_path / "float", "mixtral", num_hidden_layers=1, num_local_experts=2)
    own, _ = save_encoded(source, tmp_path / "own", gptq.GptqEncoder(2), scheme_of)
    peer = Path(shutil.copytree(tmp_path / "own", tmp_path / "peer"))
    parts = {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
    state = {}
    for name, tensor in load_file(peer / "model.safetensors").items():
        for part, other in parts.items():
            name = name.replace("block_sparse_moe", block).replace(part, other)
        state[name] = tensor
    save_file(state, peer / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((peer / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] |= {"dynamic": {r"+:.*\.down_proj$": {"sym": False}}}
    (peer / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (peer / "quantize_config.json").unlink()
    with open_source(str(peer)) as found, open_source(str(tmp_path / "own")) as expected:
        assert isinstance(found, PackedCheckpoint)
        assert isinstance(expected, PackedCheckpoint)
        assert set(found.tensors) == set(expected.tensors)
        assert found.modules == set(own.schemes)
        for module, own_scheme in own.schemes.items():
            assert found.quantized(module).scheme == own_scheme
            assert torch.equal(found.quantized(module).dequantize(), expected.quantized(module).dequantize())
        assert arch_from_checkpoint(found) == arch_from_checkpoint(expected)
