"""Qwen 1.5 and 2 with experts: a shared expert behind a sigmoid gate beside routed ones; some layers may be dense."""

from cann_llm_quant.models.layer_map import BiasRule, Experts, Family
from cann_llm_quant.models.sparsity import EXPERT, stepped
from cann_llm_quant.models.windows import window_of_even_layers

FAMILY = Family(
    model_type="qwen2_moe",
    qkv_bias=BiasRule("qkv_bias", default=True),
    window=window_of_even_layers,
    experts=Experts(
        router="mlp.gate",
        expert=EXPERT,
        intermediate="moe_intermediate_size",
        normalize="norm_topk_prob",
        shared={
            "gate": "mlp.shared_expert.gate_proj",
            "up": "mlp.shared_expert.up_proj",
            "down": "mlp.shared_expert.down_proj",
        },
        shared_gate="mlp.shared_expert_gate",
        sparse=stepped,
    ),
)
