"""What the GGUF tests need: a `PackedModel` of a folder, and a byte-level BPE tokenizer made in a moment."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.checkpoint.gguf_tokenizer import SPLITS
from cann_llm_quant.export.layout import PackedModel
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.quant.kv import KvPlan

TEXT = [
    "Once upon a time there was a little girl named Lily. She loved to play outside in the park.",
    "The answer is 42, isn't it? They're 3 for $10.50!\n\n  def f(x):\n\treturn x + 1\n",
    "我们学习数学。Ça va? Grüße aus München, 1989.",
]


def packed_model(checkpoint: Checkpoint, dtype: torch.dtype = torch.bfloat16) -> PackedModel:
    """The exporter's view of a checkpoint; a float one has no schemes."""
    arch = arch_from_checkpoint(checkpoint)
    linears = checkpoint.reader.linears if isinstance(checkpoint, PackedCheckpoint) else {}
    return PackedModel(
        arch=arch,
        schemes={module: linear.scheme for module, linear in linears.items()},
        activations={m: linear.activations for m, linear in linears.items() if linear.activations is not None},
        shapes={module: linear.shape for module, linear in linears.items()},
        kv=KvPlan.plain(arch.num_layers),
        dtype=dtype,
        config=checkpoint.config,
        tied=checkpoint.reader.tied if isinstance(checkpoint, PackedCheckpoint) else {},
    )


def save_byte_level(folder: Path, vocab: int = 400, split: str = "qwen2") -> Path:
    """A byte-level BPE tokenizer that cuts text as `split` does; 0, 1, 2 are special."""
    tokenizer = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(SPLITS[split]), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<|endoftext|>"
    ).save_pretrained(folder)
    return folder
