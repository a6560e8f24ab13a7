"""What a GGUF file says of a model beside its tensors: sizes, rotary embedding, experts, the type of its weights.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from gguf import GGMLQuantizationType as Kind
from gguf import LlamaFileType

from cann_llm_quant.checkpoint.gguf_writer import TensorEntry
from cann_llm_quant.export.gguf_plan import ARCHITECTURES, smallest_window
from cann_llm_quant.export.gguf_reader import ZERO_POINTS
from cann_llm_quant.models.arch import Arch

_FILE_TYPES = {
    Kind.F32: LlamaFileType.ALL_F32,
    Kind.F16: LlamaFileType.MOSTLY_F16,
    Kind.BF16: LlamaFileType.MOSTLY_BF16,
    Kind.Q4_0: LlamaFileType.MOSTLY_Q4_0,
    Kind.Q4_1: LlamaFileType.MOSTLY_Q4_1,
    Kind.Q5_0: LlamaFileType.MOSTLY_Q5_0,
    Kind.Q5_1: LlamaFileType.MOSTLY_Q5_1,
    Kind.Q8_0: LlamaFileType.MOSTLY_Q8_0,
    Kind.MXFP4: LlamaFileType.MOSTLY_MXFP4_MOE,
}
_QUANTIZATION_VERSION = 2


def main_kind(entries: Sequence[TensorEntry]) -> Kind:
    """The type that most weights of the layers' matrices have."""
    counts: Counter[Kind] = Counter()
    for entry in entries:
        if len(entry.shape) > 1 and entry.name.startswith("blk."):
            counts[entry.kind] += entry.nbytes
    return counts.most_common(1)[0][0]


def architecture_metadata(arch: Arch, entries: Sequence[TensorEntry], name: str) -> dict[str, Any]:
    """The `general.*` keys and those of the architecture, in order."""
    prefix = ARCHITECTURES[arch.model_type]
    window = smallest_window(arch)
    context = arch.rope.trained_positions
    values: dict[str, Any] = {
        "vocab_size": arch.vocab_size,
        "context_length": context if window is None else min(context, window),
        "embedding_length": arch.hidden_size,
        "block_count": arch.num_layers,
        "feed_forward_length": arch.intermediate_size,
        "attention.head_count": arch.num_heads,
        "attention.head_count_kv": arch.num_kv_heads,
        "attention.key_length": arch.head_dim,
        "attention.value_length": arch.head_dim,
        "attention.layer_norm_rms_epsilon": float(arch.rms_norm_eps),
        **_rope(arch),
        **_experts(arch),
    }
    return {
        "general.architecture": prefix,
        "general.type": "model",
        "general.name": name,
        "general.file_type": int(_FILE_TYPES[main_kind(entries)]),
        "general.quantization_version": _QUANTIZATION_VERSION,
        **({ZERO_POINTS: True} if any(entry.kind in (Kind.Q4_1, Kind.Q5_1) for entry in entries) else {}),
        **{f"{prefix}.{key}": value for key, value in values.items()},
    }


def _rope(arch: Arch) -> dict[str, Any]:
    """llama3 scaling is a tensor of divisors, dynamic scaling cannot be said."""
    rope = arch.rope
    values: dict[str, Any] = {"rope.dimension_count": arch.head_dim, "rope.freq_base": float(rope.theta)}
    if rope.kind in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": float(rope.parameters["factor"])}
    if rope.kind == "yarn":
        values["rope.scaling.original_context_length"] = rope.parameters["original_max_position_embeddings"]
    return values


def _experts(arch: Arch) -> dict[str, Any]:
    moe = arch.layers[0].moe
    if moe is None:
        return {}
    values = {"expert_count": moe.num_experts, "expert_used_count": moe.top_k}
    if ARCHITECTURES[arch.model_type] == "llama":  # an expert's width is the feed_forward_length there
        return values | {"feed_forward_length": moe.intermediate_size}
    values["expert_feed_forward_length"] = moe.intermediate_size
    if moe.shared_intermediate_size is not None:
        values["expert_shared_feed_forward_length"] = moe.shared_intermediate_size
    return values
