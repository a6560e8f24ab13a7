"""Llama 1 to 3, and everything that its authors publish as `model_type: llama` (SmolLM2, Yi, DeepSeek LLM, ...).

Biases are rare here and old configs do not mention them, so the file decides where the config is silent.
"""

from cann_llm_quant.models.layer_map import BiasRule, Family

FAMILY = Family(
    model_type="llama",
    qkv_bias=BiasRule("attention_bias"),
    o_bias=BiasRule("attention_bias"),
    mlp_bias=BiasRule("mlp_bias"),
)
