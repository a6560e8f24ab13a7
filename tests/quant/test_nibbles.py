"""Nibbles rearranged in words, against a literal twin that unpacks each."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_llm_quant.quant.bit_stream import BitStream, as_bytes, as_words
from cann_llm_quant.quant.nibbles import run_sums, transpose_nibbles, unzip_nibbles, zip_nibbles

SIZES = st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 1 << 30))


def random_bytes(rows: int, count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (rows, count), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def nibbles(stream: torch.Tensor) -> list[list[int]]:
    return [[nibble for byte in row for nibble in (byte & 15, byte >> 4)] for row in stream.tolist()]


def test_zip_by_hand() -> None:
    low, high = torch.tensor([[0x10, 0x32, 0xEF, 0x08]]).byte(), torch.tensor([[0x54, 0x76, 0xCD, 0x90]]).byte()
    assert zip_nibbles(low, high)[0].tolist() == [0x40, 0x51, 0x62, 0x73, 0xDF, 0xCE, 0x08, 0x90]


@settings(max_examples=40, deadline=None)
@given(SIZES)
def test_zip_puts_two_rows_into_one_and_unzip_parts_them(sizes: tuple[int, int, int]) -> None:
    rows, words, seed = sizes
    both = random_bytes(2 * rows, 4 * words, seed)
    low, high = both[0::2], both[1::2]
    zipped = zip_nibbles(low, high)
    pairs = zip(nibbles(low), nibbles(high), strict=True)
    assert zipped.tolist() == [[a | b << 4 for a, b in zip(*rows, strict=True)] for rows in pairs]
    assert all(torch.equal(part, whole) for part, whole in zip(unzip_nibbles(zipped), (low, high), strict=True))


@settings(max_examples=40, deadline=None)
@given(SIZES)
def test_transposed_nibbles_are_those_of_the_other_word(sizes: tuple[int, int, int]) -> None:
    runs, count, seed = sizes
    words = as_words(random_bytes(8 * runs, 4 * count, seed)).view(runs, 8, count)
    result = transpose_nibbles(words.clone())
    for i in range(8):
        for j in range(8):
            assert torch.equal((result[:, j] >> (4 * i)) & 15, (words[:, i] >> (4 * j)) & 15)
    assert torch.equal(transpose_nibbles(result), words)


@settings(max_examples=40, deadline=None)
@given(SIZES, st.sampled_from([8, 16, 24, 32, 64, 128, 192]))
def test_sums_of_runs(sizes: tuple[int, int, int], run: int) -> None:
    rows, count, seed = sizes
    stream = random_bytes(rows, run // 2 * count, seed)
    expected = [[sum(row[at : at + run]) for at in range(0, len(row), run)] for row in nibbles(stream)]
    assert run_sums(stream, run).tolist() == expected
    full = torch.full_like(stream, 0xFF)
    assert bool((run_sums(full, run) == 15 * run).all())


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.integers(1, 4), st.sampled_from([2, 3, 4, 5, 6, 8]), st.integers(0, 1 << 30))
def test_a_stream_gives_its_codes_back(out: int, runs: int, bits: int, seed: int) -> None:
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (out, 8 * runs), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    stream = BitStream.of(codes, bits)
    assert stream.shape == (out, 8 * runs)
    assert torch.equal(stream.codes(), codes)
    assert torch.equal(BitStream(stream.packed[1:], bits).codes(), codes[1:])


def test_blocks_cover_every_row_once() -> None:
    stream = BitStream(random_bytes(53, 100_000, 0), 4)
    rows = [row for block in stream.blocks() for row in range(53)[block]]
    assert rows == list(range(53))
    assert all(block.start % 8 == 0 for block in stream.blocks())
    assert torch.equal(as_bytes(as_words(stream.packed)), stream.packed)
