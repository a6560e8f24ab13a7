"""Tokenizers rebuilt from GGUF metadata against the tokenizers whose vocabulary the metadata holds."""

import io
import json

import numpy as np
import pytest
from gguf_files import HIDDEN, llama_layout, state_dict, write_gguf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GPT2Tokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.checkpoint.gguf_tokenizer import CONTROL, NORMAL, UNUSED, USER_DEFINED, recover_tokenizer
from cann_llm_quant.errors import CheckpointError, UnsupportedError

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces,\ttabs\n\n\nand   lines \r\n",
    "I'll don't WE'RE they've it's",
    "12345 and 3.14159, 2024-11-29;   77",
    "naïve café Ångström ﬁ е́ж 你好，世界 こんにちは 한국어 😀👩‍👩‍👧",
    "def f(x):\n    return x**2  # 64",
    "",
    " ",
    "é (decomposed)",
]
CORPUS = [*TEXTS * 20, "the cat sat on the mat and the dog sat on the log " * 20, "0123456789 " * 20]
BOS, EOS, THINK = "<|begin|>", "<|end|>", "<think>"


@pytest.fixture(scope="module")
def bpe() -> tuple[list[str], list[str]]:
    """Tokens in order of id, and merges, of a byte-level BPE trained on the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=sorted(alphabet), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [" ".join(pair) for pair in model["merges"]]


def metadata(bpe, pre: str, **changes: object) -> dict[str, object]:
    tokens, merges = bpe
    special = {BOS: CONTROL, EOS: CONTROL, THINK: USER_DEFINED, "[PAD603]": UNUSED}
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*tokens, *special],
        "token_type": [NORMAL] * len(tokens) + list(special.values()),
        "merges": merges,
        "bos_token_id": len(tokens),
        "eos_token_id": len(tokens) + 1,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def rebuilt(meta: dict[str, object]) -> Tokenizer:
    return Tokenizer.from_str(recover_tokenizer(meta, "file")["tokenizer.json"].decode())


@pytest.mark.parametrize(("pre", "kind"), [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer)])
def test_byte_level_gives_the_ids_of_the_original_class(bpe, pre, kind):
    tokens, merges = bpe
    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocab = {token: i for i, token in enumerate([*tokens, BOS, EOS])}
    original = kind(vocab=vocab, merges=pairs, unk_token=None, bos_token=BOS, eos_token=EOS, pad_token=EOS)
    ours = rebuilt(metadata(bpe, pre))
    for text in TEXTS:
        assert ours.encode(text).ids == original.encode(text, add_special_tokens=False), text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("llama-bpe", "ab  1234 IT'S x", ["ab", " ", " ", "123", "4", " IT", "'S", " x"]),
        ("qwen2", "ab  1234 IT'S x", ["ab", " ", " ", "1", "2", "3", "4", " IT", "'S", " x"]),
        ("smollm", "ab  1234 IT'S x", ["ab", "  ", "1", "2", "3", "4", " IT", "'", "S", " x"]),
        ("gpt-2", "ab  1234 IT's x", ["ab", " ", " 1234", " IT", "'s", " x"]),
        ("tekken", "ab  12 fooBar x", ["ab", " ", " ", "1", "2", " foo", "Bar", " x"]),
    ],
)
def test_where_text_is_cut(bpe, pre, text, pieces):
    cut = [piece.replace("Ġ", " ") for piece, _ in rebuilt(metadata(bpe, pre)).pre_tokenizer.pre_tokenize_str(text)]
    assert cut == pieces


def test_special_tokens_are_whole_and_padding_is_dropped(bpe):
    tokens, _ = bpe
    n = len(tokens)
    tokenizer = rebuilt(metadata(bpe, "gpt-2"))
    assert tokenizer.encode(f"{BOS}a{THINK}b{EOS}").ids == [n, tokens.index("a"), n + 2, tokens.index("b"), n + 1]
    assert tokenizer.get_vocab_size() == n + 3
    assert tokenizer.decode([n, tokens.index("a"), n + 2, n + 1]) == f"a{THINK}"


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(bpe, text):
    tokenizer = rebuilt(metadata(bpe, "llama-bpe", add_bos_token=False))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("pre", "changes", "bos", "eos"),
    [
        ("gpt-2", {}, False, False),
        ("llama-bpe", {}, True, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, True, True),
    ],
)
def test_transformers_adds_the_same_special_tokens(bpe, tmp_path, pre, changes, bos, eos):
    n = len(bpe[0])
    files = recover_tokenizer(metadata(bpe, pre, **changes) | {"tokenizer.chat_template": "{{ messages }}é"}, "file")
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    plain = tokenizer.encode("hello 12", add_special_tokens=False)
    assert tokenizer.encode("hello 12") == [n] * bos + plain + [n + 1] * eos
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("hello 12").ids == tokenizer.encode("hello 12")
    assert (tokenizer.bos_token, tokenizer.eos_token) == (BOS, EOS)
    assert tokenizer.chat_template == "{{ messages }}é"
    assert json.loads(files["generation_config.json"]) == {"bos_token_id": n, "eos_token_id": n + 1}


def sentencepiece_metadata() -> tuple[object, dict[str, object]]:
    """A SentencePiece BPE model with Llama's settings trained on the corpus, and what a GGUF would say about it."""
    library = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.split("\n")]),
        model_writer=model,
        model_type="bpe",
        vocab_size=500,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    original = library.SentencePieceProcessor(model_proto=model.getvalue())
    kinds = [(original.is_unknown, 2), (original.is_control, CONTROL), (original.is_byte, 6)]
    size = original.get_piece_size()
    values = {
        "model": "llama",
        "tokens": [original.id_to_piece(i) for i in range(size)],
        "scores": [original.get_score(i) for i in range(size)],
        "token_type": [next((kind for test, kind in kinds if test(i)), NORMAL) for i in range(size)],
        "bos_token_id": original.bos_id(),
        "eos_token_id": original.eos_id(),
        "unknown_token_id": original.unk_id(),
    }
    return original, {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def test_sentencepiece_gives_the_ids_of_the_original():
    original, meta = sentencepiece_metadata()
    tokenizer = rebuilt(meta)
    for text in TEXTS:
        ids = original.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
        assert tokenizer.encode(text).ids == [original.bos_id(), *ids]
        assert tokenizer.decode(ids) == original.decode(ids)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pre": "default"}, UnsupportedError, "'default'"),
        ({"pre": None}, UnsupportedError, "tokenizer.json"),
        ({"model": "rwkv"}, UnsupportedError, "'rwkv'"),
        ({"tokens": []}, CheckpointError, "no vocabulary"),
        ({"token_type": [1, 2]}, CheckpointError, "token_type"),
        ({"merges": ["no such"]}, CheckpointError, "'no such'"),
        ({"eos_token_id": 10**6}, CheckpointError, "eos_token_id"),
    ],
)
def test_what_cannot_be_rebuilt_faithfully_is_refused(bpe, changes, error, message):
    with pytest.raises(error, match=message):
        recover_tokenizer(metadata(bpe, **({"pre": "gpt-2"} | changes)), "file")


def test_files_beside_the_gguf_win(tmp_path, bpe):
    folder = tmp_path / "m"
    folder.mkdir()
    meta = metadata(bpe, "gpt-2")
    layout = llama_layout(state_dict(1)) | {"token_embd.weight": np.ones((len(bpe[0]) + 4, HIDDEN), np.float32)}
    write_gguf(folder / "m.gguf", "llama", layout, metadata=meta)
    recovered = open_checkpoint(str(folder)).companion_files()
    assert recovered == open_checkpoint(str(folder / "m.gguf")).companion_files() == recover_tokenizer(meta, "file")
    (folder / "LICENSE").write_bytes(b"terms")
    assert open_checkpoint(str(folder)).companion_files() == recovered | {"LICENSE": b"terms"}
    (folder / "tokenizer.json").write_bytes(b"{}")
    assert open_checkpoint(str(folder)).companion_files() == {"LICENSE": b"terms", "tokenizer.json": b"{}"}
