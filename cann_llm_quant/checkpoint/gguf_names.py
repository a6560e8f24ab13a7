"""Names, layouts and experts of GGUF files in terms of Hugging Face checkpoints, as data.

GGUF calls the tensors of layer N `blk.N.attn_q.weight` and so on, stacks a layer's experts in one 3-D tensor
[experts, out, in], and, for architecture `llama`, stores q and k with the rows of each head interleaved for its own
rotary kernel: row (head, half, i) of Hugging Face lies at (head, i, half).
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and the tensor names in the gguf package.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.shown import shown

ROPE_FREQUENCIES = "rope_freqs.weight"

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN_MOE = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_QWEN_EXPERTS = {
    "ffn_gate": "mlp.experts.{}.gate_proj",
    "ffn_up": "mlp.experts.{}.up_proj",
    "ffn_down": "mlp.experts.{}.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate": "block_sparse_moe.experts.{}.w1",
    "ffn_up": "block_sparse_moe.experts.{}.w3",
    "ffn_down": "block_sparse_moe.experts.{}.w2",
}


@dataclass(frozen=True)
class Family:
    """How files of one GGUF architecture read as a Hugging Face model type."""

    model_type: str
    architecture: str
    interleaved_heads: bool = False
    layer_names: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    expert_names: Mapping[str, str] = field(default_factory=dict)


_DENSE = {
    "llama": Family("llama", "LlamaForCausalLM", interleaved_heads=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM"),
}
_EXPERTS = {
    "llama": Family(
        "mixtral",
        "MixtralForCausalLM",
        interleaved_heads=True,
        layer_names=_LAYER | {"ffn_gate_inp": "block_sparse_moe.gate"},
        expert_names=_MIXTRAL_EXPERTS,
    ),
    "qwen2moe": Family("qwen2_moe", "Qwen2MoeForCausalLM", False, _LAYER | _QWEN_MOE, _QWEN_EXPERTS),
    "qwen3moe": Family("qwen3_moe", "Qwen3MoeForCausalLM", False, _LAYER | _QWEN_MOE, _QWEN_EXPERTS),
}


def family(architecture: str, experts: int) -> Family:
    """The family of a GGUF architecture with this many experts. Raises UnsupportedError when we do not know it."""
    known = _EXPERTS if experts else _DENSE
    if architecture not in known:
        names = ", ".join(sorted({*_DENSE, *_EXPERTS}))
        raise UnsupportedError(
            f"GGUF architecture {shown(architecture)} with {experts} experts is not known; known are {names}"
        )
    return known[architecture]


@dataclass(frozen=True)
class Source:
    """Where a Hugging Face tensor comes from: a stored tensor, one expert's slab of it, rows to put back in order."""

    stored: str
    expert: int | None = None
    interleaved_heads: int | None = None
    as_row: bool = False  # stored [n], wanted [1, n]


_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_STACKED_EXPERTS = re.compile(r"blk\.(\d+)\.(ffn_(?:gate|up|down))_exps\.weight")
_SINGLE_EXPERT = re.compile(r"blk\.(\d+)\.(ffn_(?:gate|up|down))\.(\d+)\.weight")


def hugging_face_sources(
    shapes: Mapping[str, tuple[int, ...]], names: Family, heads: int, kv_heads: int
) -> dict[str, Source]:
    """Hugging Face name to source, for stored tensors of these shapes (rows first), in the order of the file.

    A tensor that no table names keeps its GGUF name, so that nothing vanishes; the rope frequencies are configuration.
    """
    found: dict[str, Source] = {}
    for stored, shape in shapes.items():
        if stored == ROPE_FREQUENCIES:
            continue
        if names.expert_names and (match := _STACKED_EXPERTS.fullmatch(stored)):
            prefix, template = f"model.layers.{match[1]}.", names.expert_names[match[2]]
            found |= {f"{prefix}{template.format(e)}.weight": Source(stored, expert=e) for e in range(shape[0])}
        elif names.expert_names and (match := _SINGLE_EXPERT.fullmatch(stored)):
            found[f"model.layers.{match[1]}.{names.expert_names[match[2]].format(match[3])}.weight"] = Source(stored)
        else:
            found[_plain_name(stored, names)] = _plain_source(stored, shape, names, heads, kv_heads)
    return found


def _plain_name(stored: str, names: Family) -> str:
    if (match := _LAYER_TENSOR.fullmatch(stored)) and match[2] in names.layer_names:
        return f"model.layers.{match[1]}.{names.layer_names[match[2]]}.{match[3]}"
    stem, _, kind = stored.rpartition(".")
    return f"{_OUTER[stem]}.{kind}" if stem in _OUTER else stored


def _plain_source(stored: str, shape: tuple[int, ...], names: Family, heads: int, kv_heads: int) -> Source:
    match = _LAYER_TENSOR.fullmatch(stored)
    role = match[2] if match else ""
    interleaved = {"attn_q": heads, "attn_k": kv_heads}.get(role) if names.interleaved_heads else None
    return Source(stored, interleaved_heads=interleaved, as_row=role == "ffn_gate_inp_shexp" and len(shape) == 1)
