"""Bit streams of 4 bits (see bit_stream.py) from and to the orders in which other layouts keep nibbles.

A byte of a stream has an even column in its low half and the odd one in its high half; `zip_nibbles` makes bytes that
have a column of one row below and the same column of another above, `transpose_nibbles` words that have a column of
eight rows. Both work on many nibbles at once and never unpack one.
"""

import torch
from jaxtyping import Int32, UInt8
from torch import Tensor

_LOW, _HIGH = 0x0F0F0F0F, -0x0F0F0F10


def zip_nibbles(low: UInt8[Tensor, "*rows bytes"], high: UInt8[Tensor, "*rows bytes"]) -> UInt8[Tensor, "*rows both"]:
    """Byte c has the nibble of column c of `low` in its low half, that of `high` in its high half.

    4 must divide the bytes of a row and all strides but the last, which is 1. 10, 32 and 54, 76 give 40 51 62 73.
    """
    a, b = low.view(torch.int32), high.view(torch.int32)
    even = ((b << 4).bitwise_and_(_HIGH)).bitwise_or_(a & _LOW)
    odd = (a >> 4).bitwise_and_(_LOW).bitwise_or_(b & _HIGH)
    # Bytes are brought side by side by widening one half, which runs many times faster than a stride of two.
    pairs = odd.view(torch.uint8).to(torch.int16)
    pairs.view(torch.int32).bitwise_left_shift_(8)
    return pairs.bitwise_or_(even.view(torch.uint8)).view(torch.uint8)


def unzip_nibbles(both: UInt8[Tensor, "*rows both"]) -> tuple[UInt8[Tensor, "*rows half"], UInt8[Tensor, "*rows half"]]:
    """The two streams that `zip_nibbles` brought together."""
    even, odd = (both[..., first::2].contiguous().view(torch.int32) for first in (0, 1))
    low = (odd << 4).bitwise_and_(_HIGH).bitwise_or_(even & _LOW)
    high = (even >> 4).bitwise_and_(_LOW).bitwise_or_(odd & _HIGH)
    return low.view(torch.uint8), high.view(torch.uint8)


def transpose_nibbles(words: Int32[Tensor, "*runs 8 n"]) -> Int32[Tensor, "*runs 8 n"]:
    """Nibble j of word (i, c) becomes nibble i of word (j, c); its own inverse, done in place.

    Halves, bytes and nibbles of words are exchanged in turn between words 4, 2 and 1 apart.
    """
    *runs, _, n = words.shape
    for apart, shift, mask in ((4, 16, 0x0000FFFF), (2, 8, 0x00FF00FF), (1, 4, 0x0F0F0F0F)):
        pairs = words.view(*runs, 4 // apart, 2, apart, n)
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        changed = (first >> shift).bitwise_xor_(second).bitwise_and_(mask)
        second.bitwise_xor_(changed)
        first.bitwise_xor_(changed.bitwise_left_shift_(shift))
    return words


def run_sums(stream: UInt8[Tensor, "out bytes"], run: int) -> Int32[Tensor, "out runs"]:
    """The sum of every `run` neighbouring fields of a row, 8 dividing `run` and `run` the row.

    Bytes of words are added side by side: 8 words of two nibbles a byte stay below 256.
    """
    words = stream.view(torch.int32)
    inner = next(count for count in (8, 4, 2, 1) if run // 8 % count == 0)
    sums = (words & _LOW).add_((words >> 4).bitwise_and_(_LOW)).view(len(words), -1, inner).sum(-1, dtype=torch.int32)
    sums = (sums & 0x00FF00FF).add_((sums >> 8).bitwise_and_(0x00FF00FF))
    sums = (sums & 0xFFFF).add_(sums >> 16)
    return sums.view(len(words), -1, run // 8 // inner).sum(-1, dtype=torch.int32)
