"""InternLM 2 and 2.5: Llama under other names, q, k and v interleaved by kv head in `wqkv`; w1 gate, w3 up, w2 down."""

from cann_llm_quant.checkpoint.fused_config import FusedConfig
from cann_llm_quant.checkpoint.fused_layout import QKV, Fused, FusedLayout, Reading, Sizes, by_group


def read(fields: FusedConfig) -> Reading:
    """Llama's config."""
    heads, kv_heads = fields.heads("num_key_value_heads")
    sizes = Sizes(heads, kv_heads, fields.head_dim(), fields.count("intermediate_size"))
    config = fields.shown_as(
        "llama",
        num_key_value_heads=kv_heads,
        head_dim=sizes.head_dim,
        rope_theta=fields.number("rope_theta", 10000.0),
        rope_scaling=dict(fields.section("rope_scaling")) or None,
        attention_bias=fields.flag("bias", False),
        mlp_bias=False,
    )
    return Reading(sizes, config)


LAYOUT = FusedLayout(
    "internlm2",
    read,
    modules={
        "attention.wqkv": Fused(QKV, by_group),
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    },
    outer={"model.tok_embeddings.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"},
)
