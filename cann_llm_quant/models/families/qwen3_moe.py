"""Qwen 3 with experts: the attention of Qwen 3, many small experts, no shared one; some layers may be dense."""

from cann_llm_quant.models.layer_map import BiasRule, Experts, Family
from cann_llm_quant.models.sparsity import EXPERT, stepped
from cann_llm_quant.models.windows import window_if_used

FAMILY = Family(
    model_type="qwen3_moe",
    qkv_bias=BiasRule("attention_bias"),
    o_bias=BiasRule("attention_bias"),
    qk_norm=True,
    window=window_if_used,
    experts=Experts(
        router="mlp.gate",
        expert=EXPERT,
        intermediate="moe_intermediate_size",
        normalize="norm_topk_prob",
        sparse=stepped,
    ),
)
