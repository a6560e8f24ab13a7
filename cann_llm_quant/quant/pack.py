"""Integer codes as a dense little-endian bit stream in int32 words, along one dimension.

Element i of a row occupies bits [i*b, i*b + b) of that row's words, read as 32-bit little-endian; a row of n
elements takes ceil(n*b / 32) words and the unused bits of the last one are 0. A stored field is `code +
2^(b-1)`, an unsigned number, so that no sign is ever extended. This is `weight_packed` (last dimension) and
`weight_zero_point` (dimension 0) of compressed-tensors `pack-quantized`, version 0.19 and later for widths
that do not divide 32. int4 codes -8..7 give the words 0x76543210 0xfedcba98.

fp4_e2m1 codes (0..15, unsigned already) go two to a byte, the even column in the low nibble: `weight_packed` of
`mxfp4-pack-quantized` and `nvfp4-pack-quantized`. The codes 0..15 give 10 32 54 76 98 ba dc fe.
"""

import torch
from jaxtyping import Int8, Int32, Shaped, UInt8
from torch import Tensor
from torch.nn import functional

from cann_llm_quant.quant.bit_stream import pack_fields, to_codes, to_fields, unpack_fields

_WORD = 32


def packed_length(count: int, bits: int) -> int:
    """Words that `count` codes of `bits` bits take."""
    return -(-count * bits // _WORD)


def pack_int32(codes: Int8[Tensor, "..."], bits: int, dim: int = -1) -> Int32[Tensor, "..."]:
    """Pack signed codes along `dim`, which shrinks to `packed_length`; the result is contiguous."""
    fields = to_fields(codes.movedim(dim, -1), bits)
    count = fields.shape[-1]
    words = _flat(pack_fields(_padded(fields, -count % _WORD), bits)).view(torch.int32).view(*fields.shape[:-1], -1)
    # a copy has the strides that readers expect also of dimensions of one element, which `contiguous` leaves odd
    return words[..., : packed_length(count, bits)].movedim(-1, dim).clone(memory_format=torch.contiguous_format)


def unpack_int32(words: Int32[Tensor, "..."], bits: int, count: int, dim: int = -1) -> Int8[Tensor, "..."]:
    """The `count` signed codes that were packed along `dim`; the result is contiguous.

    `words` must hold `packed_length(count, bits)` along `dim`.
    """
    stream = words.movedim(dim, -1)
    assert stream.shape[-1] == packed_length(count, bits), "words and count disagree"
    whole = _padded(stream, -(-count // _WORD) * bits - stream.shape[-1])
    packed = _flat(whole).view(torch.uint8).view(*stream.shape[:-1], -1)
    fields = unpack_fields(packed, bits)
    return to_codes(fields[..., :count], bits).movedim(-1, dim).contiguous()


def _padded(rows: Shaped[Tensor, "*rows count"], zeros: int) -> Shaped[Tensor, "*rows padded"]:
    """The rows, contiguous, with so many zeros behind each; without any they are not copied once more."""
    return (functional.pad(rows, (0, zeros)) if zeros else rows).contiguous()


def _flat(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "numbers"]:
    """The numbers of a contiguous tensor in one row, whatever stride it claims for dimensions of one element."""
    return tensor.as_strided((tensor.numel(),), (1,))


def pack_pairs(codes: Int8[Tensor, "out in"]) -> UInt8[Tensor, "out half"]:
    """Unsigned 4-bit codes of an even number of columns, two to a byte."""
    low, high = codes[:, ::2].to(torch.uint8), codes[:, 1::2].to(torch.uint8)
    return low | (high << 4)


def unpack_pairs(packed: UInt8[Tensor, "out half"]) -> Int8[Tensor, "out in"]:
    """The codes of `pack_pairs`' bytes."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).to(torch.int8)
