"""Incremental text: equal to decoding everything at once, whole characters, bounded work."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from runner_tokenizers import byte_level, sentencepiece_like

from cann_llm_quant.runner.text_stream import CONTEXT, REPLACEMENT, TextStream, byte_tokens

BYTES = byte_level()
PIECES = sentencepiece_like()


def decoder(tokenizer):
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def streamed(tokenizer, ids, prompt=()) -> list[str]:
    stream = TextStream(decoder(tokenizer), prompt, byte_tokens(tokenizer))
    return [*(stream.push(token) for token in ids), stream.finish()]


def byte_ids(data: bytes) -> list[int]:
    """One token a byte, through GPT-2's table of printable stand-ins."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return BYTES.convert_tokens_to_ids([table[byte] for byte in data])


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60))
@example(b"\xff" * 40 + "é".encode())
@example(b"\xf0\x9f\x98" + "😀".encode() + b"\xe2\x82")
def test_random_bytes_stream_to_the_text_of_the_whole(data: bytes) -> None:
    assert "".join(streamed(BYTES, byte_ids(data))) == data.decode("utf-8", errors="replace")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, len(BYTES) - 1), max_size=60))
def test_random_tokens_stream_to_the_text_of_the_whole(ids: list[int]) -> None:
    assert "".join(streamed(BYTES, ids)) == decoder(BYTES)(ids)


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters=REPLACEMENT), max_size=30), st.booleans())
def test_valid_text_never_shows_half_a_character(text: str, by_bytes: bool) -> None:
    ids = byte_ids(text.encode()) if by_bytes else BYTES.encode(text, add_special_tokens=False)
    pieces = streamed(BYTES, ids)
    assert "".join(pieces) == text
    assert all(REPLACEMENT not in piece for piece in pieces)


@settings(max_examples=100, deadline=None)
@given(st.text("ab €é😀", max_size=25), st.text("ab €é😀", max_size=12))
def test_sentencepiece_text_continues_its_prompt(text: str, prompt: str) -> None:
    """Words keep the space before them when they continue a text, and multi-byte characters come whole."""
    whole = PIECES.encode(prompt + text, add_special_tokens=False)
    before = PIECES.encode(prompt, add_special_tokens=False)
    if whole[: len(before)] != before or not before:
        return
    pieces = streamed(PIECES, whole[len(before) :], [1, *before])
    assert prompt + "".join(pieces) == prompt + text
    assert all(REPLACEMENT not in piece for piece in pieces)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40))
@example("今天".encode() + b"\xff" + "好".encode() + b"\xe5\xa4")
def test_byte_tokens_decode_as_their_bytes(data: bytes) -> None:
    """Invalid bytes in a run cost only themselves (the tokenizers library would replace the whole run)."""
    first = PIECES.convert_tokens_to_ids("<0x00>")
    word = PIECES.convert_tokens_to_ids("▁ab")
    text = data.decode("utf-8", errors="replace")
    pieces = streamed(PIECES, [word, *(first + byte for byte in data), word], [1])
    assert "".join(pieces) == f"ab{text} ab"


def test_byte_tokens_are_told_from_text() -> None:
    first = PIECES.convert_tokens_to_ids("<0x00>")
    assert byte_tokens(PIECES) == {first + byte: byte for byte in range(256)}
    assert byte_tokens(BYTES) == {}


def test_the_first_word_of_a_sentencepiece_text_has_no_space() -> None:
    ids = PIECES.encode("ab a", add_special_tokens=False)
    assert streamed(PIECES, ids, [1])[:2] == ["ab", " a"]
    assert "".join(streamed(PIECES, ids)) == "ab a"


def test_an_unfinished_character_is_flushed_once() -> None:
    assert streamed(BYTES, byte_ids(b"a\xe2\x82")) == ["a", "", "", REPLACEMENT]


@pytest.mark.parametrize("data", [b"\xff" * 300, b"word " * 60])
def test_each_token_decodes_a_bounded_run(data: bytes) -> None:
    lengths: list[int] = []

    def counting(ids: list[int]) -> str:
        lengths.append(len(ids))
        return decoder(BYTES)(ids)

    stream = TextStream(counting)
    text = "".join(stream.push(token) for token in byte_ids(data)) + stream.finish()
    assert text == data.decode("utf-8", errors="replace")
    assert max(lengths) <= 2 * CONTEXT
    assert len(lengths) <= 2 * len(data) + 1
