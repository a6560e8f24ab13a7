"""InternLM, first version: Llama with biases on q, k, v and o. Nothing is fused; only its config is its own.

`rotary` holds RoPE's base and whether it grows with the text (`dynamic`), which is Llama's scaling of that name with
factor 1.
"""

from cann_llm_quant.checkpoint.fused_config import FusedConfig
from cann_llm_quant.checkpoint.fused_layout import FusedLayout, Reading, Sizes
from cann_llm_quant.shown import shown


def read(fields: FusedConfig) -> Reading:
    """Llama's config."""
    heads, rotary = fields.count("num_attention_heads"), fields.nested("rotary")
    kind = rotary.values.get("type", "origin")
    if kind not in ("origin", "dynamic"):
        raise fields.refusal(f"rotary type {shown(kind)} is not supported; known are origin, dynamic")
    sizes = Sizes(heads, heads, fields.head_dim(), fields.count("intermediate_size"))
    config = fields.shown_as(
        "llama",
        num_key_value_heads=heads,
        head_dim=sizes.head_dim,
        rope_theta=rotary.number("base", 10000.0),
        rope_scaling={"rope_type": "dynamic", "factor": 1.0} if kind == "dynamic" else None,
        attention_bias=fields.flag("bias", True),
        mlp_bias=False,
    )
    return Reading(sizes, config)


LAYOUT = FusedLayout("internlm", read)
