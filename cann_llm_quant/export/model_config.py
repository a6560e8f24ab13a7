"""`config.json` of an output: the source's, with the quantization section and every spelling that readers look for.

transformers 5 writes `rope_parameters` and `dtype` only; older readers (and several runtimes) look for `rope_theta`,
`rope_scaling` and `torch_dtype` and fall back to 10000 and float32 in silence. Both forms are written, with equal
values.
"""

import json
from collections.abc import Mapping
from typing import Any

from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.models.arch import Arch

DROPPED = ("_name_or_path", "transformers_version", "quantization_config", "compression_config", "auto_map")


def output_config(
    source: Mapping[str, Any], arch: Arch, dtype: str, quantization: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The output's `config.json`; `dtype` is the storage type of float tensors (`bfloat16`, …)."""
    config = {key: value for key, value in source.items() if key not in DROPPED}
    config["dtype"] = config["torch_dtype"] = dtype
    config["tie_word_embeddings"] = arch.tied_head
    for key, value in _sizes(arch).items():
        if config.get(key) is None:
            config[key] = value
    config |= _rope_fields(arch)
    if quantization is not None:
        config["quantization_config"] = dict(quantization)
    return config


def _sizes(arch: Arch) -> dict[str, int]:
    """Sizes that the source's config may lack; readers would put library defaults in their place (C36)."""
    return {
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "intermediate_size": arch.intermediate_size,
    }


def _rope_fields(arch: Arch) -> dict[str, Any]:
    rope = arch.rope
    scaling = {
        "rope_type": rope.kind,
        **{k: v for k, v in rope.parameters.items() if k not in ("rope_type", "type")},
    }
    scaling.pop("rope_theta", None)
    old = None if rope.kind == "default" else {"type": rope.kind, **scaling}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": old,
        "rope_parameters": {"rope_theta": rope.theta, **scaling},
    }


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """UTF-8 JSON, indented, keys in the given order.

    Raises CheckpointError for NaN or infinity, which JSON cannot hold.
    """
    try:
        return (json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except ValueError as error:
        raise CheckpointError("config.json holds NaN or infinity, which is not JSON; correct the field") from error
