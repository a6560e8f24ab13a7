"""What the GGUF tests need: a `PackedModel` of a folder, and tokenizers made in a moment."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
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


def cut(split: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer that llama.cpp calls `split`."""
    if split in SPLITS:
        pattern = pre_tokenizers.Split(Regex(SPLITS[split]), behavior="isolated")
        return pre_tokenizers.Sequence([pattern, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return (
        words if split == "gpt-2" else pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    )


def save_byte_level(folder: Path, vocab: int = 400, split: str = "qwen2", *, whole_words: bool = False) -> Path:
    """A byte-level BPE tokenizer that cuts text as `split` does; 0, 1, 2 are special."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole_words))
    tokenizer.pre_tokenizer = cut(split)
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


def save_pieces(folder: Path, *, prefix: bool = True, split_first: bool = False) -> Path:
    """A SentencePiece-like tokenizer with byte fallback, every split of a piece a merge; BOS before a text.

    `split_first` takes one merge away, whose pieces stay.
    """
    special = ["<unk>", "<s>", "</s>"]
    letters = sorted(
        {letter for text in TEXT for letter in text.replace(" ", "▁") if letter.isalpha() or letter == "▁"}
    )
    words = [
        "▁t",
        "he",
        "▁the",
        "in",
        "▁w",
        "as",
        "▁was",
        "er",
        "▁o",
        "▁on",
        "on",
        "the",
        "pa",
        "park",
        "rk",
        "▁pa",
        "▁park",
    ]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    splits = [(w[:n], w[n:]) for w in words for n in range(1, len(w)) if w[:n] in vocab and w[n:] in vocab]
    tokenizer = Tokenizer(models.BPE(vocab, splits[split_first:], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder
