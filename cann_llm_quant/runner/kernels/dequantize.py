"""The reference kernel: a packed matrix, dequantized a block of rows at a time and multiplied.

    y = x @ ((codes - zero_point) * scale)ᵀ + bias

Codes of up to 4 bits are stored two to a byte: byte j of a row holds code j in its low nibble and code j +
ceil(in / 2) in its high nibble, both plus 8, so that a row unpacks into two contiguous halves. 8-bit codes
are stored as they are. At most `BLOCK_ELEMENTS` weights exist in float at a time (2 MB, a core's cache),
whatever the matrix's size. On the CPU the product is computed in float32 even for half-precision
activations: it is more exact there and not slower.
"""

import torch
from jaxtyping import Float, Int8, Shaped, UInt8
from torch import Tensor

from cann_llm_quant.quant.scheme import QuantizedTensor

BLOCK_ELEMENTS = 1 << 19


def pack_nibbles(codes: Int8[Tensor, "out in"]) -> UInt8[Tensor, "out half"]:
    """Signed codes of up to 4 bits, two to a byte; see the module's layout.

    An odd row gets a code 0 at its end.
    """
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    low, high = (codes + 8).to(torch.uint8).chunk(2, dim=1)
    return low | (high << 4)


def unpack_nibbles(packed: UInt8[Tensor, "rows half"], columns: int) -> UInt8[Tensor, "rows in"]:
    """Codes plus 8 of `pack_nibbles`' bytes."""
    return torch.cat([packed & 15, packed >> 4], dim=1)[:, :columns]


class DequantizeLinear:
    """A quantized linear of any scheme; storage stays packed."""

    def __init__(self, weight: QuantizedTensor, bias: Float[Tensor, " out"] | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.nibbles = weight.scheme.bits <= 4
        self.codes: Shaped[Tensor, "out stored"] = pack_nibbles(weight.codes) if self.nibbles else weight.codes
        self.scale = weight.scale
        self.zero_point = weight.zero_point
        self.bias = bias

    def __call__(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """`x @ wᵀ + bias` in the dtype of `x`."""
        compute = torch.float32 if x.device.type == "cpu" else x.dtype
        flat = x.reshape(-1, self.in_features).to(compute)
        y = flat.new_empty(len(flat), self.out_features)
        step = max(1, BLOCK_ELEMENTS // self.in_features)
        for start in range(0, self.out_features, step):
            rows = slice(start, start + step)
            y[:, rows] = flat @ self.rows(rows).to(compute).t()
        if self.bias is not None:
            y += self.bias.to(compute)
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def rows(self, rows: slice) -> Float[Tensor, "rows in"]:
        """These rows of the matrix in float32."""
        stored = self.codes[rows]
        codes = unpack_nibbles(stored, self.in_features) if self.nibbles else stored
        w = codes.to(torch.float32).view(len(stored), self.scale.shape[1], -1)
        one_row = self.scale.shape[0] == 1
        scale = (self.scale if one_row else self.scale[rows]).to(torch.float32)
        offset = 8.0 if self.nibbles else 0.0
        if self.zero_point is not None:
            zero = (self.zero_point if one_row else self.zero_point[rows]).to(torch.float32) + offset
            w.sub_(zero[:, :, None])
        elif offset:
            w.sub_(offset)
        return w.mul_(scale[:, :, None]).view(len(stored), self.in_features)
