"""GLM-4 9B and, renamed, ChatGLM 2 and 3: RoPE turns neighbours in half of every head; biases on q, k and v.

Checkpoints store gate and up as one matrix, which `checkpoint/fused_layouts/glm.py` takes apart.
"""

from cann_llm_quant.models.layer_map import BiasRule, Family

FAMILY = Family(
    model_type="glm",
    default_eps=1.5625e-07,
    qkv_bias=BiasRule("attention_bias"),
    partial_rotary=True,
    interleaved_rotary=True,
)
