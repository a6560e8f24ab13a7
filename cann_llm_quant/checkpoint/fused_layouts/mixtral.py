"""Mixtral as GPTQModel and AutoRound write it, whose experts have the names of their own modules.

| as Mixtral itself is stored      | GPTQModel 7               | AutoRound 0.16                          |
|----------------------------------|---------------------------|-----------------------------------------|
| `block_sparse_moe.gate`          | `mlp.gate`                | the same                                |
| `block_sparse_moe.experts.0.w1`  | `mlp.experts.0.gate_proj` | `block_sparse_moe.experts.0.gate_proj`  |
| `block_sparse_moe.experts.0.w3`  | `mlp.experts.0.up_proj`   | `block_sparse_moe.experts.0.up_proj`    |
| `block_sparse_moe.experts.0.w2`  | `mlp.experts.0.down_proj` | `block_sparse_moe.experts.0.down_proj`  |

Nothing is fused, and the config is Mixtral's.
"""

from cann_llm_quant.checkpoint.fused_config import FusedConfig
from cann_llm_quant.checkpoint.fused_layout import FusedLayout, Reading, Sizes

_PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
# More than any model has; a name that is not listed keeps what it is called.
_MOST_EXPERTS = 256


def read(fields: FusedConfig) -> Reading:
    """The config itself, without code of the model's own."""
    heads, kv_heads = fields.heads("num_key_value_heads")
    sizes = Sizes(heads, kv_heads, fields.head_dim(), fields.count("intermediate_size"))
    config = {name: value for name, value in fields.values.items() if name != "auto_map"}
    return Reading(sizes, config | {"architectures": ["MixtralForCausalLM"]})


LAYOUT = FusedLayout(
    "mixtral",
    read,
    modules={
        "mlp.gate": "block_sparse_moe.gate",
        **{
            f"{block}.experts.{n}.{part}": f"block_sparse_moe.experts.{n}.{own}"
            for block in ("mlp", "block_sparse_moe")
            for n in range(_MOST_EXPERTS)
            for part, own in _PARTS.items()
        },
    },
    mark=".experts.0.gate_proj.",
)
