"""ChatGLM 2 and 3, and GLM-4 9B under that name: GLM with q, k and v fused, keys and values of few groups at the end.

Half of every head turns. `rope_ratio` multiplies RoPE's base in ChatGLM 3 and GLM-4, but divides positions in
ChatGLM2-6B-32k, and nothing in the config tells the former from the latter; only GLM-4 has another vocabulary. The
first ChatGLM is another model: LayerNorm, positions in two dimensions, no gate.
"""

from typing import Any

from cann_llm_quant.checkpoint.fused_config import FusedConfig
from cann_llm_quant.checkpoint.fused_layout import GATE_UP, QKV, Fused, FusedLayout, Reading, Sizes, blocks, halves

CHATGLM_VOCABULARY = 65024
ALWAYS = {
    "rmsnorm": True,
    "post_layer_norm": True,
    "original_rope": True,
    "multi_query_attention": True,
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
}


def read(fields: FusedConfig) -> Reading:
    """GLM's config; refuses the first ChatGLM and variants that were never published."""
    if "position_encoding_2d" in fields.values or "inner_hidden_size" in fields.values:
        raise fields.refusal("this is the first ChatGLM, which is not supported; ChatGLM 2, 3 and GLM-4 are")
    for name, value in ALWAYS.items():
        if fields.flag(name, value) != value:
            raise fields.refusal(f"ChatGLM with {name}={not value} is not supported")
    heads, kv_heads = fields.heads("multi_query_group_num")
    sizes = Sizes(heads, kv_heads, fields.head_dim("kv_channels"), fields.count("ffn_hidden_size"))
    config = fields.shown_as(
        "glm",
        num_hidden_layers=fields.count("num_layers"),
        num_key_value_heads=kv_heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.inner,
        hidden_act="silu",
        vocab_size=fields.count("padded_vocab_size"),
        rms_norm_eps=fields.number("layernorm_epsilon", 1e-5),
        attention_bias=fields.flag("add_qkv_bias", False),
        **_rope(fields),
        **{name: fields.values.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    return Reading(sizes, config)


def _rope(fields: FusedConfig) -> dict[str, Any]:
    """RoPE's base and scaling, and how many positions there are before the latter."""
    ratio, settled = fields.number("rope_ratio", 1.0), "rope_theta" in fields.values or "rope_scaling" in fields.values
    if ratio != 1 and not settled and fields.count("padded_vocab_size") == CHATGLM_VOCABULARY:
        raise fields.refusal(
            f"rope_ratio={ratio:g} means one thing in ChatGLM3-6B-32k and another in ChatGLM2-6B-32k; for the former "
            f'add "rope_theta": {10000 * ratio:g}, for the latter "rope_scaling": {{"type": "linear", '
            f'"factor": {ratio:g}}}'
        )
    scaling = fields.nested("rope_scaling")
    return {
        "max_position_embeddings": int(fields.count("seq_length") / scaling.number("factor", 1.0)),
        "partial_rotary_factor": 0.5,
        "rope_theta": fields.number("rope_theta", 10000.0 if settled else 10000.0 * ratio),
        "rope_scaling": dict(scaling.values) or None,
    }


LAYOUT = FusedLayout(
    "chatglm",
    read,
    modules={
        "self_attention.query_key_value": Fused(QKV, blocks),
        "self_attention.dense": "self_attn.o_proj",
        "mlp.dense_h_to_4h": Fused(GATE_UP, halves),
        "mlp.dense_4h_to_h": "mlp.down_proj",
    },
    outer={
        "transformer.embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "transformer.encoder.final_layernorm.weight": "model.norm.weight",
        "transformer.output_layer.weight": "lm_head.weight",
        "transformer.rotary_pos_emb.inv_freq": "model.rotary_emb.inv_freq",
    },
    layer_prefix="transformer.encoder.layers.",
)
