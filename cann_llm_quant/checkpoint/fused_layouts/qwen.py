"""Qwen, first version: Qwen 2 under other names, q, k and v in `c_attn`; w2 gate, w1 up, whose widths are one number.

Past `seq_length` positions its RoPE base (`use_dynamic_ntk`) and its queries (`use_logn_attn`) grow in ways that no
other family knows; up to there both do nothing, so that is the length shown.
"""

from cann_llm_quant.checkpoint.fused_config import FusedConfig
from cann_llm_quant.checkpoint.fused_layout import QKV, Fused, FusedLayout, Reading, Sizes, blocks
from cann_llm_quant.shown import shown


def read(fields: FusedConfig) -> Reading:
    """Qwen 2's config."""
    if fields.number("rotary_pct", 1.0) != 1.0:
        raise fields.refusal(f"rotary_pct={shown(fields.values['rotary_pct'])} is not supported; Qwen models have 1.0")
    heads, both = fields.count("num_attention_heads"), fields.count("intermediate_size")
    if both % 2:
        raise fields.refusal(f"intermediate_size={both} is odd, but it counts the widths of w1 and w2 together")
    sizes = Sizes(heads, heads, fields.head_dim("kv_channels"), both // 2)
    config = fields.shown_as(
        "qwen2",
        num_key_value_heads=heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.inner,
        max_position_embeddings=fields.count("seq_length", fields.count("max_position_embeddings", 8192)),
        rms_norm_eps=fields.number("layer_norm_epsilon", 1e-6),
        rope_theta=fields.number("rotary_emb_base", 10000.0),
        use_sliding_window=False,
    )
    return Reading(sizes, config)


LAYOUT = FusedLayout(
    "qwen",
    read,
    modules={
        "attn.c_attn": Fused(QKV, blocks),
        "attn.c_proj": "self_attn.o_proj",
        "mlp.w1": "mlp.up_proj",
        "mlp.w2": "mlp.gate_proj",
        "mlp.c_proj": "mlp.down_proj",
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
    },
    outer={
        "transformer.wte.weight": "model.embed_tokens.weight",
        "transformer.ln_f.weight": "model.norm.weight",
        "transformer.rotary_emb.inv_freq": "model.rotary_emb.inv_freq",
    },
    layer_prefix="transformer.h.",
)
