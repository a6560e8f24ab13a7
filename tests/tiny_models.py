"""Tiny random checkpoints with a tokenizer, saved by transformers: what the suite quantizes, resumes and reloads."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GlmConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from cann_llm_quant.calibrate.streamed_logits import StreamedLogits
from cann_llm_quant.export.native_reader import open_native
from cann_llm_quant.models import arch_from_checkpoint

VOCAB = 128
CONFIGS = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "glm": GlmConfig,
    "qwen2_moe": Qwen2MoeConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "mixtral": MixtralConfig,
}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Without these, a "tiny" mixture would have 60 or 128 experts of its family's full width.
FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXTURES: dict[str, dict[str, int]] = {
    "qwen2_moe": FEW_EXPERTS | {"shared_expert_intermediate_size": 64},
    "qwen3_moe": FEW_EXPERTS | {"head_dim": 16},
}
# A head's size and the token of padding are a large model's where GLM's config is silent.
SMALL: dict[str, dict[str, int | None]] = {"glm": {"head_dim": 16, "pad_token_id": None}}


def save_tiny(
    folder: Path, family: str = "llama", *, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **config: Any
) -> Path:
    """A random model of `family` whose channels differ in size, so that methods differ; returns the folder."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        CONFIGS[family](**(SIZES | MIXTURES.get(family, {}) | SMALL.get(family, {}) | config))
    )
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(torch.empty_like(parameter).log_normal_(0.0, 0.7, generator=generator))
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.5, generator=generator)
            elif parameter.dim() >= 2:
                parameter.normal_(0.0, 0.08, generator=generator)
    model.to(dtype).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def our_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Logits [windows, seq, vocab] of a native folder, its weights dequantized to float32."""
    with open_native(folder) as checkpoint:
        arch = arch_from_checkpoint(checkpoint)
        device = torch.device("cpu")
        stream = StreamedLogits(checkpoint, arch, device=device, dtype=torch.float32, budget=1 << 30)
        return torch.stack(list(stream(ids)))


def save_tokenizer(folder: Path) -> None:
    """One token per word `w3` … `w127`; 0, 1, 2 are unknown, BOS and EOS."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def save_text(path: Path, tokens: int = 4000, seed: int = 0) -> Path:
    """A file of random words with a little structure: each word is likely followed by its neighbour."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(0, 7, (tokens,), generator=generator)
    jumps = torch.randint(3, VOCAB, (tokens,), generator=generator)
    word, words = 3, []
    for step, jump in zip(steps.tolist(), jumps.tolist(), strict=True):
        word = jump if step == 0 else 3 + (word - 3 + step) % (VOCAB - 3)
        words.append(f"w{word}")
    path.write_text(" ".join(words), encoding="utf-8")
    return path
