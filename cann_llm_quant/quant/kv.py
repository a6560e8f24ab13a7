"""Number formats of cached keys and values, and what every layer's cache is stored in.

    x ~ (q - z) * s,   q = clamp(round(x / s) + z)        int8: q in [-128, 127]   int4: q in [-8, 7]
    x ~ q * s,         q = nearest(x / s), saturating     fp8_e4m3: |q| <= 448     fp8_e5m2: |q| <= 57344
    x ~ cast(x)                                           fp16, bf16: no scales

A page `x` is [heads, tokens, dim]. Values share a scale by strategy, whose shape broadcasts over the page:

    tensor [1, 1, 1]   head [heads, 1, 1]   channel [heads, 1, dim]   token [heads, tokens, 1]
    group  [heads, tokens, dim / size]: one scale for `size` neighbours of a token's head

Static scales come from calibration, float32, the same for every page. Dynamic ones are taken from the page itself (by
channel for keys, by token for values: KIVI, 2402.02750) and rounded to bfloat16 before use, as they are stored.

    symmetric   s = max|x| / ((2^b - 1) / 2),  z = 0;  fp8: s = max|x| / largest;  a constant c: s = |c|, q = +-1
    asymmetric  s = max((max - min) / (2^b - 1), 2^(e - Z)),  z = round(-1/2 - (max + min) / (2 s)),
                where 2^(e-1) <= max|x| < 2^e

Ranges need not hold 0: a channel of keys may sit far from it (C64). Z bounds the zero point, 24 bits in int32 where it
is static, 14 in int16 where it is dynamic. A constant c thus decodes to itself under static scales; under dynamic ones
when it is a bfloat16 number, and with a zero point also every float16 one.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from cann_llm_quant.errors import NumericError, UsageError
from cann_llm_quant.quant.number_formats import FLOAT_MAX, INT_BITS, nearest_, to_codes, to_values

KvType = Literal["int8", "int4", "fp8_e4m3", "fp8_e5m2", "fp16", "bf16"]
KvStrategy = Literal["tensor", "head", "channel", "token", "group"]

_PLAIN = {"fp16": torch.float16, "bf16": torch.bfloat16}
_CODE_BITS: dict[str, int] = {"int8": 8, "int4": 4, "fp8_e4m3": 8, "fp8_e5m2": 8, "fp16": 16, "bf16": 16}
_CODE_DTYPE = {"int8": torch.int8, "int4": torch.uint8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_DYNAMIC_BITS, _DYNAMIC_ZERO_BITS, _STATIC_ZERO_BITS = 16, 14, 24
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class KvScheme:
    """The format of the keys or of the values of one layer. Raises UsageError when its parts contradict each other."""

    dtype: KvType
    symmetric: bool = True
    strategy: KvStrategy = "tensor"
    group_size: int | None = None
    dynamic: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in _CODE_BITS:
            raise UsageError(f"unknown KV type {self.dtype!r}; choose from {', '.join(_CODE_BITS)}")
        if self.strategy not in get_args(KvStrategy):
            raise UsageError(f"unknown KV strategy {self.strategy!r}; choose from {', '.join(get_args(KvStrategy))}")
        rest = (self.symmetric, self.strategy, self.group_size, self.dynamic)
        if self.is_plain and rest != (True, "tensor", None, False):
            raise UsageError(
                f"a KV cache in {self.dtype} has no scales; leave out strategy, group, zero points, dynamic"
            )
        if not self.symmetric and self.dtype not in INT_BITS:
            raise UsageError(f"a KV cache in {self.dtype} has no zero points; leave out the asymmetric option")
        if (self.strategy == "group") != (self.group_size is not None):
            raise UsageError(f"KV strategy {self.strategy!r} and group size {self.group_size} do not fit")
        if self.group_size is not None and self.group_size < 1:
            raise UsageError(f"KV group size {self.group_size} is not a positive number")
        if self.strategy in ("token", "group") and not self.dynamic:
            raise UsageError(f"KV scales by {self.strategy} cannot be calibrated ahead; make them dynamic")

    @property
    def bits(self) -> int:
        """Bits per code."""
        return _CODE_BITS[self.dtype]

    @property
    def is_plain(self) -> bool:
        """Whether storing is a cast, without scales."""
        return self.dtype in _PLAIN

    @property
    def code_dtype(self) -> torch.dtype:
        """Of stored codes; uint8 holds two of int4."""
        return _PLAIN[self.dtype] if self.is_plain else _CODE_DTYPE[self.dtype]

    def label(self) -> str:
        """A short name such as `int8-head`, `int4-asym-g32-dynamic`, `bf16`."""
        if self.is_plain:
            return self.dtype
        grain = f"g{self.group_size}" if self.strategy == "group" else self.strategy
        return f"{self.dtype}{'' if self.symmetric else '-asym'}-{grain}{'-dynamic' if self.dynamic else ''}"

    def check(self, head_dim: int) -> None:
        """Raise UsageError, with the sizes that would do, when heads of `head_dim` channels cannot be stored so."""
        if self.group_size is not None and head_dim % self.group_size:
            fitting = ", ".join(str(size) for size in range(2, head_dim + 1) if head_dim % size == 0)
            raise UsageError(
                f"KV group size {self.group_size} does not divide head_dim {head_dim}; choose from {fitting}"
            )
        if self.dtype == "int4" and head_dim % 2:
            raise UsageError(f"int4 KV codes go two to a byte, head_dim {head_dim} is odd; choose int8")

    def code_shape(self, heads: int, tokens: int, dim: int) -> tuple[int, int, int]:
        """Shape of a page's codes. Raises as `check`."""
        self.check(dim)
        return heads, tokens, dim // 2 if self.dtype == "int4" else dim

    def scale_shape(self, heads: int, tokens: int, dim: int) -> tuple[int, int, int]:
        """Shape of a page's scales, and zero points. Raises as `check`."""
        self.check(dim)
        return {
            "tensor": (1, 1, 1),
            "head": (heads, 1, 1),
            "channel": (heads, 1, dim),
            "token": (heads, tokens, 1),
            "group": (heads, tokens, dim // (self.group_size or dim)),
        }[self.strategy]

    def page_bytes(self, heads: int, tokens: int, dim: int) -> int:
        """Bytes of a stored page: codes, and dynamic scales and zero points. Raises as `check`."""
        code_bytes = heads * tokens * dim * self.bits // 8
        if not self.dynamic:
            return code_bytes
        a, b, c = self.scale_shape(heads, tokens, dim)
        return code_bytes + a * b * c * (_DYNAMIC_BITS if self.symmetric else 2 * _DYNAMIC_BITS) // 8

    def bits_per_value(self, page_size: int, head_dim: int) -> float:
        """Stored bits per value, dynamic scales included (`tensor`: at most, since it shares them among heads)."""
        return 8 * self.page_bytes(1, page_size, head_dim) / (page_size * head_dim)


@dataclass(frozen=True)
class LayerKv:
    """Formats of one layer's keys and values; None keeps the compute dtype."""

    k: KvScheme | None = None
    v: KvScheme | None = None


@dataclass(frozen=True)
class KvScales:
    """Static scales (float32) and zero points (int32) of one layer, shaped by `KvScheme.scale_shape`."""

    k_scale: Float[Tensor, "..."] | None = None
    k_zero: Int[Tensor, "..."] | None = None
    v_scale: Float[Tensor, "..."] | None = None
    v_zero: Int[Tensor, "..."] | None = None


@dataclass(frozen=True)
class KvPlan:
    """How a whole model's cache is stored, and which tokens' pages stay in the compute dtype.

    The first `sink_tokens`, the page of the current token with the `recent_tokens` before it, and pages with a token id
    of `sensitive`. Raises UsageError when a layer lacks the static scales of its format.
    """

    layers: tuple[LayerKv, ...]
    scales: tuple[KvScales, ...]
    sink_tokens: int = 0
    recent_tokens: int = 0
    sensitive: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if len(self.layers) != len(self.scales):
            raise UsageError(f"a KV plan of {len(self.layers)} layers has scales for {len(self.scales)}")
        if self.sink_tokens < 0 or self.recent_tokens < 0:
            raise UsageError("the numbers of sink and recent tokens of a KV plan cannot be negative")
        for index, (layer, scales) in enumerate(zip(self.layers, self.scales, strict=True)):
            _check_scales(f"layer {index} keys", layer.k, scales.k_scale, scales.k_zero)
            _check_scales(f"layer {index} values", layer.v, scales.v_scale, scales.v_zero)

    @property
    def quantizes(self) -> bool:
        """Whether any layer stores another format than the compute dtype, which takes sealed pages."""
        return any(layer.k is not None or layer.v is not None for layer in self.layers)

    def labels(self) -> list[str]:
        """Each layer's formats in words, such as `k int8-channel v int8-token-dynamic`, `float`."""
        names = [[scheme.label() if scheme else "float" for scheme in (layer.k, layer.v)] for layer in self.layers]
        return [k if k == v else f"k {k} v {v}" for k, v in names]

    def bits_per_value(self, page_size: int, heads: int, head_dim: int) -> float:
        """Stored bits per value of a long text's pages, dynamic scales included; the compute dtype counts as 16."""
        schemes = [scheme for layer in self.layers for scheme in (layer.k, layer.v)]
        values = heads * page_size * head_dim
        stored = (values * 16 if s is None else 8 * s.page_bytes(heads, page_size, head_dim) for s in schemes)
        return sum(stored) / (values * len(schemes))

    @staticmethod
    def plain(num_layers: int) -> "KvPlan":
        """Everything in the compute dtype."""
        return KvPlan((LayerKv(),) * num_layers, (KvScales(),) * num_layers)


def _check_scales(where: str, scheme: KvScheme | None, scale: Tensor | None, zero_point: Tensor | None) -> None:
    if scheme is None or scheme.is_plain or scheme.dynamic:
        return
    if scale is None:
        raise UsageError(
            f"{where}: {scheme.label()} has no calibrated scale; calibrate the KV cache or make it dynamic"
        )
    if not scheme.symmetric and zero_point is None:
        raise UsageError(f"{where}: {scheme.label()} has no zero point; calibrate the KV cache or make it symmetric")


def page_range(
    x: Float[Tensor, "*pages heads tokens dim"], scheme: KvScheme
) -> tuple[
    Float[Tensor, "*pages scale_heads scale_tokens groups"], Float[Tensor, "*pages scale_heads scale_tokens groups"]
]:
    """Smallest and largest value, float32, of each set of values that shares a scale; shaped as the scales."""
    shared = {"tensor": (-3, -2, -1), "head": (-2, -1), "channel": (-2,)}.get(scheme.strategy, (-1,))
    if scheme.strategy == "group":
        scheme.check(x.shape[-1])
        x = _grouped(x, scheme)
    keep = scheme.strategy != "group"
    return x.amin(shared, keepdim=keep).to(torch.float32), x.amax(shared, keepdim=keep).to(torch.float32)


def kv_scale(
    minimum: Float[Tensor, "*shape"], maximum: Float[Tensor, "*shape"], scheme: KvScheme
) -> tuple[Float[Tensor, "*shape"], Int[Tensor, "*shape"] | None]:
    """Scale and zero point, in their storage types, of values between `minimum` and `maximum`; NaN stays NaN."""
    stored = torch.bfloat16 if scheme.dynamic else torch.float32
    largest = torch.maximum(minimum.abs(), maximum.abs())
    steps = float((1 << scheme.bits) - 1)
    if scheme.symmetric:
        reach = FLOAT_MAX.get(scheme.dtype, steps / 2)
        return torch.where(minimum == maximum, largest, largest / reach).clamp(min=_TINY).to(stored), None
    zero_bits = _DYNAMIC_ZERO_BITS if scheme.dynamic else _STATIC_ZERO_BITS
    exponent = torch.frexp(largest).exponent - zero_bits
    finest = torch.ldexp(torch.ones_like(largest), exponent.clamp(min=-126))
    scale = torch.maximum(maximum / steps - minimum / steps, finest).to(stored)
    center = (minimum / 2 + maximum / 2) / scale.to(torch.float32)
    return scale, (-0.5 - center).round().to(torch.int16 if scheme.dynamic else torch.int32)


def encode(
    x: Float[Tensor, "... tokens dim"],
    scheme: KvScheme,
    scale: Float[Tensor, "..."] | None = None,
    zero_point: Int[Tensor, "..."] | None = None,
) -> Shaped[Tensor, "... tokens packed"]:
    """Codes of pages. `scale` (None for a plain scheme) broadcasts over `x`, by group over the groups of its last dim.

    int4 codes lie two to a byte, biased by 8: element j in the low half of byte j, element j + dim/2 in the high half.
    Raises NumericError for NaN and infinity under static scales, where they would come back as some number; dynamic
    scales are not finite then, nor is what comes back.
    """
    if scale is None:
        return x.to(_PLAIN[scheme.dtype])
    if not scheme.dynamic and not bool(x.isfinite().all()):
        raise NumericError(
            f"keys or values hold NaN or infinity, which {scheme.label()} would store as some number; compute in fp32 "
            "or bf16, or check the weights with `cann-llm-quant inspect`"
        )
    # a tensor of its own, also where x is float32 already: rounding works in place
    parts = _grouped(x.to(torch.float32), scheme) / _spread(scale, scheme)
    if zero_point is None:
        nearest_(parts, scheme.dtype)
    else:
        half = 1 << (scheme.bits - 1)
        parts.round_().add_(_spread(zero_point, scheme)).clamp_(-half, half - 1)
    values = parts if scheme.group_size is None else parts.flatten(-2)
    return _pack_halves(values) if scheme.dtype == "int4" else to_codes(values, scheme.dtype)


def decode(
    codes: Shaped[Tensor, "... tokens packed"],
    scheme: KvScheme,
    scale: Float[Tensor, "..."] | None = None,
    zero_point: Int[Tensor, "..."] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "... tokens dim"]:
    """What `codes` stand for: `(q - z) * s` in float32, rounded to `dtype`. Arguments as in `encode`."""
    if scale is None:
        return codes.to(dtype)
    values = _unpack_halves(codes) if scheme.dtype == "int4" else to_values(codes, scheme.dtype)
    parts = _grouped(values, scheme)
    if zero_point is not None:
        parts.sub_(_spread(zero_point, scheme))
    parts.mul_(_spread(scale, scheme))
    return values.to(dtype)


def _grouped(x: Tensor, scheme: KvScheme) -> Tensor:
    """A view with a dimension of its own for the members of a group."""
    return x if scheme.group_size is None else x.view(*x.shape[:-1], -1, scheme.group_size)


def _spread(scale: Tensor, scheme: KvScheme) -> Tensor:
    """Float32 scales or zero points that broadcast over what `_grouped` returns."""
    scale = scale.to(torch.float32)
    return scale if scheme.group_size is None else scale.unsqueeze(-1)


def _pack_halves(values: Tensor) -> Tensor:
    low, high = (values + 8).to(torch.uint8).chunk(2, -1)
    return low | (high << 4)


def _unpack_halves(packed: Tensor) -> Tensor:
    return torch.cat([packed & 15, packed >> 4], -1).to(torch.float32).sub_(8)
