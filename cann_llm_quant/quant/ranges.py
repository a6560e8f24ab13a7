"""From the extremes of a group of weights to its scale and zero point, rounded to what is stored.

    symmetric    scale = amax / reach, the reach being half the steps for integers (+-amax is then half a step away
                 from the outermost codes), the largest number for floats
    e8m0         the power of two below that (reach: the largest power of two of the type; OCP MX 1.0, 6.3)
    e4m3         e4m3(global_scale * scale) / global_scale,   global_scale = 448 * 6 / amax of the matrix
    asymmetric   the group's range, widened to hold 0: scale = (hi - lo) / (2^b - 1),
                 zero_point = clamp(round(qmin - lo / scale)), so that 0 is exact

Scales never fall below the smallest normal number of their dtype (the smallest number of e4m3): tests for `== 0` miss
subnormals, whose reciprocal is infinite.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.quant.number_formats import FLOAT_MAX, nearest_
from cann_llm_quant.quant.scheme import TILE, Scheme, in_groups

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_E4M3_TINY = 2.0**-9
_E8M0_EXPONENTS = (-126, 127)
# Divisors beyond this would make the smallest scale subnormal.
_GLOBAL_SCALE_LIMIT = 2.0**100


@dataclass(frozen=True)
class ScaleStorage:
    """How scales of one matrix are rounded: to `dtype`, or as the scheme's scale type says, by `global_scale`."""

    scheme: Scheme
    dtype: torch.dtype
    global_scale: Float[Tensor, ""] | None = None

    @classmethod
    def of(cls, w: Tensor, scheme: Scheme, dtype: torch.dtype, amax: float | None) -> "ScaleStorage":
        """For one matrix; `amax` is the largest weight of all that share its `global_scale`, None: its own.

        Raises ValueError for a `dtype` that is none of `SCALE_DTYPES`.
        """
        if scheme.scale_type == "float" and dtype not in SCALE_DTYPES:
            raise ValueError(f"scales cannot be stored as {dtype}; see choose_scale_dtype")
        if scheme.scale_type != "float":
            dtype = torch.float32
        return cls(scheme, dtype, global_scale(w, scheme, amax) if scheme.scale_type == "e4m3" else None)

    def rounded(self, scale: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """What storing these float32 scales makes of them, in float32."""
        if self.scheme.scale_type == "e8m0":
            exponent = (torch.frexp(scale).exponent - 1).clamp_(*_E8M0_EXPONENTS)
            return torch.ldexp(torch.ones_like(scale), exponent)
        if self.global_scale is not None:
            local = (scale * self.global_scale).clamp_(min=_E4M3_TINY)
            return nearest_(local, "fp8_e4m3") / self.global_scale
        return rounded_to(scale, self.dtype)

    def grid(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point, in float32, of groups with these ends of their range."""
        scale = self.rounded(raw_scale(low, high, self.scheme))
        if self.scheme.symmetric:
            return scale, None
        qmin, qmax = self.scheme.qmin, self.scheme.qmax
        return scale, (qmin - low / scale).round_().clamp_(qmin, qmax)


def global_scale(w: Float[Tensor, "out in"], scheme: Scheme, amax: float | None = None) -> Float[Tensor, ""]:
    """NVFP4's divisor of scales, float32: the matrix's largest weight gets the largest scale and the largest code."""
    largest = w.abs().amax().to(torch.float32) if amax is None else torch.tensor(amax, device=w.device)
    product = FLOAT_MAX["fp8_e4m3"] * FLOAT_MAX[scheme.dtype]
    return torch.where(largest > 0, product / largest, 1.0).clamp(max=_GLOBAL_SCALE_LIMIT)


def rounded_to(scale: Float[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """Scales as `dtype` holds them, within its normal numbers, in float32."""
    limits = torch.finfo(dtype)
    return scale.clamp(limits.tiny, limits.max).to(dtype).to(torch.float32)


def grouped(w: Float[Tensor, "out in"], scheme: Scheme) -> Float[Tensor, "rows groups elements"]:
    """The weights that share a scale, for each of the scheme's scales; tiles are filled up with zeros.

    Raises UsageError when the group size does not divide the columns.
    """
    if scheme.strategy == "tensor":
        return w.reshape(1, 1, -1)
    groups = in_groups(w, scheme.columns_per_scale(w.shape[1]))
    if scheme.strategy != "tile":
        return groups
    filled = torch.nn.functional.pad(groups, (0, 0, 0, 0, 0, -w.shape[0] % TILE))
    return filled.view(-1, TILE, groups.shape[1], TILE).transpose(1, 2).flatten(2)


def extremes(groups: Float[Tensor, "*shape elements"]) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Ends of each group's range, which holds 0, in float32."""
    low, high = groups.aminmax(dim=-1)
    return low.to(torch.float32).clamp_(max=0), high.to(torch.float32).clamp_(min=0)


def raw_scale(low: Tensor, high: Tensor, scheme: Scheme) -> Tensor:
    """The scale that the module's rules give before it is rounded."""
    if scheme.symmetric:
        return torch.maximum(-low, high) / scheme.reach
    # Halved ends, because the difference of two float32 can exceed float32.
    return (high / 2 - low / 2) / (((1 << scheme.bits) - 1) / 2)
