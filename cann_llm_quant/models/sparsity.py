"""Which layers have experts, and how Qwen's families name them."""

from cann_llm_quant.models.config_fields import ConfigFields

EXPERT = {
    "gate": "mlp.experts.{n}.gate_proj",
    "up": "mlp.experts.{n}.up_proj",
    "down": "mlp.experts.{n}.down_proj",
}


def stepped(fields: ConfigFields, index: int) -> bool:
    """Every `decoder_sparse_step`-th layer has experts, except those that `mlp_only_layers` lists."""
    step = fields.integer("decoder_sparse_step", default=1)
    return index not in fields.items("mlp_only_layers") and (index + 1) % step == 0
