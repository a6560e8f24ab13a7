"""A Hugging Face tokenizer rebuilt from a GGUF file's metadata.

Two kinds exist in the supported families. `gpt2` is byte-level BPE with stored merges, where `tokenizer.ggml.pre` names
the regular expressions that cut text before merging; a wrong one gives wrong ids silently, so an unknown name is
refused. `llama` is SentencePiece BPE: it always merges the adjacent pair whose result scores highest, which as ranked
merges is every split of every piece into two pieces, best score first.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from cann_llm_quant.checkpoint.gguf_config import token_ids
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.shown import shown

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "chatglm-bpe": _LLAMA3,
    "glm4": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
GPT2_WORDS = ("gpt-2", "gpt2", "olmo", "jais", "mpt")
GPT2_WORDS_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")  # these also begin with BOS unless told otherwise
_NFC = ("qwen2",)


def recover_tokenizer(metadata: Mapping[str, Any], where: str) -> dict[str, bytes]:
    """`tokenizer.json`, `tokenizer_config.json` and `generation_config.json` by name.

    Raises UnsupportedError for a tokenizer that cannot be rebuilt faithfully, CheckpointError for a contradiction.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens, types = _vocabulary(metadata, where)
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(metadata, tokens, types, where)
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(metadata, tokens, types), True
    else:
        raise UnsupportedError(
            f"{where}: tokenizer kind {shown(kind)} is not known; put the model's tokenizer.json beside it"
        )
    special = _special_tokens(metadata, tokens, where)
    _add_tokens(tokenizer, tokens, types, special)
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)) and "bos_token" in special
    adds_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and "eos_token" in special
    _set_template(tokenizer, special, adds_bos, adds_eos)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "add_bos_token": adds_bos,
        "add_eos_token": adds_eos,
        "clean_up_tokenization_spaces": False,
    }
    if isinstance(metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = metadata["tokenizer.chat_template"]
    generation = {key: value for key, value in token_ids(metadata, where).items() if value is not None}
    return {
        "generation_config.json": _json_bytes(generation),
        "tokenizer.json": tokenizer.to_str().encode("utf-8"),
        "tokenizer_config.json": _json_bytes(config),
    }


def _vocabulary(metadata: Mapping[str, Any], where: str) -> tuple[list[str], list[int]]:
    """Tokens and their types."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise CheckpointError(
            f"{where} holds no vocabulary; put the model's tokenizer files beside it in a folder of its own"
        )
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    for name, values in (("token_type", types), ("scores", metadata.get("tokenizer.ggml.scores") or types)):
        if not isinstance(values, list) or len(values) != len(tokens) or isinstance(values[0], str):
            raise CheckpointError(
                f"{where}: tokenizer.ggml.{name} does not fit the {len(tokens)} tokens; fetch it again"
            )
    return tokens, types


def _json_bytes(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def _special_tokens(metadata: Mapping[str, Any], tokens: Sequence[str], where: str) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {}
    for name, key in keys.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is None:
            continue
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            raise CheckpointError(
                f"{where}: {key}_token_id {shown(index)} is outside the vocabulary of {len(tokens)} tokens"
            )
        found[name] = tokens[index]
    return found


def _byte_level(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str
) -> tuple[Tokenizer, bool]:
    pre = metadata.get("tokenizer.ggml.pre")
    split = _byte_level_split(pre)
    if split is None:
        raise UnsupportedError(
            f"{where}: text splitting {shown(pre)} is not known; put the model's tokenizer.json beside it"
        )
    last = max((i for i, kind in enumerate(types) if kind != UNUSED), default=-1)
    vocab = {token: i for i, token in enumerate(tokens[: last + 1])}  # what follows only pads the embedding
    merges = _stored_merges(metadata, vocab, where)
    whole_words = pre in WHOLE_WORDS_FIRST
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole_words))
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, whole_words


def _stored_merges(metadata: Mapping[str, Any], vocab: Mapping[str, int], where: str) -> list[tuple[str, str]]:
    merges = []
    for merge in metadata.get("tokenizer.ggml.merges") or []:
        left, _, right = str(merge).partition(" ")
        if not {left, right, left + right} <= vocab.keys():
            raise CheckpointError(f"{where}: merge {shown(merge)} names a token outside the vocabulary; fetch it again")
        merges.append((left, right))
    return merges


def _byte_level_split(pre: Any) -> pre_tokenizers.PreTokenizer | None:
    if pre in GPT2_WORDS:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in GPT2_WORDS_SINGLE_DIGITS:
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if pre in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[pre]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return None


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores") or [-float(i) for i in range(len(tokens))]
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=ranked_merges(tokens, scores, types),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def ranked_merges(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Pairs of pieces that SentencePiece would merge, best score of the merged piece first."""
    ranks = {t: s for t, s, kind in zip(tokens, scores, types, strict=True) if kind in (NORMAL, USER_DEFINED)}
    splits = [
        (-score, index, cut, (piece[:cut], piece[cut:]))
        for index, (piece, score) in enumerate(ranks.items())
        for cut in range(1, len(piece))
        if piece[:cut] in ranks and piece[cut:] in ranks
    ]
    return [pair for *_, pair in sorted(splits)]


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int], special: Mapping[str, str]) -> None:
    """Mark tokens that text must never be cut out of: control tokens and those that the model's makers added."""
    always = set(special.values())
    added = [
        AddedToken(token, normalized=False, special=kind != USER_DEFINED)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) or token in always
    ]
    tokenizer.add_tokens(added)


def _set_template(tokenizer: Tokenizer, special: Mapping[str, str], bos: bool, eos: bool) -> None:
    if not (bos or eos):
        return
    ids = {name: tokenizer.token_to_id(special[f"{name}_token"]) for name, on in (("bos", bos), ("eos", eos)) if on}
    before = [special["bos_token"]] if bos else []
    after = [special["eos_token"]] if eos else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)],
        special_tokens=[(special[f"{name}_token"], index) for name, index in ids.items()],
    )
