"""A tiny random checkpoint of every family, and the transformers model it came from as the reference."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.models.decoder import DecoderModel
from cann_llm_quant.models.weights import load_model

CPU = torch.device("cpu")
# sizes that no power of two divides, three query heads per key head
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 28}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 10},
    "mistral": {"head_dim": 10, "sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 10},
    "glm": {"head_dim": 12, "attention_bias": True, "rms_norm_eps": 1e-6},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 10},
    "qwen2_moe": QWEN_EXPERTS | {"shared_expert_intermediate_size": 44},
    "qwen3_moe": QWEN_EXPERTS | {"head_dim": 10, "norm_topk_prob": True},
}


def save_family(folder: Path, family: str, **config: Any) -> PreTrainedModel:
    """Save a random float32 model whose norms and biases matter; returns it."""
    settings = SIZES | FAMILIES.get(family, {}) | config
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3, generator=generator)
            elif parameter.dim() == 1:
                parameter.normal_(1.0, 0.3, generator=generator)
            else:
                parameter.normal_(0.0, 1 / math.sqrt(parameter.shape[-1]), generator=generator)
    model.tie_weights()
    model.save_pretrained(folder)
    return model.eval()


def load_ours(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    """The checkpoint in `folder` as our decoder runs it."""
    with open_checkpoint(str(folder)) as checkpoint:
        return load_model(checkpoint, arch_from_checkpoint(checkpoint), CPU, dtype)


def reference_logits(model: PreTrainedModel, ids: Tensor, **inputs: Any) -> Tensor:
    """What transformers computes."""
    with torch.no_grad():
        return model(ids, **inputs).logits


def random_ids(vocab: int, batch: int, seq: int, seed: int = 3) -> Tensor:
    return torch.randint(0, vocab, (batch, seq), generator=torch.Generator().manual_seed(seed))


def edit_config(folder: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    """Change `config.json` as a user or another tool would."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config = {name: value for name, value in config.items() if name not in remove} | changes
    path.write_text(json.dumps(config), encoding="utf-8")
