"""A Hugging Face tokenizer in the metadata of a GGUF file.

Two kinds can be said. Byte-level BPE is `gpt2`: tokens, merges, and in `tokenizer.ggml.pre` the name of one of the ways
to cut text before merging that llama.cpp has built in; the way is recognized by what tokenizer.json says itself, never
by a model's name. BPE over pieces with byte fallback is `llama` (SentencePiece): llama.cpp merges the adjacent pair
whose result scores highest, so that a piece's score is minus the rank of the first merge that makes it. Both agree
where every split of every piece is a merge and the merges of a piece follow each other.

Everything else is refused: a wrong cut gives wrong ids without any error.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from cann_llm_quant.checkpoint.gguf_tokenizer import (
    BYTE,
    CONTROL,
    GPT2_WORDS,
    GPT2_WORDS_SINGLE_DIGITS,
    NORMAL,
    SPLITS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    WHOLE_WORDS_FIRST,
)
from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.shown import shown
from cann_llm_quant.tokenizer import adds_bos, check_vocabulary

_SPACE = "▁"
_PHI3_TOKENS = frozenset({"</s>", "<unk>", "<s>", "<|endoftext|>"})
_END_NAMES = ("eos", "eot", "eom")
_BYTES = frozenset(f"<0x{value:02X}>" for value in range(256))


def no_tokenizer() -> dict[str, Any]:
    """The metadata of a file without a vocabulary: its runtime is given token ids."""
    return {"tokenizer.ggml.model": "none"}


def tokenizer_metadata(
    tokenizer: PreTrainedTokenizerBase, rows: int, end_ids: Sequence[int]
) -> tuple[dict[str, Any], list[str]]:
    """The `tokenizer.*` keys for an embedding of `rows`, and warnings; `end_ids` end a text, the usual one first.

    Raises UnsupportedError for a tokenizer that GGUF cannot say, CheckpointError for one of more tokens than rows.
    """
    check_vocabulary(tokenizer, rows)
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    model = document["model"]
    _check_model(model)
    words = _Words(document, rows)
    if model.get("byte_fallback"):
        values, warnings = _pieces(document, words)
    else:
        values, warnings = _byte_level(document, words)
    ends = list(dict.fromkeys([*_usual_end(tokenizer), *end_ids]))
    if len(ends) > len(_END_NAMES):
        warnings.append(
            f"GGUF names {len(_END_NAMES)} tokens that end a text; {len(ends) - len(_END_NAMES)} are left out"
        )
    return {**values, **_special(tokenizer, ends), **_template(tokenizer)}, warnings


def harmless_name(name: str, tokens: Collection[str]) -> str:
    """A model's name that llama.cpp takes for no Phi-3 unless it has that model's tokens.

    Of a name with `phi3` or `phi-3` in it llama.cpp looks up four special tokens, and loads nothing where one lacks.
    """
    return name if set(tokens) >= _PHI3_TOKENS else re.sub(r"(?i)(phi)-?(3)", r"\1 \2", name)


class _Words:
    """All tokens by id up to `rows`, with their types; ids that no token has are padding."""

    def __init__(self, document: Mapping[str, Any], rows: int) -> None:
        self.tokens = [f"[PAD{index}]" for index in range(rows)]
        self.types = [UNUSED] * rows
        for token, index in document["model"]["vocab"].items():
            self.tokens[index], self.types[index] = token, NORMAL
        for added in document["added_tokens"]:
            index = added["id"]
            self.tokens[index], self.types[index] = added["content"], CONTROL if added["special"] else USER_DEFINED


def _refused(what: str) -> UnsupportedError:
    return UnsupportedError(f"{what}, which GGUF has no word for; add --no-tokenizer to write a file without one")


def _check_model(model: Mapping[str, Any]) -> None:
    if model.get("type") != "BPE":
        raise _refused(f"the tokenizer is of kind {model.get('type')}")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise _refused(f"the tokenizer has {name}={shown(model[name])}")


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
    return [(left, right) for left, right in pairs]


def _byte_level(document: Mapping[str, Any], words: _Words) -> tuple[dict[str, Any], list[str]]:
    normalizer = document["normalizer"]
    if normalizer is not None and normalizer["type"] != "NFC":
        raise _refused(f"the tokenizer's normalizer is {normalizer['type']}")
    warnings = ["llama.cpp does not normalize text to NFC as this tokenizer does"] if normalizer else []
    pre = split_name(document["pre_tokenizer"], bool(document["model"].get("ignore_merges")))
    if pre is None:
        raise _refused("the tokenizer cuts text before merging in a way of its own")
    merges = [f"{left} {right}" for left, right in _merges(document["model"])]
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": words.tokens,
        "tokenizer.ggml.token_type": words.types,
        "tokenizer.ggml.merges": merges,
    }
    return values, warnings


def split_name(pre_tokenizer: Mapping[str, Any] | None, whole_words: bool) -> str | None:
    """llama.cpp's name of a way to cut text, None for one that it does not know.

    `whole_words`: words that are tokens stay whole without merging (`ignore_merges`), which the name decides too.
    """
    steps = _steps(pre_tokenizer)
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    *before, words = steps
    if words["use_regex"]:
        names = {(): GPT2_WORDS, ("Digits",): GPT2_WORDS_SINGLE_DIGITS}.get(tuple(step["type"] for step in before), ())
        single = all(step["individual_digits"] for step in before)
        return names[0] if names and single and not whole_words else None
    if len(before) != 1 or before[0]["type"] != "Split" or before[0]["behavior"] != "Isolated" or before[0]["invert"]:
        return None
    pattern = before[0]["pattern"].get("Regex")
    fitting = (
        name for name, split in SPLITS.items() if split == pattern and (name in WHOLE_WORDS_FIRST) == whole_words
    )
    return next(fitting, None)


def _steps(pre_tokenizer: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return []
    return list(pre_tokenizer["pretokenizers"]) if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]


def _pieces(document: Mapping[str, Any], words: _Words) -> tuple[dict[str, Any], list[str]]:
    if missing := _BYTES - document["model"]["vocab"].keys():
        raise _refused(f"the tokenizer falls back to bytes but has no token {min(missing)}")
    prefix, warnings = _space_prefix(document)
    for index, token in enumerate(words.tokens):
        if token in _BYTES:
            words.types[index] = BYTE
        elif token == document["model"].get("unk_token"):
            words.types[index] = UNKNOWN
    merges = _merges(document["model"])
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": words.tokens,
        "tokenizer.ggml.scores": [-float(ranks.get(token, len(merges))) for token in words.tokens],
        "tokenizer.ggml.token_type": words.types,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    return values, warnings + _differing_merges(merges, ranks, words)


def _space_prefix(document: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Whether a space comes before a text; spaces must be written as `▁` and text must not be cut otherwise."""
    normalizer, pre = document["normalizer"], document["pre_tokenizer"]
    steps = _normalizers(normalizer)
    prepend = {"type": "Prepend", "prepend": _SPACE}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    if pre is None and steps in ([prepend, replace], [replace]):
        return len(steps) == 2, []
    if not steps and pre is not None and pre["type"] == "Metaspace" and pre["replacement"] == _SPACE:
        scheme = pre["prepend_scheme"]
        first = "llama.cpp puts a space also behind special tokens, this tokenizer only before the text"
        return scheme != "never", [first] if scheme == "first" else []
    raise _refused("the tokenizer prepares text in a way of its own")


def _normalizers(normalizer: Mapping[str, Any] | None) -> list[Any]:
    if normalizer is None:
        return []
    return list(normalizer["normalizers"]) if normalizer["type"] == "Sequence" else [normalizer]


def _differing_merges(merges: Sequence[tuple[str, str]], ranks: Mapping[str, int], words: _Words) -> list[str]:
    """A warning where merging by piece can differ from merging by pair."""
    known = set(merges)
    pieces = {token for token, kind in zip(words.tokens, words.types, strict=True) if kind == NORMAL}
    splits = ((piece[:cut], piece[cut:]) for piece in sorted(pieces) for cut in range(1, len(piece)))
    absent = sum(left in pieces and right in pieces and (left, right) not in known for left, right in splits)
    order = [ranks[left + right] for left, right in merges]
    if not absent and order == sorted(order):
        return []
    return [
        f"llama.cpp merges by piece, this tokenizer by pair ({absent} pairs that it does not merge have a piece): some "
        "texts may be cut otherwise"
    ]


def _usual_end(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _special(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> dict[str, Any]:
    """Ids of special tokens, and which of them the tokenizer puts around a text by itself."""
    usual = _usual_end(tokenizer)
    ids = {
        "bos": tokenizer.bos_token_id,
        **dict(zip(_END_NAMES, ends, strict=False)),
        "unknown": tokenizer.unk_token_id,
        "padding": tokenizer.pad_token_id,
    }
    marked = tokenizer.encode("a", add_special_tokens=True, verbose=False)
    return {
        **{f"tokenizer.ggml.{name}_token_id": index for name, index in ids.items() if index is not None},
        "tokenizer.ggml.add_bos_token": adds_bos(tokenizer),
        "tokenizer.ggml.add_eos_token": bool(usual) and marked[-1:] == usual,
    }


def _template(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return {"tokenizer.chat_template": template} if isinstance(template, str) else {}
