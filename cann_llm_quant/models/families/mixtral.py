"""Mixtral: Mistral with eight experts per layer, stored as w1 (gate), w3 (up) and w2 (down); weights renormalized."""

from cann_llm_quant.models.layer_map import Experts, Family
from cann_llm_quant.models.windows import window_everywhere

FAMILY = Family(
    model_type="mixtral",
    default_theta=1000000.0,
    default_eps=1e-5,
    window=window_everywhere(default=None),
    experts=Experts(
        router="block_sparse_moe.gate",
        expert={
            "gate": "block_sparse_moe.experts.{n}.w1",
            "up": "block_sparse_moe.experts.{n}.w3",
            "down": "block_sparse_moe.experts.{n}.w2",
        },
        intermediate="intermediate_size",
    ),
)
