"""The reference kernel: a quantized matrix, dequantized a block of rows at a time and multiplied.

    y = x @ ((value(codes) - zero_point) * scale)ᵀ + bias

Codes of up to 4 bits are stored two to a byte: byte j of a row holds code j in its low nibble and code j +
ceil(in / 2) in its high nibble, signed ones plus 8, so that a row unpacks into two contiguous halves. 8-bit codes are
stored as they are, scales in the type that the file has (one byte for MXFP4, MXFP8 and NVFP4). At most `BLOCK_ELEMENTS`
weights exist in float at a time (2 MB, a core's cache), whatever the matrix's size. On the CPU the product is computed
in float32 even for half-precision activations: it is more exact there and not slower.
"""

import torch
from jaxtyping import Float, Int8, Shaped, UInt8
from torch import Tensor

from cann_llm_quant.quant.number_formats import to_values
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme, in_groups, row_scales

BLOCK_ELEMENTS = 1 << 19


def pack_nibbles(codes: Int8[Tensor, "out in"], offset: int = 8) -> UInt8[Tensor, "out half"]:
    """Codes of up to 4 bits plus `offset`, two to a byte; see the module's layout.

    An odd row gets a code 0 at its end.
    """
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    low, high = (codes + offset).to(torch.uint8).chunk(2, dim=1)
    return low | (high << 4)


def unpack_nibbles(packed: UInt8[Tensor, "rows half"], columns: int) -> UInt8[Tensor, "rows in"]:
    """Codes plus offset of `pack_nibbles`' bytes."""
    return torch.cat([packed & 15, packed >> 4], dim=1)[:, :columns]


class DequantizeLinear:
    """A quantized linear of any scheme; storage stays packed."""

    def __init__(self, weight: QuantizedTensor, bias: Float[Tensor, " out"] | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.scheme = weight.scheme
        self.nibbles = weight.scheme.bits <= 4
        self.offset = 8 if self.nibbles and weight.scheme.is_integer else 0
        self.codes: Shaped[Tensor, "out stored"] = (
            pack_nibbles(weight.codes, self.offset) if self.nibbles else weight.codes
        )
        self.scale = _small_scale(weight)
        self.divisor = weight.global_scale
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
        values = in_groups(to_values(codes, self.scheme.dtype), self.scheme.columns_per_scale(self.in_features))
        one_row = self.scale.shape[0] == 1
        scale = (self.scale if one_row else self.scale[rows]).to(torch.float32)
        if self.divisor is not None:
            scale = scale / self.divisor
        if self.zero_point is not None:
            zero = (self.zero_point if one_row else self.zero_point[rows]).to(torch.float32) + self.offset
            values.sub_(zero[:, :, None])
        elif self.offset:
            values.sub_(self.offset)
        return values.mul_(scale[:, :, None]).flatten(1)[:, : self.in_features]


def _small_scale(weight: QuantizedTensor) -> Tensor:
    """Scales in the file's type, one row for each row of the matrix or one for all; exact."""
    scheme: Scheme = weight.scheme
    if scheme.strategy == "tile":
        return row_scales(weight.scale, scheme, weight.shape[0]).to(weight.scale.dtype)
    if scheme.scale_type == "e8m0":
        return weight.scale.to(torch.float8_e8m0fnu)
    if weight.global_scale is not None:
        return (weight.scale * weight.global_scale).to(torch.float8_e4m3fn)
    return weight.scale
