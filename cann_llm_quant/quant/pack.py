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
from jaxtyping import Int8, Int32, UInt8
from torch import Tensor

_WORD = 32


def packed_length(count: int, bits: int) -> int:
    """Words that `count` codes of `bits` bits take."""
    return -(-count * bits // _WORD)


def pack_int32(codes: Int8[Tensor, "..."], bits: int, dim: int = -1) -> Int32[Tensor, "..."]:
    """Pack signed codes along `dim`, which shrinks to `packed_length`; the result is contiguous."""
    fields = codes.movedim(dim, -1).to(torch.int64) + (1 << (bits - 1))
    words = torch.zeros(
        *fields.shape[:-1], packed_length(fields.shape[-1], bits), dtype=torch.int64, device=codes.device
    )  # Every `period` fields the pattern of words and shifts repeats.
    period = _period(bits)
    for lane in range(min(period, fields.shape[-1])):
        field = fields[..., lane::period]
        word, shift = divmod(lane * bits, _WORD)
        stride = period * bits // _WORD
        words[..., word::stride][..., : field.shape[-1]] |= (field << shift) & 0xFFFFFFFF
        if shift + bits > _WORD:
            words[..., word + 1 :: stride][..., : field.shape[-1]] |= field >> (_WORD - shift)
    return _wrap(words).movedim(-1, dim).contiguous()


def unpack_int32(words: Int32[Tensor, "..."], bits: int, count: int, dim: int = -1) -> Int8[Tensor, "..."]:
    """The `count` signed codes that were packed along `dim`; the result is contiguous.

    `words` must hold `packed_length(count, bits)` along `dim`.
    """
    stream = words.movedim(dim, -1).to(torch.int64) & 0xFFFFFFFF
    assert stream.shape[-1] == packed_length(count, bits), "words and count disagree"
    codes = torch.empty(*stream.shape[:-1], count, dtype=torch.int8, device=words.device)
    period = _period(bits)
    stride = period * bits // _WORD
    for lane in range(min(period, count)):
        target = codes[..., lane::period]
        word, shift = divmod(lane * bits, _WORD)
        field = stream[..., word::stride][..., : target.shape[-1]] >> shift
        if shift + bits > _WORD:
            field = field | (stream[..., word + 1 :: stride][..., : target.shape[-1]] << (_WORD - shift))
        target.copy_((field & ((1 << bits) - 1)) - (1 << (bits - 1)))
    return codes.movedim(-1, dim).contiguous()


def pack_pairs(codes: Int8[Tensor, "out in"]) -> UInt8[Tensor, "out half"]:
    """Unsigned 4-bit codes of an even number of columns, two to a byte."""
    low, high = codes[:, ::2].to(torch.uint8), codes[:, 1::2].to(torch.uint8)
    return low | (high << 4)


def unpack_pairs(packed: UInt8[Tensor, "out half"]) -> Int8[Tensor, "out in"]:
    """The codes of `pack_pairs`' bytes."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).to(torch.int8)


def _period(bits: int) -> int:
    """Fields after which the stream is at a word boundary again: lcm(bits, 32) / bits."""
    return _WORD // (bits & -bits)


def _wrap(words: Tensor) -> Tensor:
    """Unsigned 32-bit values in int64 to int32 with the same bits."""
    return torch.where(words > 0x7FFFFFFF, words - (1 << _WORD), words).to(torch.int32)
