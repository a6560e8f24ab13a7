"""A `config.json` recovered from a GGUF file's metadata and tensor shapes.

Shapes decide where both speak (vocabulary size, expert width). Rotary scaling of Llama 3 is not in the metadata: the
file holds one divisor per frequency instead, from which the parameters are found again and then verified.
Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.checkpoint.gguf_names import Family
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.shown import shown

Metadata = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
_MULTIPLIERS = ("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale")
_SOFTMAX = 1


class ArchitectureKeys:
    """The metadata under one architecture's prefix. Missing keys raise CheckpointError naming key and file."""

    def __init__(self, metadata: Metadata, where: str) -> None:
        self.metadata = metadata
        self.where = where
        name = metadata.get("general.architecture")
        if not isinstance(name, str):
            raise CheckpointError(f"{where} has no general.architecture, so it is not a model; fetch it again")
        self.architecture = name

    def get(self, key: str) -> Any:
        """The value of `ARCHITECTURE.key`, None when absent."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str, default: int | float | None = None) -> Any:
        """The number under `ARCHITECTURE.key`; `default` when absent."""
        value = self.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float):
            found = "missing" if value is None else f"{type(value).__name__}, not one number"
            raise CheckpointError(f"{self.where}: metadata {self.architecture}.{key} is {found}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """The positive whole number under `ARCHITECTURE.key`; `default` when absent."""
        value = self.number(key, default)
        if not isinstance(value, int) or value <= 0:
            raise CheckpointError(f"{self.where}: metadata {self.architecture}.{key} is {value}, not a positive count")
        return value


def recover_config(
    keys: ArchitectureKeys, names: Family, shapes: Shapes, rope_divisors: Float[Tensor, "*half"] | None, dtype: str
) -> dict[str, Any]:
    """The Hugging Face config of a GGUF model whose stored shapes (rows first) are `shapes`."""
    heads = keys.count("attention.head_count")
    hidden = keys.count("embedding_length")
    head_dim = keys.count("attention.key_length", hidden // heads)
    _check_computation(keys, head_dim)
    config = {
        "architectures": [names.architecture],
        "model_type": names.model_type,
        "dtype": dtype,
        "torch_dtype": dtype,
        "hidden_size": hidden,
        "intermediate_size": keys.number("feed_forward_length", 0) or _expert_width(shapes),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _short_float(keys.number("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": keys.count("context_length"),
        "vocab_size": _rows(keys, shapes, "token_embd.weight"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        **_rope(keys, head_dim, rope_divisors),
        **token_ids(keys.metadata, keys.where),
    }
    if names.expert_names:
        config |= _experts(keys, names, shapes)
    return config


def _check_computation(keys: ArchitectureKeys, head_dim: int) -> None:
    """Raise UnsupportedError for what the file says of its computation that a config here has no word for."""
    if keys.number("attention.value_length", head_dim) != head_dim:
        raise UnsupportedError(f"{keys.where}: keys and values of different head sizes are not supported")
    if keys.count("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedError(f"{keys.where}: heads of which rotary embedding turns a part are not supported")
    usual = {"attention.scale": head_dim**-0.5, "expert_gating_func": _SOFTMAX}
    for key in (*_MULTIPLIERS, *usual):
        value = keys.number(key, 0)  # 0 is how llama.cpp says that there is none
        if value != 0 and not math.isclose(value, usual.get(key, 1), rel_tol=1e-6):
            raise UnsupportedError(f"{keys.where}: {keys.architecture}.{key} {value:g} is not supported")


def token_ids(metadata: Metadata, where: str) -> dict[str, Any]:
    """Token ids by their names in config.json; every token that ends a turn is an end of sequence.

    Raises CheckpointError for one that is no whole number from 0 on.
    """
    ids = {kind: metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos", "eot", "eom", "padding")}
    for kind, value in ids.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise CheckpointError(
                f"{where}: metadata tokenizer.ggml.{kind}_token_id is {shown(value, 40)}, not a token's id"
            )
    ends = [ids[kind] for kind in ("eos", "eot", "eom")]
    distinct = list(dict.fromkeys(end for end in ends if end is not None))
    return {
        "bos_token_id": ids["bos"],
        "eos_token_id": distinct[0] if len(distinct) == 1 else distinct or None,
        "pad_token_id": ids["padding"],
    }


def _rows(keys: ArchitectureKeys, shapes: Shapes, name: str) -> int:
    if name not in shapes:
        raise CheckpointError(f"{keys.where} has no tensor {shown(name)}; fetch it again")
    return shapes[name][0]


def _expert_width(shapes: Shapes) -> int:
    stacked = shapes.get("blk.0.ffn_gate_exps.weight")
    return stacked[1] if stacked else shapes.get("blk.0.ffn_gate.0.weight", (0,))[0]


def _experts(keys: ArchitectureKeys, names: Family, shapes: Shapes) -> dict[str, Any]:
    count = keys.count("expert_count")
    common = {"num_experts_per_tok": keys.count("expert_used_count")}
    if names.model_type == "mixtral":
        return common | {"num_local_experts": count, "intermediate_size": _expert_width(shapes)}
    experts = common | {
        "num_experts": count,
        "moe_intermediate_size": keys.number("expert_feed_forward_length", _expert_width(shapes)),
        # llama.cpp fixes this by architecture: Qwen3 renormalizes the chosen weights, Qwen2 does not
        "norm_topk_prob": bool(
            keys.metadata.get(f"{keys.architecture}.expert_weights_norm", names.model_type == "qwen3_moe")
        ),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    shared = shapes.get("blk.0.ffn_gate_shexp.weight")
    return experts | ({"shared_expert_intermediate_size": shared[0]} if shared else {})


def _rope(keys: ArchitectureKeys, head_dim: int, divisors: Tensor | None) -> dict[str, Any]:
    """`rope_parameters` and the two older fields that say the same."""
    theta = _short_float(keys.number("rope.freq_base", 10000.0))
    scaling = llama3_scaling(divisors, theta, head_dim, keys.where) if divisors is not None else _scaling(keys)
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": theta},
    }


def _scaling(keys: ArchitectureKeys) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type") or "none"
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind == "none" and factor == 1.0:
        return None
    if keys.number("rope.scaling.attn_factor", 1.0) != 1.0:
        raise UnsupportedError(f"{keys.where}: rope.scaling.attn_factor other than 1 is not supported")
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": _short_float(factor)}
    if kind == "yarn":
        original = keys.number("rope.scaling.original_context_length")
        yarn = {"rope_type": "yarn", "factor": _short_float(factor), "original_max_position_embeddings": original}
        betas = {name: keys.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        return yarn | {name: _short_float(value) for name, value in betas.items() if value is not None}
    raise UnsupportedError(
        f"{keys.where}: rope scaling {shown(kind)} is not supported; supported are linear, yarn and llama3"
    )


def llama3_scaling(divisors: Float[Tensor, "*half"], theta: float, head_dim: int, where: str) -> dict[str, Any]:
    """Parameters of Llama 3 rotary scaling that give these divisors of the `head_dim / 2` frequencies.

    With wavelength λ_i = 2π θ^(2i/head_dim), 1/divisor = (1-s)/factor + s where s = (L/λ - low)/(high - low) clamped to
    [0, 1]: in between, s is a line in 1/λ with slope L/(high-low) and intercept -low/(high-low). Only the ratio
    L : low : high is determined, so low is set to 1. Raises UnsupportedError when no parameters give the divisors.
    """
    if tuple(divisors.shape) != (head_dim // 2,):
        raise UnsupportedError(f"{where}: rope_freqs.weight is not the rotary scaling of Llama 3")
    d = divisors.double()
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    factor = float(d.max())
    s = (1 / d - 1 / factor) / (1 - 1 / factor) if factor > 1 else torch.ones_like(d)
    low, high, length = 1.0, 4.0, 8192
    between = (s > 1e-3) & (s < 1 - 1e-3)
    if int(between.sum()) >= 2:
        x = torch.stack([1 / wavelengths[between], torch.ones(int(between.sum()), dtype=torch.float64)], dim=1)
        slope, intercept = torch.linalg.lstsq(x, s[between]).solution.tolist()
        spread = -low / intercept
        high, length = round(low + spread, 3), round(slope * spread)
    scaling = {
        "rope_type": "llama3",
        "factor": _short_float(factor),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }
    smooth = ((length / wavelengths - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not torch.allclose(d, expected, rtol=1e-3):
        raise UnsupportedError(f"{where}: rope_freqs.weight is not the rotary scaling of Llama 3")
    return scaling


def _short_float(value: float) -> float:
    """The shortest decimal that is the same float32, as the config had it before the file stored 32 bits."""
    return float(f"{value:.7g}")
