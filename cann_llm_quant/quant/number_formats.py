"""Number formats of single codes: which values a code can stand for, and rounding to the nearest of them.

    type      values                                   code
    intB      -2^(B-1) … 2^(B-1) - 1, whole            int8, the number itself
    fp8_e4m3  ±m * 2^e, three mantissa bits, to ±448   torch.float8_e4m3fn; no infinity
    fp8_e5m2  two mantissa bits, to ±57344             torch.float8_e5m2, the upper half of a float16
    fp4_e2m1  0 0.5 1 1.5 2 3 4 6 and their negatives  int8 0 … 15: bit 3 is the sign, the rest counts upwards

Values are in units of a scale, in float32. Rounding is to nearest, ties to the even mantissa; what lies beyond the
largest value becomes the largest value. (OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats 1.0.)
"""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

INT_BITS: dict[str, int] = {"int2": 2, "int3": 3, "int4": 4, "int5": 5, "int6": 6, "int8": 8}
FLOAT_BITS: dict[str, int] = {"fp8_e4m3": 8, "fp4_e2m1": 4}
# e5m2 is a format of KV caches alone (see kv.py), so it has no place among the types of weights above.
FLOAT_MAX: dict[str, float] = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "fp4_e2m1": 6.0}
FLOAT_MAX_EXPONENT: dict[str, int] = {"fp8_e4m3": 8, "fp4_e2m1": 2}

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# An e4m3 number with its bits shifted into a float16 is that number times 2^-8, subnormals included.
_E4M3_IN_HALF = 256.0


def nearest_(x: Float[Tensor, "..."], dtype: str) -> Float[Tensor, "..."]:
    """`x` (float32, in units of the scale) rounded in place to the nearest value of `dtype`; returned.

    NaN stays NaN in float formats; callers keep it out.
    """
    if dtype in INT_BITS:
        half = 1 << (INT_BITS[dtype] - 1)
        return x.round_().clamp_(-half, half - 1)
    limit = FLOAT_MAX[dtype]
    x.clamp_(-limit, limit)
    if dtype == "fp8_e4m3":
        return x.copy_(_e4m3_values(x.to(torch.float8_e4m3fn)))
    if dtype == "fp8_e5m2":
        return x.copy_(_e5m2_values(x.to(torch.float8_e5m2)))
    # Neighbours are 1/2 apart below 2, 1 below 4, 2 above.
    step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))
    return x.div_(step).round_().mul_(step)


def to_codes(values: Float[Tensor, "..."], dtype: str) -> Shaped[Tensor, "..."]:
    """Codes of values that `nearest_` returned."""
    if dtype in INT_BITS:
        return values.to(torch.int8)
    if dtype == "fp8_e4m3":
        return values.to(torch.float8_e4m3fn)
    if dtype == "fp8_e5m2":
        return values.to(torch.float8_e5m2)
    a = values.abs()
    # The values' positions 0 … 7 lie on a concave line of three pieces.
    position = torch.minimum(torch.minimum(2 * a, a + 2), a / 2 + 4)
    return position.add_(torch.signbit(values), alpha=8).to(torch.int8)


def all_finite(values: Float[Tensor, "..."]) -> bool:
    """Whether no number is NaN or infinite, of a type whose extremes torch can tell.

    NaN is either end of what it is among; looking at every number takes fifteen times as long.
    """
    return not values.numel() or all(bool(end.isfinite()) for end in torch.aminmax(values))


def to_values(codes: Shaped[Tensor, "..."], dtype: str) -> Float[Tensor, "..."]:
    """What codes stand for, in float32; exact."""
    if dtype in INT_BITS:
        return codes.to(torch.float32)
    if dtype == "fp8_e4m3":
        return _e4m3_values(codes)
    if dtype == "fp8_e5m2":
        return _e5m2_values(codes)
    table = torch.tensor(_E2M1_VALUES, dtype=torch.float32, device=codes.device)
    return table.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


def _e4m3_values(codes: Tensor) -> Tensor:
    """float8_e4m3fn to float32 by whole vectors; torch's own conversion goes number by number on the CPU."""
    bits = codes.view(torch.int8).to(torch.int16)
    return ((bits << 7) & 0x3F80 | (bits & -0x8000)).view(torch.float16).to(torch.float32).mul_(_E4M3_IN_HALF)


def _e5m2_values(codes: Tensor) -> Tensor:
    """float8_e5m2 to float32, again by whole vectors: its bits are the upper ones of a float16."""
    return (codes.view(torch.int8).to(torch.int16) << 8).view(torch.float16).to(torch.float32)
