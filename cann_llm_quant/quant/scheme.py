"""What a quantized tensor is: `Scheme` names the number format, `QuantizedTensor` holds one matrix in it.

    w ~ (codes - zero_point) * scale

`codes` and `zero_point` are signed integers of the scheme's bits, [-2^(b-1), 2^(b-1) - 1]; a symmetric scheme
has no zero_point. Layouts with unsigned codes (GPTQ, AWQ, MLX) add 2^(b-1) when they are written, so that
this value converts into every layout without requantizing.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from cann_llm_quant.errors import UsageError

IntType = Literal["int2", "int3", "int4", "int8"]
Strategy = Literal["tensor", "channel", "group"]
ActivationType = Literal["int4", "int8", "fp8_e4m3", "fp4_e2m1"]
ActivationStrategy = Literal["token", "tensor", "group"]

INT_BITS: dict[str, int] = {"int2": 2, "int3": 3, "int4": 4, "int8": 8}


@dataclass(frozen=True)
class Scheme:
    """A weight number format: integer type, symmetry and which elements share a scale.

    Raises UsageError when the strategy and the group size contradict each other.
    """

    dtype: IntType = "int4"
    symmetric: bool = True
    strategy: Strategy = "group"
    group_size: int | None = 128

    def __post_init__(self) -> None:
        if self.dtype not in INT_BITS:
            raise UsageError(f"unknown weight type {self.dtype!r}; choose from {', '.join(INT_BITS)}")
        if self.strategy == "group" and (self.group_size is None or self.group_size <= 0):
            raise UsageError(f"group size {self.group_size} is not a positive number; use -1 for one group per row")
        if self.strategy != "group" and self.group_size is not None:
            raise UsageError(f"strategy {self.strategy!r} takes no group size, got {self.group_size}")

    @property
    def bits(self) -> int:
        """Bits per code."""
        return INT_BITS[self.dtype]

    @property
    def qmin(self) -> int:
        """Smallest code, -2^(b-1)."""
        return -(1 << (self.bits - 1))

    @property
    def qmax(self) -> int:
        """Largest code, 2^(b-1) - 1."""
        return (1 << (self.bits - 1)) - 1

    def columns_per_scale(self, in_features: int) -> int:
        """Columns of one row that share a scale.

        Raises UsageError when the group size does not divide `in_features`.
        """
        if self.group_size is None:
            return in_features
        if in_features % self.group_size:
            raise UsageError(f"group size {self.group_size} does not divide {in_features} input features")
        return self.group_size

    def bits_per_weight(self, out_features: int, in_features: int, scale_bits: int = 16) -> float:
        """Stored bits per weight, scales and zero points included, for a matrix of this shape."""
        scales = 1 if self.strategy == "tensor" else out_features * (in_features // self.columns_per_scale(in_features))
        overhead = scales * (scale_bits + (0 if self.symmetric else self.bits))
        return self.bits + overhead / (out_features * in_features)


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
    """One weight matrix in integer codes; see the module's formula.

    `scale` is `[out, groups]` (`[out, 1]` per channel, `[1, 1]` per tensor) in its storage dtype: the codes
    were chosen against the rounded scale, so that dequantizing loses nothing more.
    """

    codes: Int8[Tensor, "out in"]
    scale: Float[Tensor, "rows groups"]
    zero_point: Int8[Tensor, "rows groups"] | None
    scheme: Scheme

    @property
    def shape(self) -> tuple[int, int]:
        """`(out, in)`."""
        return int(self.codes.shape[0]), int(self.codes.shape[1])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "out in"]:
        """`(codes - zero_point) * scale`, multiplied in float32 and then rounded to `dtype`."""
        out, columns = self.codes.shape
        q = self.codes.to(torch.float32).view(out, self.scale.shape[1], -1)
        if self.zero_point is not None:
            q = q - self.zero_point.to(torch.float32).unsqueeze(-1)
        return (q * self.scale.to(torch.float32).unsqueeze(-1)).view(out, columns).to(dtype)


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
