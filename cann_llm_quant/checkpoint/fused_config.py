"""Configs of families that fuse or rename their matrices, and what they become: the config of a well-known family.

Only fields that a plain family knows are carried over; code of the model's own (`auto_map`) never is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.shown import shown

# Past these nothing is a model's, and products and quotients of it leave the machine's numbers.
_COUNTS, _LEAST, _MOST = 1 << 31, 1e-30, 1e30
ARCHITECTURES = {
    "glm": "GlmForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}
_CARRIED = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "hidden_act", "max_position_embeddings"),
    *("rms_norm_eps", "tie_word_embeddings", "initializer_range", "attention_dropout", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype"),
)


@dataclass(frozen=True)
class FusedConfig:
    """A parsed `config.json` of a model that its users call `title`, and where it lies."""

    values: Mapping[str, Any]
    where: str

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1, else `default`. Raises CheckpointError when it is absent or something else."""
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.where} lacks {name}; add it with the model's value")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self.where}: {name} must be a whole number of at least 1, found {shown(value)}")
        if value >= _COUNTS:
            raise CheckpointError(f"{self.where}: {name} is {shown(value)}, beyond any model's; correct it")
        return value

    def number(self, name: str, default: float) -> float:
        """A positive finite number, else `default`. Raises CheckpointError for anything else."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not _LEAST <= value <= _MOST:
            raise CheckpointError(f"{self.where}: {name} must be a positive number, found {shown(value)}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false, else `default`. Raises CheckpointError for anything else."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {name} must be true or false, found {shown(value)}")
        return value

    def section(self, name: str) -> Mapping[str, Any]:
        """A nested object, empty where it is absent or null. Raises CheckpointError for anything else."""
        value = self.values.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self.where}: {name} must be an object, found {shown(value)}")
        return value

    def nested(self, name: str) -> "FusedConfig":
        """A nested object as a config of its own."""
        return FusedConfig(self.section(name), f"{self.where}: {name}")

    def heads(self, kv_name: str) -> tuple[int, int]:
        """Query heads and kv heads; as many of the latter where `kv_name` is absent. Raises CheckpointError."""
        heads = self.count("num_attention_heads")
        kv_heads = self.count(kv_name, heads)
        if heads % kv_heads:
            raise CheckpointError(f"{self.where}: num_attention_heads={heads} is no multiple of {kv_name}={kv_heads}")
        return heads, kv_heads

    def head_dim(self, name: str = "head_dim") -> int:
        """The size of a head: what the config says, else `hidden_size` over the heads. Raises CheckpointError."""
        if self.values.get(name) is not None:
            return self.count(name)
        hidden, heads = self.count("hidden_size"), self.count("num_attention_heads")
        if hidden % heads:
            raise CheckpointError(f"{self.where}: hidden_size={hidden} is no multiple of num_attention_heads={heads}")
        return hidden // heads

    def refusal(self, reason: str) -> UnsupportedError:
        """The error for a model of this type that no plain family describes."""
        return UnsupportedError(f"{self.where}: {reason}")

    def shown_as(self, model_type: str, **settings: Any) -> dict[str, Any]:
        """The config of the plain family `model_type`: common fields as they are, and `settings` over them."""
        carried = {name: self.values[name] for name in _CARRIED if name in self.values}
        return {"model_type": model_type, "architectures": [ARCHITECTURES[model_type]], **carried, **settings}
