"""Tokenizers written to GGUF metadata and rebuilt from it give the same ids; what GGUF cannot say is refused."""

import json
from pathlib import Path

import pytest
from gguf_exports import TEXT, cut, packed_model, save_byte_level, save_pieces
from tiny_models import save_tiny
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.checkpoint.gguf_tokenizer import recover_tokenizer
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.export.gguf_export import plan_gguf
from cann_llm_quant.export.gguf_tokenizer import harmless_name, split_name, tokenizer_metadata
from cann_llm_quant.tokenizer import load_tokenizer

ROWS = 419
TEXTS = [*TEXT, "It's 12345 tests:  \n\n they'll\t pass — naïve 日本 🙂", "<|im_start|>user<|im_end|>", " a  b "]
SPLITS = ["qwen2", "llama-bpe", "chatglm-bpe", "tekken", "gpt-2", "smollm"]


def step(pre_tokenizer: pre_tokenizers.PreTokenizer) -> dict:
    """The pre-tokenizer as tokenizer.json has it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    return json.loads(tokenizer.to_str())["pre_tokenizer"]


def rebuilt(metadata: dict, folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that our importer makes of the metadata."""
    folder.mkdir()
    for name, content in recover_tokenizer(metadata, "m.gguf").items():
        (folder / name).write_bytes(content)
    return load_tokenizer(folder)


@pytest.mark.parametrize("split", SPLITS)
def test_byte_level_tokenizers_come_back_with_the_same_ids(tmp_path: Path, split: str):
    whole = split in ("llama-bpe", "tekken")
    tokenizer = load_tokenizer(save_byte_level(tmp_path / "t", split=split, whole_words=whole))
    metadata, warnings = tokenizer_metadata(tokenizer, ROWS, [2, 0])
    assert warnings == []
    assert metadata["tokenizer.ggml.pre"] == split
    assert [metadata[f"tokenizer.ggml.{kind}_token_id"] for kind in ("bos", "eos", "eot", "padding")] == [0, 2, 0, 0]
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    other = rebuilt(metadata, tmp_path / "back")
    for text in TEXTS:
        assert other.encode(text) == tokenizer.encode(text)


def test_more_ends_than_gguf_has_names_for_are_said(tmp_path: Path):
    tokenizer = load_tokenizer(save_byte_level(tmp_path / "t"))
    metadata, warnings = tokenizer_metadata(tokenizer, ROWS, [2, 0, 5, 7, 9])
    assert [metadata[f"tokenizer.ggml.{kind}_token_id"] for kind in ("eos", "eot", "eom")] == [2, 0, 5]
    assert warnings == ["GGUF names 3 tokens that end a text; 2 are left out"]


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_come_back_with_the_same_ids(tmp_path: Path, prefix: bool):
    tokenizer = load_tokenizer(save_pieces(tmp_path / "t", prefix=prefix))
    metadata, warnings = tokenizer_metadata(tokenizer, ROWS, [])
    assert warnings == []
    assert metadata["tokenizer.ggml.add_space_prefix"] is prefix
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["tokenizer.ggml.token_type"][:5] == [2, 3, 3, 6, 6]  # unknown, control, control, bytes
    other = rebuilt(metadata, tmp_path / "back")
    for text in TEXTS:
        assert other.encode(text) == tokenizer.encode(text)


def test_a_piece_with_a_split_that_is_no_merge_is_warned_of(tmp_path: Path):
    tokenizer = load_tokenizer(save_pieces(tmp_path / "t", split_first=True))
    (warning,) = tokenizer_metadata(tokenizer, ROWS, [])[1]
    assert "merges by piece" in warning
    assert "(1 pairs" in warning


def test_merges_of_a_piece_that_lie_apart_are_warned_of(tmp_path: Path):
    folder = save_pieces(tmp_path / "t")
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    merges = document["model"]["merges"]
    merges.append(merges.pop(2))  # one of the two splits of the piece for "the"
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    (warning,) = tokenizer_metadata(load_tokenizer(folder), ROWS, [])[1]
    assert "some texts may be cut otherwise" in warning


def test_the_way_of_cutting_text_is_recognized_by_itself():
    for split in SPLITS:
        whole = split in ("llama-bpe", "tekken")
        assert split_name(step(cut(split)), whole) == split
        if split not in ("llama-bpe", "chatglm-bpe"):
            assert split_name(step(cut(split)), not whole) is None
    assert split_name(step(pre_tokenizers.ByteLevel(add_prefix_space=True)), False) is None
    assert split_name(step(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)), False) is None
    assert split_name(step(pre_tokenizers.Whitespace()), False) is None
    assert split_name(None, False) is None
    grouped = [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    assert split_name(step(pre_tokenizers.Sequence(grouped)), False) is None
    other = [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    assert split_name(step(pre_tokenizers.Sequence(other)), False) is None


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_what_gguf_has_no_word_for_is_refused(tmp_path: Path):
    words = wrap(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(UnsupportedError, match=r"of kind WordLevel, which GGUF has no word for; add --no-tokenizer"):
        tokenizer_metadata(words, ROWS, [])
    other = load_tokenizer(save_byte_level(tmp_path / "a"))
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(UnsupportedError, match="cuts text before merging in a way of its own"):
        tokenizer_metadata(other, ROWS, [])
    lower = load_tokenizer(save_byte_level(tmp_path / "b"))
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(UnsupportedError, match="normalizer is Lowercase"):
        tokenizer_metadata(lower, ROWS, [])
    pieces = load_tokenizer(save_pieces(tmp_path / "c"))
    pieces.backend_tokenizer.normalizer = normalizers.NFKC()
    with pytest.raises(UnsupportedError, match="prepares text in a way of its own"):
        tokenizer_metadata(pieces, ROWS, [])


def test_nfc_is_warned_of(tmp_path: Path):
    tokenizer = load_tokenizer(save_byte_level(tmp_path / "t"))
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    assert tokenizer_metadata(tokenizer, ROWS, [])[1] == [
        "llama.cpp does not normalize text to NFC as this tokenizer does"
    ]


def test_more_tokens_than_rows_are_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="do not belong together"):
        tokenizer_metadata(load_tokenizer(save_byte_level(tmp_path / "t")), 300, [])


def test_the_chat_template_is_kept(tmp_path: Path):
    tokenizer = load_tokenizer(save_byte_level(tmp_path / "t"))
    tokenizer.chat_template = "{{ messages }}"
    assert tokenizer_metadata(tokenizer, ROWS, [])[0]["tokenizer.chat_template"] == "{{ messages }}"
    tokenizer.chat_template = {"default": "a", "tools": "b"}
    assert tokenizer_metadata(tokenizer, ROWS, [])[0]["tokenizer.chat_template"] == "a"


@pytest.mark.parametrize(("name", "written"), [("my-phi3-merge", "my-phi 3-merge"), ("Phi-3-mini", "Phi 3-mini")])
def test_a_name_that_llama_cpp_takes_for_phi_3_is_written_apart(tmp_path: Path, name: str, written: str):
    """llama.cpp (wheel of 2026-10) ends with `_Map_base::at` where such a name has no <|endoftext|>."""
    source = save_pieces(save_tiny(tmp_path / name, vocab_size=ROWS, num_hidden_layers=1))
    with open_checkpoint(str(source)) as checkpoint:
        assert plan_gguf(checkpoint, packed_model(checkpoint)).metadata["general.name"] == written
    phi3 = ["</s>", "<unk>", "<s>", "<|endoftext|>"]
    assert harmless_name(name, phi3) == name


@pytest.mark.parametrize("value", ["</s>", {"id": 2}, [2, None], 2.0, True])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_ends_that_are_no_numbers_are_refused_in_one_line(tmp_path: Path, file: str, value: object):
    source = save_pieces(save_tiny(tmp_path / "m", vocab_size=ROWS, num_hidden_layers=1))
    path, other = source / file, source / "generation_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    other.unlink(missing_ok=True)
    path.write_text(json.dumps(config | {"eos_token_id": value}), encoding="utf-8")
    with (
        open_checkpoint(str(source)) as checkpoint,
        pytest.raises(CheckpointError, match=rf"{file}: eos_token_id .* is neither"),
    ):
        plan_gguf(checkpoint, packed_model(checkpoint))
