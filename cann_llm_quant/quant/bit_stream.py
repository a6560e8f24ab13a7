"""Codes as a dense little-endian bit stream of bytes, along the last dimension: what GPTQ, AWQ and MLX pack.

Element i of a row occupies bits [i*b, i*b + b) of the row's bytes, bit 0 being the lowest of byte 0. Read as 32-bit
little-endian words this is the stream of `pack.py`; bytes need no wider temporaries. A field is `code + 2^(b-1)`, an
unsigned number, so that no sign is ever extended. The int4 codes -8..7 give the bytes 10 32 54 76 98 ba dc fe.

Widths that divide 8 are packed by halving: two bytes, read as one 16-bit number, become one byte of twice the width.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Int8, Int32, UInt8
from torch import Tensor

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class BitStream:
    """The codes of a matrix, packed row by row; 8 divides its columns.

    Most layouts of 4 bits store a matrix so or nearly so: what is read from one can be written to another without being
    unpacked, which is most of what an export computes.
    """

    packed: UInt8[Tensor, "out bytes"]
    bits: int

    @classmethod
    def of(cls, codes: Int8[Tensor, "out in"], bits: int) -> "BitStream":
        """The stream of these codes."""
        return cls(pack_fields(to_fields(codes.contiguous(), bits), bits), bits)

    @property
    def shape(self) -> tuple[int, int]:
        """`(out, in)` of the matrix."""
        return int(self.packed.shape[0]), int(self.packed.shape[1]) * 8 // self.bits

    def codes(self) -> Int8[Tensor, "out in"]:
        """The matrix, unpacked."""
        codes = torch.empty(self.shape, dtype=torch.int8, device=self.packed.device)
        for rows in self.blocks():
            codes[rows] = to_codes(unpack_fields(self.packed[rows], self.bits), self.bits)
        return codes

    def blocks(self) -> Iterator[slice]:
        """Runs of rows, a multiple of 8 but for the last, whose bytes stay in a core's cache while one works on them.

        Memory that is taken for whole matrices costs more, in page faults, than what is computed in it.
        """
        rows = max(8, _BLOCK_BYTES // max(1, self.packed.shape[1]) // 8 * 8)
        return (slice(start, start + rows) for start in range(0, len(self.packed), rows))


def to_fields(codes: Int8[Tensor, "..."], bits: int) -> UInt8[Tensor, "..."]:
    """`code + 2^(b-1)`."""
    return codes.view(torch.uint8) + (1 << (bits - 1))


def to_codes(fields: UInt8[Tensor, "..."], bits: int) -> Int8[Tensor, "..."]:
    """`field - 2^(b-1)`; the inverse of `to_fields`."""
    return (fields - (1 << (bits - 1))).view(torch.int8)


def pack_fields(fields: UInt8[Tensor, "*rows count"], bits: int) -> UInt8[Tensor, "*rows bytes"]:
    """The stream of fields below 2^b, 8 of which must divide the row, as `count * b / 8` bytes."""
    assert fields.shape[-1] % 8 == 0, "rows hold whole runs of 8 fields"
    if 8 % bits:
        return _pack_across_bytes(fields, bits)
    packed, width = fields.reshape(-1), bits
    while width < 8:
        # torch shifts int32 many times faster than int16; truncation to a byte drops what the shift brings beside it.
        words = packed.view(torch.int32)
        packed = (words >> (8 - width)).bitwise_or_(words).view(torch.int16).to(torch.uint8)
        width *= 2
    return packed.view(*fields.shape[:-1], fields.shape[-1] * bits // 8)


def unpack_fields(packed: UInt8[Tensor, "*rows bytes"], bits: int) -> UInt8[Tensor, "*rows count"]:
    """The fields of `pack_fields`' bytes."""
    if 8 % bits:
        return _unpack_across_bytes(packed, bits)
    fields, width = packed.reshape(-1), 8
    while width > bits:
        width //= 2
        pairs = fields.to(torch.int16)
        mask = (1 << width) - 1
        fields = (pairs << (8 - width)).bitwise_or_(pairs).bitwise_and_(mask << 8 | mask).view(torch.uint8)
    return fields.view(*packed.shape[:-1], packed.shape[-1] * 8 // bits)


def as_words(packed: UInt8[Tensor, "rows bytes"]) -> Int32[Tensor, "rows words"]:
    """The same bytes as 32-bit little-endian words."""
    return packed.reshape(-1).view(torch.int32).view(len(packed), -1)


def as_bytes(words: Int32[Tensor, "rows words"]) -> UInt8[Tensor, "rows bytes"]:
    """The inverse of `as_words`."""
    return words.reshape(-1).view(torch.uint8).view(len(words), -1)


def _pack_across_bytes(fields: Tensor, bits: int) -> Tensor:
    """Eight fields fill `bits` bytes; field i begins in byte i*b // 8 and may end in the next one."""
    packed = torch.zeros(*fields.shape[:-1], fields.shape[-1] // 8 * bits, dtype=torch.uint8, device=fields.device)
    for lane in range(8):
        field = fields[..., lane::8]
        byte, shift = divmod(lane * bits, 8)
        packed[..., byte::bits] |= field << shift
        if shift + bits > 8:
            packed[..., byte + 1 :: bits] |= field >> (8 - shift)
    return packed


def _unpack_across_bytes(packed: Tensor, bits: int) -> Tensor:
    count = packed.shape[-1] // bits * 8
    fields = torch.empty(*packed.shape[:-1], count, dtype=torch.uint8, device=packed.device)
    for lane in range(8):
        byte, shift = divmod(lane * bits, 8)
        field = packed[..., byte::bits] >> shift
        if shift + bits > 8:
            field = field | (packed[..., byte + 1 :: bits] << (8 - shift))
        fields[..., lane::8] = field & ((1 << bits) - 1)
    return fields
