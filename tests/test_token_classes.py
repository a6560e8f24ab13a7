"""Tokens that are numbers or begin names, in vocabularies that mark the start of a word in different ways."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cann_llm_quant.errors import UsageError
from cann_llm_quant.token_classes import sensitive_ids

# text of a token, and the classes it is in, by hand; a leading space is the mark of a word's start
WORDS = {
    " Paris": "names",
    "Paris": "",
    " The": "",
    " the": "",
    " However": "",
    " NASA": "names",
    " Mc": "names",
    " Émile": "names",
    " 7": "numbers",
    "42nd": "numbers",
    " B2": "numbers names",
    "seven": "",
    "東京": "",
    "٣": "numbers",
}


def byte_level(texts: list[str]) -> PreTrainedTokenizerFast:
    """Pieces as a byte-level BPE has them, `Ġ` for a space."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [level.pre_tokenize_str(text)[0][0] for text in texts]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys([*level.alphabet(), *pieces]))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = level, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|Pad0|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|Pad0|>")


def test_classes_of_byte_level_pieces() -> None:
    tokenizer = byte_level(list(WORDS))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = {name: sensitive_ids(tokenizer, [name]) for name in ("numbers", "names")}
    for text, classes in WORDS.items():
        token = tokenizer.convert_tokens_to_ids(level.pre_tokenize_str(text)[0][0])
        assert " ".join(name for name in ("numbers", "names") if token in found[name]) == classes, text
    special = tokenizer.convert_tokens_to_ids("<|Pad0|>")
    assert special not in found["numbers"] | found["names"]
    assert sensitive_ids(tokenizer, ["numbers", "names"]) == found["numbers"] | found["names"]
    assert sensitive_ids(tokenizer, []) == frozenset()


def test_words_start_at_the_mark_of_the_vocabulary() -> None:
    pieces = ["<unk>", "▁Anna", "Anna", "▁and", "▁1"]
    marked = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    marked.decoder = decoders.Metaspace()
    assert sensitive_ids(PreTrainedTokenizerFast(tokenizer_object=marked), ["names"]) == {1}
    pieces = ["[UNK]", "Anna", "##Anna", "and"]
    continued = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    continued.decoder = decoders.WordPiece()
    found = sensitive_ids(PreTrainedTokenizerFast(tokenizer_object=continued, unk_token="[UNK]"), ["names"])
    assert found == {1}


def test_an_unknown_class_is_refused() -> None:
    with pytest.raises(UsageError, match="'dates' is no class of tokens; choose from numbers, names"):
        sensitive_ids(byte_level(["a"]), ["dates"])
