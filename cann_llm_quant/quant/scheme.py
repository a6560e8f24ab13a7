"""What a quantized tensor is: `Scheme` names the number format, `QuantizedTensor` holds one matrix in it.

    w ~ (value(code) - zero_point) * scale

`value(code)` is the code itself for integers, signed, [-2^(b-1), 2^(b-1) - 1], and the small float that it encodes for
fp8_e4m3 and fp4_e2m1 (see number_formats.py). Only integers have zero points. Layouts with unsigned codes (GPTQ, AWQ,
MLX) add 2^(b-1) when they are written, so that this value converts into every layout without requantizing.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float, Float8e4m3fn, Int8, Int32
from torch import Tensor

from cann_llm_quant.errors import UsageError
from cann_llm_quant.quant.bit_stream import BitStream
from cann_llm_quant.quant.number_formats import FLOAT_BITS, FLOAT_MAX, FLOAT_MAX_EXPONENT, INT_BITS, to_values

IntType = Literal["int2", "int3", "int4", "int5", "int6", "int8"]
WeightType = Literal["int2", "int3", "int4", "int5", "int6", "int8", "fp8_e4m3", "fp4_e2m1"]
Strategy = Literal["tensor", "channel", "group", "tile"]
ScaleType = Literal["float", "e8m0", "e4m3"]
ActivationType = Literal["int4", "int8", "fp8_e4m3", "fp4_e2m1"]
ActivationStrategy = Literal["token", "tensor", "group"]

TILE = 128
# Rows are widened to float32 a few at a time: memory for the whole matrix costs more, in page faults, than the work.
_BLOCK_VALUES = 1 << 19
_BLOCK_FORMATS = {("e8m0", "fp4_e2m1", 32), ("e8m0", "fp8_e4m3", 32), ("e4m3", "fp4_e2m1", 16)}


@dataclass(frozen=True)
class Scheme:
    """A weight number format: type, symmetry, which elements share a scale, and how scales are stored.

    `tile` is one scale for 128 x 128 weights, tiles at the right and lower edge being smaller. Scales are of a
    `float` type, powers of two (`e8m0`, the MX formats), or float8_e4m3 beside one float32 divisor for the matrix
    (`e4m3`, NVFP4). Raises UsageError when the parts contradict each other.
    """

    dtype: WeightType = "int4"
    symmetric: bool = True
    strategy: Strategy = "group"
    group_size: int | None = 128
    scale_type: ScaleType = "float"

    def __post_init__(self) -> None:
        if self.dtype not in INT_BITS and self.dtype not in FLOAT_BITS:
            raise UsageError(f"unknown weight type {self.dtype!r}; choose from {', '.join(INT_BITS | FLOAT_BITS)}")
        if self.strategy == "group" and (self.group_size is None or self.group_size <= 0):
            raise UsageError(f"group size {self.group_size} is not a positive number; use -1 for one group per row")
        if self.strategy != "group" and self.group_size is not None:
            raise UsageError(f"strategy {self.strategy!r} takes no group size, got {self.group_size}")
        if not self.is_integer and not self.symmetric:
            raise UsageError(f"{self.dtype} weights have no zero points; leave out the asymmetric option")
        is_block_format = (self.scale_type, self.dtype, self.group_size) in _BLOCK_FORMATS
        if not is_block_format and (self.scale_type != "float" or self.dtype == "fp4_e2m1"):
            raise UsageError(
                f"no file format holds {self.dtype} weights with {self.scale_type} scales for {self.group_size} columns"
            )

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers, evenly spaced."""
        return self.dtype in INT_BITS

    @property
    def bits(self) -> int:
        """Bits per code."""
        return (INT_BITS | FLOAT_BITS)[self.dtype]

    @property
    def qmin(self) -> int:
        """Smallest code of an integer type, -2^(b-1)."""
        return -(1 << (self.bits - 1))

    @property
    def qmax(self) -> int:
        """Largest code of an integer type, 2^(b-1) - 1."""
        return (1 << (self.bits - 1)) - 1

    @property
    def reach(self) -> float:
        """The value, in units of the scale, that a symmetric group's extreme is put on before any search.

        Half the steps for integers, the largest number for floats; beside power-of-two scales the largest power of two,
        whose exponent the MX specification subtracts from the group's.
        """
        if self.is_integer:
            return ((1 << self.bits) - 1) / 2
        return float(2 ** FLOAT_MAX_EXPONENT[self.dtype]) if self.scale_type == "e8m0" else FLOAT_MAX[self.dtype]

    def columns_per_scale(self, in_features: int) -> int:
        """Columns of one row that share a scale; of a tile 128, though the last one may hold fewer.

        Raises UsageError when the group size does not divide `in_features`.
        """
        if self.strategy == "tile":
            return TILE
        if self.group_size is None:
            return in_features
        if in_features % self.group_size:
            raise UsageError(f"group size {self.group_size} does not divide {in_features} input features")
        return self.group_size

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        """Rows and columns of the scales of a matrix of this shape."""
        rows = {"tensor": 1, "tile": -(-out_features // TILE)}.get(self.strategy, out_features)
        return rows, -(-in_features // self.columns_per_scale(in_features))

    def bits_per_weight(self, out_features: int, in_features: int, scale_bits: int = 16) -> float:
        """Stored bits per weight, scales and zero points included, for a matrix of this shape.

        `scale_bits` counts for scales of a `float` type, the others have 8 (and 32 for the matrix under `e4m3`).
        """
        rows, groups = self.scale_shape(out_features, in_features)
        each = (scale_bits if self.scale_type == "float" else 8) + (0 if self.symmetric else self.bits)
        overhead = rows * groups * each + (32 if self.scale_type == "e4m3" else 0)
        return self.bits + overhead / (out_features * in_features)

    def label(self) -> str:
        """A short name such as `int4-sym-g64`, `fp8_e4m3-tile`, `mxfp4`."""
        if self.scale_type != "float":
            return f"{'nv' if self.scale_type == 'e4m3' else 'mx'}fp{self.bits}"
        symmetry = ("-sym" if self.symmetric else "-asym") if self.is_integer else ""
        return f"{self.dtype}{symmetry}-" + (f"g{self.group_size}" if self.strategy == "group" else self.strategy)


MXFP4 = Scheme("fp4_e2m1", True, "group", 32, "e8m0")
MXFP8 = Scheme("fp8_e4m3", True, "group", 32, "e8m0")
NVFP4 = Scheme("fp4_e2m1", True, "group", 16, "e4m3")


@dataclass(frozen=True)
class ActivationScheme:
    """How a linear's input is quantized before the product; weights of the same linear have a `Scheme`.

    `dynamic` ranges are taken from each input as it comes, static ones are measured by calibration and stored as one
    `input_scale` (and `input_zero_point`) a tensor. `token` is one range a row, `tensor` one for all, `group` one for
    every `group_size` columns of a row. Raises UsageError when these contradict each other.
    """

    dtype: ActivationType = "int8"
    symmetric: bool = True
    dynamic: bool = True
    strategy: ActivationStrategy = "token"
    group_size: int | None = None

    def __post_init__(self) -> None:
        if not self.dynamic and self.strategy != "tensor":
            raise UsageError(f"static activation ranges are one a tensor, not one a {self.strategy}")
        if (self.strategy == "group") != (self.group_size is not None):
            raise UsageError(f"activation strategy {self.strategy!r} and group size {self.group_size} do not fit")


@dataclass(frozen=True)
class QuantizedTensor:
    """One weight matrix in codes; see the module's formula.

    `stored` are the codes, or integer codes as they came packed from a file: `codes` and `stream` give either form.
    `scale` is `[out, groups]` (`[out, 1]` per channel, `[1, 1]` per tensor, one for each tile) and already rounded to
    what is stored, so that dequantizing loses nothing more. Its dtype is the storage dtype; scales of the types `e8m0`
    and `e4m3` are held in float32, with the float32 divisor of the latter as `global_scale`. `group_index` names each
    column's group where groups are not runs of neighbours (GPTQ's act-order); None: column c has group
    `c // columns_per_scale`.
    """

    stored: Int8[Tensor, "out in"] | Float8e4m3fn[Tensor, "out in"] | BitStream
    scale: Float[Tensor, "rows groups"]
    zero_point: Int8[Tensor, "rows groups"] | None
    scheme: Scheme
    global_scale: Float[Tensor, ""] | None = None
    group_index: Int32[Tensor, "in"] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """`(out, in)`."""
        return int(self.stored.shape[0]), int(self.stored.shape[1])

    @cached_property
    def codes(self) -> Int8[Tensor, "out in"] | Float8e4m3fn[Tensor, "out in"]:
        """One code a byte."""
        return self.stored.codes() if isinstance(self.stored, BitStream) else self.stored

    @cached_property
    def stream(self) -> BitStream:
        """Integer codes as rows of a bit stream; 8 must divide the columns."""
        return self.stored if isinstance(self.stored, BitStream) else BitStream.of(self.stored, self.scheme.bits)

    def rows(self, begin: int, end: int) -> "QuantizedTensor":
        """The matrix of these rows, of any scheme but one in tiles, which reach over rows."""
        assert self.scheme.strategy != "tile", "tiles cannot be parted by rows"
        part, shared = slice(begin, end), self.scale.shape[0] == 1
        stored, zeros = self.stored, self.zero_point
        return replace(
            self,
            stored=BitStream(stored.packed[part], stored.bits) if isinstance(stored, BitStream) else stored[part],
            scale=self.scale if shared else self.scale[part],
            zero_point=zeros if zeros is None or shared else zeros[part],
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "out in"]:
        """`(value(codes) - zero_point) * scale`, multiplied in float32 and then rounded to `dtype`."""
        out, columns = self.shape
        if self.group_index is not None:
            return self._dequantize_scattered(self.group_index).to(dtype)
        if self.scheme.strategy == "tile":
            return self._dequantize_rows().to(dtype)
        values = torch.empty(self.shape, dtype=dtype, device=self.scale.device)
        rows = max(1, _BLOCK_VALUES // max(1, columns))
        for start in range(0, out, rows):
            values[start : start + rows] = self.rows(start, start + rows)._dequantize_rows()
        return values

    def _dequantize_rows(self) -> Float[Tensor, "out in"]:
        out, columns = self.shape
        width = self.scheme.columns_per_scale(columns)
        values = in_groups(to_values(self.codes, self.scheme.dtype), width)
        if self.zero_point is not None:
            values.sub_(self.zero_point.to(torch.float32).unsqueeze(-1))
        values.mul_(row_scales(self.scale, self.scheme, out).unsqueeze(-1))
        return values.reshape(out, -1)[:, :columns]

    def _dequantize_scattered(self, group_index: Int32[Tensor, "in"]) -> Float[Tensor, "out in"]:
        values = to_values(self.codes, self.scheme.dtype)
        if self.zero_point is not None:
            values = values - self.zero_point.to(torch.float32).index_select(1, group_index)
        return values * row_scales(self.scale, self.scheme, self.shape[0]).index_select(1, group_index)


def in_groups(w: Float[Tensor, "out in"], width: int) -> Float[Tensor, "out groups width"]:
    """Rows cut into groups of `width` columns; a last one that is too short is filled with zeros."""
    missing = -w.shape[1] % width
    padded = torch.nn.functional.pad(w, (0, missing)) if missing else w
    return padded.reshape(w.shape[0], padded.shape[1] // width, width)


def row_scales(scale: Float[Tensor, "rows groups"], scheme: Scheme, out: int) -> Float[Tensor, "out groups"]:
    """Scales in float32 with a row for each of the matrix's `out` rows; column c has group c // columns_per_scale."""
    scale = scale.to(torch.float32)
    return scale.repeat_interleave(TILE, dim=0)[:out] if scheme.strategy == "tile" else scale.expand(out, -1)


def scheme_for(bits: int, group_size: int, symmetric: bool) -> Scheme:
    """The integer scheme that `--bits`, `--group-size` and `--asymmetric` ask for; -1 is one scale per row.

    Raises UsageError for other bits and for a group size that is 0 or another negative number.
    """
    names = {count: name for name, count in INT_BITS.items()}
    if bits not in names:
        raise UsageError(f"{bits} bits per weight are not offered; choose from {', '.join(map(str, names))}")
    # Pydantic recipes and the command line both arrive here, so the names are checked once.
    dtype: IntType = names[bits]  # type: ignore[assignment]
    if group_size == -1:
        return Scheme(dtype, symmetric, "channel", None)
    return Scheme(dtype, symmetric, "group", group_size)


def fitting_group_sizes(in_features: int) -> list[int]:
    """Group sizes, powers of two from 16 to 1024, that divide `in_features`; ascending, may be empty."""
    return [size for size in (16, 32, 64, 128, 256, 512, 1024) if in_features % size == 0]


def largest_fitting_group(in_features: int, wanted: int) -> int | None:
    """`wanted` if it divides `in_features`, else the largest smaller fitting size; None when there is none."""
    if in_features % wanted == 0:
        return wanted
    return max((size for size in fitting_group_sizes(in_features) if size < wanted), default=None)
