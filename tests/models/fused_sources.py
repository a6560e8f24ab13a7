"""Tiny checkpoints of families that fuse or rename, made from a plain one row by row, by the book and without haste."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_families import SIZES, save_family
from torch import Tensor

State = dict[str, Tensor]
Fuse = Callable[[State, int], State]

HEADS = SIZES["num_attention_heads"]
LAYERS = range(SIZES["num_hidden_layers"])
COMMON = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
COMMON |= {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "torch_dtype": "float32"}
COMMON |= {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}


def one_after_another(*matrices: Tensor) -> Tensor:
    rows = []
    for matrix in matrices:
        rows += list(matrix)
    return torch.stack(rows)


def group_by_group(q: Tensor, k: Tensor, v: Tensor, kv_heads: int, head_dim: int) -> Tensor:
    """InternLM 2: for each kv head its queries, its key, its value."""
    rows = []
    queries = len(q) // kv_heads
    for group in range(kv_heads):
        for row in range(queries):
            rows.append(q[group * queries + row])
        for row in range(head_dim):
            rows.append(k[group * head_dim + row])
        for row in range(head_dim):
            rows.append(v[group * head_dim + row])
    return torch.stack(rows)


def baichuan(state: State, kv_heads: int) -> State:
    for i in LAYERS:
        attention = f"model.layers.{i}.self_attn."
        parts = [state.pop(f"{attention}{part}_proj.weight") for part in "qkv"]
        state[f"{attention}W_pack.weight"] = one_after_another(*parts)
    return state


def internlm2(state: State, kv_heads: int) -> State:
    fused = {
        "model.tok_embeddings.weight": state["model.embed_tokens.weight"],
        "model.norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for i in LAYERS:
        layer = f"model.layers.{i}."
        q, k, v = (state[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv")
        fused[f"{layer}attention.wqkv.weight"] = group_by_group(q, k, v, kv_heads, len(k) // kv_heads)
        fused[f"{layer}attention.wo.weight"] = state[f"{layer}self_attn.o_proj.weight"]
        fused[f"{layer}feed_forward.w1.weight"] = state[f"{layer}mlp.gate_proj.weight"]
        fused[f"{layer}feed_forward.w3.weight"] = state[f"{layer}mlp.up_proj.weight"]
        fused[f"{layer}feed_forward.w2.weight"] = state[f"{layer}mlp.down_proj.weight"]
        fused[f"{layer}attention_norm.weight"] = state[f"{layer}input_layernorm.weight"]
        fused[f"{layer}ffn_norm.weight"] = state[f"{layer}post_attention_layernorm.weight"]
    return fused


def qwen(state: State, kv_heads: int) -> State:
    fused = {
        "transformer.wte.weight": state["model.embed_tokens.weight"],
        "transformer.ln_f.weight": state["model.norm.weight"],
        "lm_head.weight": state["lm_head.weight"],
    }
    for i in LAYERS:
        layer, stored = f"model.layers.{i}.", f"transformer.h.{i}."
        for kind in ("weight", "bias"):
            parts = [state[f"{layer}self_attn.{part}_proj.{kind}"] for part in "qkv"]
            fused[f"{stored}attn.c_attn.{kind}"] = one_after_another(*parts)
        fused[f"{stored}attn.c_proj.weight"] = state[f"{layer}self_attn.o_proj.weight"]
        fused[f"{stored}mlp.w1.weight"] = state[f"{layer}mlp.up_proj.weight"]
        fused[f"{stored}mlp.w2.weight"] = state[f"{layer}mlp.gate_proj.weight"]
        fused[f"{stored}mlp.c_proj.weight"] = state[f"{layer}mlp.down_proj.weight"]
        fused[f"{stored}ln_1.weight"] = state[f"{layer}input_layernorm.weight"]
        fused[f"{stored}ln_2.weight"] = state[f"{layer}post_attention_layernorm.weight"]
    return fused


def phi3(state: State, kv_heads: int) -> State:
    state = baichuan(state, kv_heads)
    for i in LAYERS:
        layer = f"model.layers.{i}."
        state[f"{layer}self_attn.qkv_proj.weight"] = state.pop(f"{layer}self_attn.W_pack.weight")
        gate, up = (state.pop(f"{layer}mlp.{part}_proj.weight") for part in ("gate", "up"))
        state[f"{layer}mlp.gate_up_proj.weight"] = one_after_another(gate, up)
    return state


def chatglm(state: State, kv_heads: int) -> State:
    """From transformers' GLM, whose gate and up are in one matrix as well."""
    fused = {
        "transformer.embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "transformer.encoder.final_layernorm.weight": state["model.norm.weight"],
        "transformer.output_layer.weight": state["lm_head.weight"],
    }
    for i in LAYERS:
        layer, stored = f"model.layers.{i}.", f"transformer.encoder.layers.{i}."
        for kind in ("weight", "bias"):
            parts = [state[f"{layer}self_attn.{part}_proj.{kind}"] for part in "qkv"]
            fused[f"{stored}self_attention.query_key_value.{kind}"] = one_after_another(*parts)
        fused[f"{stored}self_attention.dense.weight"] = state[f"{layer}self_attn.o_proj.weight"]
        fused[f"{stored}mlp.dense_h_to_4h.weight"] = state[f"{layer}mlp.gate_up_proj.weight"]
        fused[f"{stored}mlp.dense_4h_to_h.weight"] = state[f"{layer}mlp.down_proj.weight"]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            fused[f"{stored}{norm}.weight"] = state[f"{layer}{norm}.weight"]
    return fused


def mixtral(state: State, kv_heads: int) -> State:
    """As GPTQModel writes it."""
    own = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    renamed = {}
    for name, tensor in state.items():
        name = name.replace("block_sparse_moe", "mlp")
        for part in own:
            name = name.replace(f".{part}.", f".{own[part]}.")
        renamed[name] = tensor
    return renamed


def unchanged(state: State, kv_heads: int) -> State:
    return state


# model_type: the plain family, its settings, how its tensors are fused, and the config of the fused family
LLAMA = COMMON | {"intermediate_size": 52, "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "hidden_act": "silu"}
SOURCES: dict[str, tuple[str, dict[str, Any], Fuse, dict[str, Any]]] = {
    "baichuan": ("llama", {"num_key_value_heads": HEADS, "head_dim": 6}, baichuan, LLAMA),
    "internlm": (
        "llama",
        {
            "num_key_value_heads": HEADS,
            "head_dim": 6,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
        unchanged,
        LLAMA | {"bias": True, "rotary": {"base": 500, "type": "origin"}},
    ),
    "internlm2": (
        "llama",
        {"head_dim": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        internlm2,
        LLAMA | {"num_key_value_heads": 2, "bias": False, "rope_theta": 1000000, "rope_scaling": None},
    ),
    "qwen": (
        "qwen2",
        {"num_key_value_heads": HEADS},
        qwen,
        COMMON
        | {
            "intermediate_size": 104,
            "kv_channels": 6,
            "seq_length": 64,
            "max_position_embeddings": 512,
            "layer_norm_epsilon": 1e-6,
            "rotary_emb_base": 10000,
            "rotary_pct": 1.0,
            "use_dynamic_ntk": True,
            "use_logn_attn": True,
            "no_bias": True,
        },
    ),
    "chatglm": (
        "glm",
        {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        chatglm,
        {
            **{name: COMMON[name] for name in ("hidden_size", "num_attention_heads", "auto_map", "eos_token_id")},
            "num_layers": SIZES["num_hidden_layers"],
            "padded_vocab_size": SIZES["vocab_size"],
            "ffn_hidden_size": 52,
            "kv_channels": 12,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "add_qkv_bias": True,
            "add_bias_linear": False,
            "layernorm_epsilon": 1e-5,
            "seq_length": 64,
            "original_rope": True,
            "rmsnorm": True,
            "post_layer_norm": True,
        },
    ),
    "glm": (
        "glm",
        {},
        unchanged,
        LLAMA | {"num_key_value_heads": 2, "head_dim": 12, "attention_bias": True, "architectures": ["GlmForCausalLM"]},
    ),
    "mixtral": (
        "mixtral",
        {},
        mixtral,
        LLAMA
        | {"num_key_value_heads": 2, "head_dim": 10, "num_local_experts": 5, "num_experts_per_tok": 3}
        | {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    ),
    "phi3": ("llama", {"head_dim": 6}, phi3, LLAMA | {"num_key_value_heads": 2, "sliding_window": None}),
}


def save_plain(folder: Path, model_type: str) -> Any:
    """The plain twin of a fused source, saved by transformers; returns its model."""
    family, settings, _, _ = SOURCES[model_type]
    return save_family(folder, family, **settings)


def plain_state(plain: Path) -> State:
    """The tensors of a plain twin; GLM's gate and up, which transformers keeps in one matrix, row by row."""
    state = load_file(plain / "model.safetensors")
    for name in [name for name in state if ".gate_up_proj." in name]:
        both = state.pop(name)
        half = len(both) // 2
        state[name.replace("gate_up", "gate")] = torch.stack([both[row] for row in range(half)])
        state[name.replace("gate_up", "up")] = torch.stack([both[half + row] for row in range(half)])
    return state


def save_fused(folder: Path, model_type: str, plain: Path, **changes: Any) -> Path:
    """The model in `plain` as `model_type` stores it, with `changes` to the config; returns the folder."""
    _, _, fuse, config = SOURCES[model_type]
    folder.mkdir(parents=True, exist_ok=True)
    state = fuse(load_file(plain / "model.safetensors"), SIZES["num_key_value_heads"])
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps({"model_type": model_type} | config | changes)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder
