"""Qwen 1.5, 2 and 2.5: Llama with biases on q, k and v, and an optional window in the upper layers."""

from cann_llm_quant.models.layer_map import BiasRule, Family
from cann_llm_quant.models.windows import window_of_upper_layers

FAMILY = Family(model_type="qwen2", qkv_bias=BiasRule(default=True), window=window_of_upper_layers)
