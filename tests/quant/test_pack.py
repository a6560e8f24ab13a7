"""Packing against golden words, a one-number-at-a-time twin, and compressed-tensors itself."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cann_llm_quant.quant.pack import pack_int32, packed_length, unpack_int32


def hex_words(words: Tensor) -> list[str]:
    return [f"{int(word) & 0xFFFFFFFF:08x}" for word in words.flatten()]


def bit_by_bit(codes: list[int], bits: int) -> list[int]:
    """The literal twin: one long integer, cut into words."""
    stream = sum((code + (1 << (bits - 1))) << (i * bits) for i, code in enumerate(codes))
    return [(stream >> (32 * i)) & 0xFFFFFFFF for i in range(-(-len(codes) * bits // 32))]


def test_c19_golden_words() -> None:
    int4 = torch.arange(-8, 8, dtype=torch.int8)
    assert hex_words(pack_int32(int4, 4)) == ["76543210", "fedcba98"]
    assert hex_words(pack_int32(int4.view(16, 1), 4, dim=0)) == ["76543210", "fedcba98"]
    assert pack_int32(int4.view(16, 1), 4, dim=0).shape == (2, 1)
    int2 = torch.tensor([-2, -1, 0, 1] * 4, dtype=torch.int8)
    assert hex_words(pack_int32(int2, 2)) == ["e4e4e4e4"]
    assert hex_words(pack_int32(torch.tensor([-128, -1, 0, 127], dtype=torch.int8), 8)) == ["ff807f00"]
    int3 = torch.arange(-4, 4, dtype=torch.int8).repeat(4)
    assert hex_words(pack_int32(int3, 3)) == ["88fac688", "c688fac6", "fac688fa"]


def test_c19_every_code_in_every_place_of_a_word() -> None:
    for place in range(8):
        for code in range(-8, 8):
            codes = torch.zeros(8, dtype=torch.int8)
            codes[place] = code
            word = int(pack_int32(codes, 4)[0]) & 0xFFFFFFFF
            assert (word >> (4 * place)) & 15 == code + 8
            assert torch.equal(unpack_int32(pack_int32(codes, 4), 4, 8), codes)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4, 5, 6, 8]),
    rows=st.integers(1, 5),
    columns=st.integers(1, 75),
    dim=st.sampled_from([0, 1, -1]),
    seed=st.integers(0, 1000),
)
def test_equals_the_twin_and_compressed_tensors(bits: int, rows: int, columns: int, dim: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    codes = torch.randint(low, high, (rows, columns), generator=generator, dtype=torch.int8)
    words = pack_int32(codes, bits, dim)
    count = codes.shape[dim]
    assert words.shape[dim] == packed_length(count, bits)
    assert words.is_contiguous()
    assert torch.equal(unpack_int32(words, bits, count, dim), codes)
    lines, word_lines = (codes.t(), words.t()) if dim == 0 else (codes, words)
    for line, word_line in zip(lines, word_lines, strict=True):
        assert [int(word) & 0xFFFFFFFF for word in word_line] == bit_by_bit(line.tolist(), bits)
    packed_dim = 0 if dim == 0 else 1
    assert torch.equal(words, pack_to_int32(codes, bits, packed_dim=packed_dim))
    if packed_dim == 1 or len(words) > 1 or words.shape[1] == 1:  # compressed-tensors 0.20.1 raises for other rows
        assert torch.equal(unpack_from_int32(words, bits, codes.shape, packed_dim=packed_dim), codes)


def test_stacks_of_matrices() -> None:
    codes = torch.randint(-4, 4, (2, 3, 40), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    words = pack_int32(codes, 3)
    assert words.shape == (2, 3, 4)
    assert torch.equal(unpack_int32(words, 3, 40), codes)
    with pytest.raises(AssertionError, match="disagree"):
        unpack_int32(words, 3, 100)
