"""The byte-wise packer against a packer that writes one bit at a time, and against the published words."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_llm_quant.quant.bit_stream import as_bytes, as_words, pack_fields, to_codes, to_fields, unpack_fields
from cann_llm_quant.quant.pack import pack_int32

WIDTHS = [2, 3, 4, 5, 6, 8]


def literal_stream(fields: list[int], bits: int) -> list[int]:
    """Bit i*b + j of the stream is bit j of field i."""
    stream = [field >> j & 1 for field in fields for j in range(bits)]
    return [sum(bit << j for j, bit in enumerate(stream[i : i + 8])) for i in range(0, len(stream), 8)]


@pytest.mark.parametrize("bits", WIDTHS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_bytes_are_the_literal_bit_stream_and_come_back(bits: int, data: st.DataObject) -> None:
    rows, runs = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    seed = data.draw(st.integers(0, 2**31))
    fields = torch.randint(0, 1 << bits, (rows, 8 * runs), generator=torch.Generator().manual_seed(seed))
    fields = fields.to(torch.uint8)
    packed = pack_fields(fields, bits)
    assert packed.tolist() == [literal_stream(row, bits) for row in fields.tolist()]
    assert torch.equal(unpack_fields(packed, bits), fields)


@pytest.mark.parametrize("bits", WIDTHS)
def test_words_equal_those_of_the_native_layout(bits: int) -> None:
    codes = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (3, 64), generator=torch.Generator().manual_seed(bits))
    codes = codes.to(torch.int8)
    words = as_words(pack_fields(to_fields(codes, bits), bits))
    assert torch.equal(words, pack_int32(codes, bits))
    assert torch.equal(to_codes(unpack_fields(as_bytes(words), bits), bits), codes)


def test_c19_codes_in_order_give_the_published_words() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8)[None]
    words = as_words(pack_fields(to_fields(codes, 4), 4))
    assert [word & 0xFFFFFFFF for word in words[0].tolist()] == [0x76543210, 0xFEDCBA98]


def test_strided_rows_are_packed_as_their_copies() -> None:
    fields = torch.arange(128, dtype=torch.uint8).remainder_(16).view(8, 16).t()
    assert torch.equal(pack_fields(fields, 4), pack_fields(fields.contiguous(), 4))
    assert torch.equal(unpack_fields(fields, 4), unpack_fields(fields.contiguous(), 4))
