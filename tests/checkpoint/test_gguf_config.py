"""Configs recovered from GGUF metadata; rotary scaling against transformers' own formulas."""

import numpy as np
import pytest
import torch
import transformers
from gguf_files import FFN, HEADS, HIDDEN, KV_HEADS, VOCAB, Kind, llama_layout, plain_layout, state_dict, write_gguf
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.checkpoint.gguf_config import llama3_scaling, token_ids
from cann_llm_quant.errors import CheckpointError, UnsupportedError


def recovered(path, arch="llama", kind=Kind.F32, head=False, metadata=None, extra=None):
    state = state_dict(1, head=head)
    layout = llama_layout(state) if arch == "llama" else plain_layout(state)
    return open_checkpoint(str(write_gguf(path, arch, layout | (extra or {}), kind=kind, metadata=metadata))).config


def test_sizes_and_defaults(tmp_path):
    config = recovered(tmp_path / "m.gguf")
    expected = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    assert {key: config[key] for key in expected} == expected


def test_untied_head_and_explicit_head_size(tmp_path):
    metadata = {"qwen3.attention.key_length": 128, "qwen3.attention.value_length": 128, "qwen3.rope.freq_base": 1e6}
    config = recovered(tmp_path / "m.gguf", "qwen3", head=True, metadata=metadata)
    assert (config["tie_word_embeddings"], config["head_dim"], config["rope_theta"]) == (False, 128, 1e6)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(Kind.F32, "float32"), (Kind.F16, "float16"), (Kind.BF16, "bfloat16"), (Kind.Q8_0, "bfloat16")],
)
def test_dtype_is_that_of_the_matrices(tmp_path, kind, dtype):
    config = recovered(tmp_path / "m.gguf", kind=kind)
    assert config["dtype"] == config["torch_dtype"] == dtype


def test_scaling_from_metadata(tmp_path):
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5}
    assert recovered(tmp_path / "a.gguf", metadata=linear)["rope_scaling"] == {"rope_type": "linear", "factor": 2.5}
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 32768}
    metadata = {f"qwen2.rope.scaling.{key}": value for key, value in yarn.items()} | {"qwen2.rope.freq_base": 1e6}
    config = recovered(tmp_path / "b.gguf", "qwen2", metadata=metadata)
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert config["rope_scaling"] == scaling
    assert config["rope_parameters"] == scaling | {"rope_theta": 1e6}
    with pytest.raises(UnsupportedError, match="'longrope'"):
        recovered(
            tmp_path / "c.gguf", metadata={"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}
        )


def llama3_frequencies(scaling, theta, head_dim):
    """Scaled and plain inverse frequencies as transformers computes them."""
    config = transformers.LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        head_dim=head_dim,
        rope_parameters=scaling | {"rope_theta": theta},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return scaled, 1 / theta ** (torch.arange(0, head_dim, 2) / head_dim)


@pytest.mark.parametrize(
    ("factor", "low", "high", "length", "head_dim"),
    [(8.0, 1.0, 4.0, 8192, 128), (32.0, 1.0, 4.0, 8192, 64), (4.0, 1.0, 8.0, 4096, 128), (8.0, 2.0, 8.0, 16384, 128)],
)
def test_llama3_scaling_is_found_from_the_divisors(factor, low, high, length, head_dim):
    parameters = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    parameters["original_max_position_embeddings"] = length
    scaled, plain = llama3_frequencies(parameters, 5e5, head_dim)
    found = llama3_scaling(plain / scaled, 5e5, head_dim, "file")
    again, _ = llama3_frequencies(found, 5e5, head_dim)
    torch.testing.assert_close(again, scaled, rtol=1e-4, atol=0)
    if low == 1.0:
        assert found["factor"] == factor
        assert found["original_max_position_embeddings"] == pytest.approx(length, rel=1e-3)
        assert found["high_freq_factor"] == pytest.approx(high, rel=1e-3)


def test_llama3_divisors_are_configuration_not_a_weight(tmp_path):
    parameters = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled, plain = llama3_frequencies(parameters | {"original_max_position_embeddings": 8192}, 5e5, 64)
    layout = llama_layout(state_dict(1)) | {"rope_freqs.weight": (plain / scaled).numpy()}
    path = write_gguf(tmp_path / "m.gguf", "llama", layout, metadata={"llama.rope.freq_base": 5e5})
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.config["rope_parameters"]["rope_type"] == "llama3"
    assert "rope_freqs.weight" not in checkpoint.tensors


def test_other_divisors_are_refused(tmp_path):
    odd = {"rope_freqs.weight": np.linspace(1, 9, 32, dtype=np.float32) ** 2}
    with pytest.raises(UnsupportedError, match="rope_freqs"):
        recovered(tmp_path / "m.gguf", extra=odd)


@pytest.mark.parametrize("shape", [(2, 16), (8,), (1,)])
def test_divisors_of_another_number_are_refused(tmp_path, shape):
    with pytest.raises(UnsupportedError, match="rope_freqs"):
        recovered(tmp_path / "m.gguf", extra={"rope_freqs.weight": np.ones(shape, dtype=np.float32)})


@pytest.mark.parametrize(
    ("key", "value", "neutral"),
    [
        ("rope.dimension_count", HIDDEN // HEADS // 2, HIDDEN // HEADS),
        ("attention.value_length", 32, HIDDEN // HEADS),
        ("attention.scale", 0.5, (HIDDEN // HEADS) ** -0.5),
        ("logit_scale", 0.25, 1.0),
        ("residual_scale", 0.5, 0.0),
        ("embedding_scale", 12.0, 1.0),
        ("expert_weights_scale", 2.5, 1.0),
        ("expert_gating_func", 2, 1),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(tmp_path, key, value, neutral):
    usual = recovered(tmp_path / "usual.gguf", "qwen2")
    assert recovered(tmp_path / "neutral.gguf", "qwen2", metadata={f"qwen2.{key}": neutral}) == usual
    with pytest.raises(UnsupportedError, match=r"m\.gguf: .* not supported"):
        recovered(tmp_path / "m.gguf", "qwen2", metadata={f"qwen2.{key}": value})


def test_every_token_that_ends_a_turn_is_an_end():
    key = "tokenizer.ggml.{}_token_id".format
    assert token_ids({key("eos"): 2}, "m.gguf")["eos_token_id"] == 2
    assert token_ids({key("eos"): 2, key("eot"): 7, key("eom"): 2}, "m.gguf")["eos_token_id"] == [2, 7]
    assert token_ids({}, "m.gguf") == {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@pytest.mark.parametrize("value", [0, "x"])
def test_senseless_counts_are_named(tmp_path, value):
    with pytest.raises(CheckpointError, match=r"llama\.attention\.key_length"):
        recovered(tmp_path / "m.gguf", metadata={"llama.attention.key_length": value})


@pytest.mark.parametrize("value", ["x", -1, 1.5, True, [3]])
def test_token_ids_that_are_none_are_refused(value: object) -> None:
    with pytest.raises(
        CheckpointError, match=r"m\.gguf: metadata tokenizer\.ggml\.eot_token_id is .* not a token's id"
    ):
        token_ids({"tokenizer.ggml.eot_token_id": value}, "m.gguf")
