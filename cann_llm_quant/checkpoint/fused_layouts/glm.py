"""GLM-4 9B as transformers stores it: everything plain but gate and up, which are one matrix."""

from cann_llm_quant.checkpoint.fused_config import FusedConfig
from cann_llm_quant.checkpoint.fused_layout import GATE_UP, Fused, FusedLayout, Reading, Sizes, halves

PARTIAL = "partial_rotary_factor"


def read(fields: FusedConfig) -> Reading:
    """The config as it is, but for the half of every head that turns where it does not say how much."""
    heads, kv_heads = fields.heads("num_key_value_heads")
    sizes = Sizes(heads, kv_heads, fields.head_dim(), fields.count("intermediate_size"))
    said = PARTIAL in fields.section("rope_parameters") or fields.values.get(PARTIAL) is not None
    config = {name: value for name, value in fields.values.items() if name != "auto_map"}
    return Reading(sizes, config if said else {**config, PARTIAL: 0.5})


LAYOUT = FusedLayout("glm", read, modules={"mlp.gate_up_proj": Fused(GATE_UP, halves)})
