"""Activations in few bits: codes and scales of a linear's input, taken from each input or stored by calibration.

    x ~ (codes - zero_point) * scale

    int, symmetric    scale = max|x| / ((2^b - 1) / 2)      codes = clamp(round(x / scale), -2^(b-1), 2^(b-1) - 1)
    int, asymmetric   scale = (high - low) / (2^b - 1)      zero_point = clamp(round(-2^(b-1) - low / scale))
    fp8               scale = max|x| / 448                  codes = e4m3(x / scale)
    MX, groups of 32  scale = 2^(floor(log2(max|x| / 1.75)) + 1 - emax),   emax 8 for e4m3, 2 for e2m1
    NV, groups of 16  scale = e4m3(max|x| / 6 * global) / global,   global = 448 * 6 / max|x| of the calibration set

Ranges are widened to hold 0, so 0 is exact. Scales are those of compressed-tensors (0.20), which the files are written
for: max|x| / 127.5 for int8, where vLLM's kernel divides by 127; MX scales (OCP Microscaling 1.0) round the exponent up
from a mantissa of 1.75, where the largest element would saturate. Codes are held in float32, so that NaN stays NaN in
its row instead of becoming a number, and as exact as integers. Scales never fall below the smallest normal float: a row
of zeros has codes 0.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int8
from torch import Tensor
from torch.nn import functional

from cann_llm_quant.errors import UsageError
from cann_llm_quant.quant.number_formats import FLOAT_BITS, FLOAT_MAX, FLOAT_MAX_EXPONENT, INT_BITS, nearest_
from cann_llm_quant.quant.scheme import ActivationScheme

MX_GROUP, NV_GROUP = 32, 16

_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class InputRange:
    """What calibration stores of one linear's input, one number each.

    `scale` and `zero_point` of a static scheme; of NV groups, `scale` is the factor that their scales are multiplied
    by before they are rounded (`global` in the module's formula).
    """

    scale: Float[Tensor, "1"]
    zero_point: Int8[Tensor, "1"] | None = None


@dataclass(frozen=True)
class QuantizedInput:
    """A quantized input; `codes` are the type's own numbers, `zero_point` is subtracted from them."""

    codes: Float[Tensor, "rows in"]
    scale: Float[Tensor, "scale_rows groups"]
    zero_point: Float[Tensor, "scale_rows groups"] | None

    def centered(self) -> Float[Tensor, "rows in"]:
        """`codes - zero_point`: what is multiplied by the scale. At most 255 in magnitude for 8-bit integers."""
        if self.zero_point is None:
            return self.codes
        return (self._by_group(self.codes) - self.zero_point.unsqueeze(-1)).view(self.codes.shape)

    def dequantize(self) -> Float[Tensor, "rows in"]:
        """`(codes - zero_point) * scale` in float32."""
        return (self._by_group(self.centered()) * self.scale.unsqueeze(-1)).view(self.codes.shape)

    def _by_group(self, codes: Float[Tensor, "rows in"]) -> Float[Tensor, "rows groups size"]:
        rows, columns = codes.shape
        groups = self.scale.shape[1]
        return codes.view(rows, groups, columns // groups)


@dataclass(frozen=True)
class InputQuantizer:
    """A scheme with the range that it needs: everything that quantizes one linear's input."""

    scheme: ActivationScheme
    fixed: InputRange | None = None

    def __call__(self, x: Float[Tensor, "rows in"]) -> QuantizedInput:
        """`quantize_input` of `x`."""
        return quantize_input(x, self.scheme, self.fixed)


def needs_range(scheme: ActivationScheme) -> bool:
    """Whether calibration must store an `InputRange` for this scheme."""
    return not scheme.dynamic or is_nv(scheme)


def label(scheme: ActivationScheme) -> str:
    """A short name that no other scheme has, such as `int8-token`, `int8-asym-static`, `fp8_e4m3-g128`, `mxfp8`."""
    if is_nv(scheme) or is_mx(scheme):
        return f"{'nv' if is_nv(scheme) else 'mx'}fp{FLOAT_BITS[scheme.dtype]}"
    grain = f"g{scheme.group_size}" if scheme.strategy == "group" else scheme.strategy
    return f"{scheme.dtype}{'' if scheme.symmetric else '-asym'}-{grain if scheme.dynamic else 'static'}"


def is_nv(scheme: ActivationScheme) -> bool:
    """e2m1 in groups of 16 with e4m3 scales (NVFP4)."""
    return scheme.dtype == "fp4_e2m1" and scheme.group_size == NV_GROUP


def is_mx(scheme: ActivationScheme) -> bool:
    """A float type in groups of 32 with scales that are powers of two (OCP Microscaling)."""
    return scheme.dtype in FLOAT_BITS and scheme.group_size == MX_GROUP


def code_range(scheme: ActivationScheme) -> tuple[float, float]:
    """Smallest and largest code."""
    if scheme.dtype in INT_BITS:
        half = float(1 << (INT_BITS[scheme.dtype] - 1))
        return -half, half - 1
    largest = FLOAT_MAX[scheme.dtype]
    return -largest, largest


def quantize_input(
    x: Float[Tensor, "rows in"], scheme: ActivationScheme, fixed: InputRange | None = None
) -> QuantizedInput:
    """Quantize a linear's input by its scheme; `fixed` is the stored range that `needs_range` asks for.

    Raises UsageError when the group size does not divide the columns, ValueError when a range is missing.
    """
    rows, columns = x.shape
    size = scheme.group_size or columns
    if columns % size:
        raise UsageError(f"activation groups of {size} do not divide {columns} input features")
    if fixed is None and needs_range(scheme):
        raise ValueError(f"{scheme} needs the range that calibration stored")
    parts = x.to(torch.float32).reshape(rows, columns // size, size)
    if fixed is not None and not scheme.dynamic:
        scale = fixed.scale.to(parts).view(1, 1)
        zero_point = None if fixed.zero_point is None else fixed.zero_point.to(parts).view(1, 1)
    else:
        low, high = _extremes(parts, scheme)
        scale, zero_point = grid_of(low, high, scheme, None if fixed is None else fixed.scale)
    return QuantizedInput(_codes(parts, scale, zero_point, scheme).view(rows, columns), scale, zero_point)


def grid_of(
    low: Float[Tensor, "*shape"],
    high: Float[Tensor, "*shape"],
    scheme: ActivationScheme,
    nv_global: Float[Tensor, "1"] | None = None,
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"] | None]:
    """Float32 scale and zero point of ranges that hold 0; `nv_global` is needed by NV groups. NaN stays NaN."""
    least, most = code_range(scheme)
    if not scheme.symmetric:
        scale = ((high - low) / (most - least)).clamp(min=_TINY)
        return scale, (least - low / scale).clamp(least, most).round()
    largest = torch.maximum(-low, high)
    if is_mx(scheme):
        exponent = torch.frexp(largest / 1.75).exponent - FLOAT_MAX_EXPONENT[scheme.dtype]
        scale = torch.ldexp(torch.ones_like(largest), exponent.clamp(-126, 127))
        return torch.where(largest.isnan(), largest, scale), None
    if nv_global is not None:
        factor = nv_global.to(largest)
        stored = nearest_(largest / most * factor, "fp8_e4m3")
        return torch.where(stored == 0, torch.full_like(stored, 0.125), stored) / factor, None
    return (largest / ((most - least) / 2)).clamp(min=_TINY), None


def _extremes(
    parts: Float[Tensor, "rows groups size"], scheme: ActivationScheme
) -> tuple[Float[Tensor, "scale_rows groups"], Float[Tensor, "scale_rows groups"]]:
    """Ranges that hold 0, one a row and group, or one in all."""
    low, high = parts.amin(-1).clamp_(max=0), parts.amax(-1).clamp_(min=0)
    if scheme.strategy != "tensor":
        return low, high
    # the 0 appended is in the range anyhow and lets an input without rows pass
    return (
        functional.pad(low.flatten(), (0, 1)).amin().view(1, 1),
        functional.pad(high.flatten(), (0, 1)).amax().view(1, 1),
    )


def _codes(
    parts: Float[Tensor, "rows groups size"],
    scale: Float[Tensor, "scale_rows groups"],
    zero_point: Float[Tensor, "scale_rows groups"] | None,
    scheme: ActivationScheme,
) -> Float[Tensor, "rows groups size"]:
    scaled = parts / scale.unsqueeze(-1)
    if zero_point is not None:
        scaled += zero_point.unsqueeze(-1)
    return nearest_(scaled, scheme.dtype)
