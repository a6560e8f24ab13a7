"""Qwen 3, dense: a norm on each head of q and k, an explicit head size, no biases unless the config asks for them."""

from cann_llm_quant.models.layer_map import BiasRule, Family
from cann_llm_quant.models.windows import window_of_upper_layers

FAMILY = Family(
    model_type="qwen3",
    qkv_bias=BiasRule("attention_bias"),
    o_bias=BiasRule("attention_bias"),
    qk_norm=True,
    window=window_of_upper_layers,
)
