"""Tokenizers small enough to write down: byte-level BPE, and SentencePiece-like BPE with byte fallback."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]
SAMPLE = ["the thin three Thai thorn", "один два три", "今天天气很好", "naïve café €uro", "😀 😁 👩‍👩‍👧"]


def byte_level(vocab: int = 320) -> PreTrainedTokenizerFast:
    """Byte-level BPE: 4 special tokens, 256 bytes, then merges, some of which end inside a character."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=vocab, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(SAMPLE * 3, trainer)
    return _wrap(inner)


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Words of `▁` and letters; everything else as bytes; BOS first; the space before the first word is not decoded."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b", "ab", "▁ab"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("a", "b"), ("▁", "ab"), ("▁", "a"), ("▁", "b")]
    inner = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    inner.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return _wrap(inner)


def _wrap(inner: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|end|>"],
    )
