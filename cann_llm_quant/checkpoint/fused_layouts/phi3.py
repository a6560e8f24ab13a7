"""Phi-3 (mini 4k, medium 4k) and Phi-4: Llama, or Mistral where there is a window, with qkv and gate and up fused."""

from cann_llm_quant.checkpoint.fused_config import FusedConfig
from cann_llm_quant.checkpoint.fused_layout import GATE_UP, QKV, Fused, FusedLayout, Reading, Sizes, blocks, halves
from cann_llm_quant.shown import shown


def read(fields: FusedConfig) -> Reading:
    """Llama's or Mistral's config; refuses scaled and partial RoPE."""
    theta = _theta(fields)
    heads, kv_heads = fields.heads("num_key_value_heads")
    window = fields.values.get("sliding_window")
    sizes = Sizes(heads, kv_heads, fields.head_dim(), fields.count("intermediate_size"))
    plain = {"attention_bias": False, "mlp_bias": False}
    config = fields.shown_as(
        "llama" if window is None else "mistral",
        num_key_value_heads=kv_heads,
        head_dim=sizes.head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
        rope_theta=theta,
        **(plain if window is None else {"sliding_window": window}),
    )
    return Reading(sizes, config)


def _theta(fields: FusedConfig) -> float:
    """RoPE's base, in either spelling, after making sure that nothing else is set."""
    new, old = fields.nested("rope_parameters"), fields.nested("rope_scaling")
    for section in (old, new):
        kind = section.values.get("rope_type", section.values.get("type", "default"))
        if kind != "default":
            raise fields.refusal(
                f"Phi with RoPE scaling {shown(kind)} (long contexts) is not supported; give the model of 4k positions"
            )
        partial = section.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
        if partial != 1:
            raise fields.refusal(f"Phi that turns only {partial:g} of every head (Phi-4-mini) is not supported")
    return new.number("rope_theta", fields.number("rope_theta", 10000.0))


LAYOUT = FusedLayout(
    "phi3",
    read,
    modules={"self_attn.qkv_proj": Fused(QKV, blocks), "mlp.gate_up_proj": Fused(GATE_UP, halves)},
)
