"""Baichuan and Baichuan 2 of 7B: Llama with q, k and v in `W_pack`. The 13B models have ALiBi instead of RoPE.

Baichuan 2 scales every row of its head to length 1 before use (NormHead); what is shown has it done, so that a plain
head gives the same logits. Both versions share a model type, and only the second has `z_loss_weight` or 125,696 tokens.
"""

from cann_llm_quant.checkpoint.fused_config import FusedConfig
from cann_llm_quant.checkpoint.fused_layout import QKV, Fused, FusedLayout, Reading, Sizes, blocks

ALIBI_HEADS = 40
SECOND_VOCABULARY = 125696


def read(fields: FusedConfig) -> Reading:
    """Llama's config; refuses the 13B models."""
    heads = fields.count("num_attention_heads")
    if heads == ALIBI_HEADS:
        raise fields.refusal(
            f"Baichuan with {heads} heads (13B) uses ALiBi, which is not supported; of Baichuan, the 7B models are"
        )
    second = "z_loss_weight" in fields.values or fields.values.get("vocab_size") == SECOND_VOCABULARY
    sizes = Sizes(heads, heads, fields.head_dim(), fields.count("intermediate_size"))
    config = fields.shown_as(
        "llama",
        num_key_value_heads=heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=fields.count("max_position_embeddings", fields.count("model_max_length", 4096)),
        rope_theta=fields.number("rope_theta", 10000.0),
        attention_bias=False,
        mlp_bias=False,
    )
    return Reading(sizes, config, unit_rows=("lm_head.weight",) if second else ())


LAYOUT = FusedLayout("baichuan", read, modules={"self_attn.W_pack": Fused(QKV, blocks)})
