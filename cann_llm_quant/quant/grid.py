"""Grids: the scale and zero point of every group of weights, and the codes of weights on them.

    symmetric    scale = amax / ((2^b - 1) / 2), so that the range is [-8, 7.5] steps for int4 and +-amax is
    half a
                 step away from the outermost codes
    asymmetric   the group's range, widened to hold 0: scale = (hi - lo) / (2^b - 1),
                 zero_point = clamp(round(qmin - lo / scale)), so that 0 is exact

A scale is rounded to its storage dtype first; zero point and codes are then chosen against the rounded scale,
so that storing loses nothing more. Scales never fall below the smallest normal number of that dtype: tests
for `== 0` miss subnormals, whose reciprocal is infinite.

`search_grid` shrinks the range and keeps what costs least, per group:

    |e|²    sum of importance * e²    e H_gg eᵀ    (e = quantized - w; H_gg the group's block of the Gram
    matrix)

The last is the error of the linear's outputs as far as it arises within groups. Blocks wider than 128 columns
are cut, which bounds the work. The min-max grid is always among the candidates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from cann_llm_quant.quant.scheme import Scheme

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_CHUNK_ELEMENTS = 1 << 17
_MAX_BLOCK = 128


def minmax_grid(
    w: Float[Tensor, "out in"], scheme: Scheme, scale_dtype: torch.dtype
) -> tuple[Float[Tensor, "rows groups"], Int8[Tensor, "rows groups"] | None]:
    """Scale (in `scale_dtype`) and zero point of every group from its extremes.

    Raises UsageError when the group size does not divide the columns, ValueError for a `scale_dtype` that is none of
    `SCALE_DTYPES`.
    """
    low, high = _extremes(_grouped(w, scheme))
    scale, zero_point = _grid(low, high, scheme, scale_dtype)
    return _stored(scale, zero_point, scheme, scale_dtype)


def search_grid(
    w: Float[Tensor, "out in"],
    scheme: Scheme,
    scale_dtype: torch.dtype,
    *,
    importance: Float[Tensor, "in"] | None = None,
    hessian: Float[Tensor, "in in"] | None = None,
    steps: int = 12,
    shrink_to: float = 0.45,
    refine: Sequence[float] = (0.1, 0.05, 0.025),
) -> tuple[Float[Tensor, "rows groups"], Int8[Tensor, "rows groups"] | None]:
    """Scale and zero point of every group that cost least, see the module's criteria; `hessian` wins over
    `importance`.

    First `steps` factors from 1 to `shrink_to` shrink the whole range; then, for every number in `refine`,
    each end of the best range is moved by that fraction of itself. Raises as `minmax_grid` does.
    """
    width = scheme.columns_per_scale(w.shape[1])
    weighting = _Weighting.of(width, importance, hessian)
    effort = _Effort(torch.linspace(1.0, shrink_to, steps).tolist(), refine, scheme, scale_dtype)
    if scheme.strategy == "tensor":
        low, high = _extremes(_grouped(w, scheme))
        scale, zero_point = _search(partial(_tensor_cost, w, weighting, scheme), low, high, effort)
        return _stored(scale, zero_point, scheme, scale_dtype)
    groups = _grouped(w, scheme).transpose(0, 1)
    scales = torch.empty(groups.shape[:2], device=w.device)
    zero_points = None if scheme.symmetric else torch.empty_like(scales)
    rows = min(w.shape[0], max(1, _CHUNK_ELEMENTS // width))
    count = max(1, _CHUNK_ELEMENTS // (width * rows))
    for g in range(0, groups.shape[0], count):
        for r in range(0, w.shape[0], rows):
            chunk = groups[g : g + count, r : r + rows].to(torch.float32).contiguous()
            cost = partial(_chunk_cost, chunk, weighting.groups(g, g + count), scheme, torch.empty_like(chunk))
            scale, zero_point = _search(cost, *_extremes(chunk), effort)
            scales[g : g + count, r : r + rows] = scale
            if zero_points is not None and zero_point is not None:
                zero_points[g : g + count, r : r + rows] = zero_point
    zero_points = None if zero_points is None else zero_points.t().contiguous()
    return _stored(scales.t().contiguous(), zero_points, scheme, scale_dtype)


def quantize_codes(
    w: Float[Tensor, "out in"],
    scale: Float[Tensor, "rows groups"],
    zero_point: Int8[Tensor, "rows groups"] | None,
    scheme: Scheme,
) -> Int8[Tensor, "out in"]:
    """`clamp(round(w / scale + zero_point))`, half to even."""
    codes = torch.empty(w.shape, dtype=torch.int8, device=w.device)
    rows = max(1, _CHUNK_ELEMENTS // w.shape[1])
    for r in range(0, w.shape[0], rows):
        grid = slice(None) if scheme.strategy == "tensor" else slice(r, r + rows)
        block = w[r : r + rows].to(torch.float32)
        q = block.reshape(block.shape[0], scale.shape[1], -1) / scale[grid].to(torch.float32).unsqueeze(-1)
        if zero_point is not None:
            q += zero_point[grid].to(torch.float32).unsqueeze(-1)
        codes[r : r + rows] = q.round_().clamp_(scheme.qmin, scheme.qmax).view(block.shape)
    return codes


def minmax_scale(w: Float[Tensor, "out in"], scheme: Scheme) -> Float[Tensor, "rows groups"]:
    """The unrounded, unfloored float32 scale of every group's extremes: 0 for a group of zeros."""
    low, high = _extremes(_grouped(w, scheme))
    return _raw_scale(low, high, scheme)


def scale_fits(scale: Float[Tensor, "..."], dtype: torch.dtype) -> bool:
    """Whether storing these scales in `dtype` changes none by more than 1 %; zeros do not count.

    NaN and infinity fit nowhere.
    """
    if not bool(torch.isfinite(scale).all()):
        return False
    scale = scale[scale > 0].to(torch.float32)
    stored = _rounded(scale, dtype)
    return bool(((stored - scale).abs() <= 0.01 * scale).all())


def choose_scale_dtype(w: Float[Tensor, "out in"], scheme: Scheme, preferred: torch.dtype) -> torch.dtype:
    """`preferred` where it can hold this matrix's scales, else bfloat16, else float32.

    A preference for float64 (a float64 source) gives float32, the widest type of scales.
    """
    if preferred == torch.float64:
        return torch.float32
    scale = minmax_scale(w, scheme)
    return next((dtype for dtype in (preferred, torch.bfloat16) if scale_fits(scale, dtype)), torch.float32)


def _grouped(w: Tensor, scheme: Scheme) -> Tensor:
    """`[rows, groups, columns]`, one scale for each of the first two indices."""
    if scheme.strategy == "tensor":
        return w.reshape(1, 1, -1)
    return w.reshape(w.shape[0], -1, scheme.columns_per_scale(w.shape[1]))


def _extremes(grouped: Tensor) -> tuple[Tensor, Tensor]:
    """Ends of the range, which holds 0, in float32."""
    low, high = grouped.aminmax(dim=-1)
    return low.to(torch.float32).clamp_(max=0), high.to(torch.float32).clamp_(min=0)


def _raw_scale(low: Tensor, high: Tensor, scheme: Scheme) -> Tensor:
    steps = (1 << scheme.bits) - 1
    if scheme.symmetric:
        return torch.maximum(-low, high) / (steps / 2)
    # Halved ends, because the difference of two float32 can exceed float32.
    return (high / 2 - low / 2) / (steps / 2)


def _rounded(scale: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype not in SCALE_DTYPES:
        raise ValueError(f"scales cannot be stored as {dtype}; see choose_scale_dtype")
    limits = torch.finfo(dtype)
    return scale.clamp(limits.tiny, limits.max).to(dtype).to(torch.float32)


def _grid(low: Tensor, high: Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    scale = _rounded(_raw_scale(low, high, scheme), dtype)
    return scale, None if scheme.symmetric else _zero_point(low, scale, scheme)


def _zero_point(low: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    return (scheme.qmin - low / scale).round_().clamp_(scheme.qmin, scheme.qmax)


def _stored(
    scale: Tensor, zero_point: Tensor | None, scheme: Scheme, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    return scale.to(dtype), None if zero_point is None else zero_point.to(torch.int8)


Cost = Callable[[Tensor, Tensor | None], Tensor]
"""Cost of every group on the grid (scale, zero_point), shaped like the scale."""


@dataclass(frozen=True)
class _Weighting:
    """What an error costs: `squares` weighs e² per column, `blocks` holds H_gg cut to `[groups, parts, c, c]`."""

    squares: Tensor | None
    blocks: Tensor | None

    @classmethod
    def of(cls, width: int, importance: Tensor | None, hessian: Tensor | None) -> "_Weighting":
        if hessian is not None:
            c = max(size for size in range(1, min(width, _MAX_BLOCK) + 1) if width % size == 0)
            count = hessian.shape[0] // c
            diagonal = hessian.to(torch.float32).reshape(count, c, count, c).diagonal(dim1=0, dim2=2)
            return cls(None, diagonal.permute(2, 0, 1).reshape(-1, width // c, c, c).contiguous())
        return cls(None if importance is None else importance.to(torch.float32).reshape(-1, 1, width), None)

    def groups(self, begin: int, end: int) -> "_Weighting":
        squares = None if self.squares is None else self.squares[begin:end]
        return _Weighting(squares, None if self.blocks is None else self.blocks[begin:end])

    def cost(self, e: Tensor) -> Tensor:
        """Cost `[groups, rows]` of the errors `[groups, rows, columns]`, which are overwritten."""
        if self.blocks is None:
            e.square_()
            return (e if self.squares is None else e.mul_(self.squares)).sum(-1)
        groups, parts, c, _ = self.blocks.shape
        e = e.view(groups, -1, parts, c).transpose(1, 2).reshape(groups * parts, -1, c)
        he = torch.bmm(e, self.blocks.view(-1, c, c))
        return he.mul_(e).sum(-1).view(groups, parts, -1).sum(1)


@dataclass(frozen=True)
class _Effort:
    """Which ranges are tried: common factors first, then moves of either end."""

    factors: list[float]
    refine: Sequence[float]
    scheme: Scheme
    dtype: torch.dtype

    def moves(self, delta: float) -> list[tuple[float, float]]:
        if self.scheme.symmetric:
            return [(1 + delta, 1 + delta), (1 - delta, 1 - delta)]
        return [(1 + delta, 1), (1 - delta, 1), (1, 1 + delta), (1, 1 - delta)]


def _search(cost: Cost, low: Tensor, high: Tensor, effort: _Effort) -> tuple[Tensor, Tensor | None]:
    """The cheapest grid of every group."""
    best = _trial(cost, low, high, effort)
    for factor in effort.factors:
        best = _cheaper(best, _trial(cost, low * factor, high * factor, effort))
    for delta in effort.refine:
        low, high = best.low, best.high
        for move_low, move_high in effort.moves(delta):
            best = _cheaper(best, _trial(cost, low * move_low, high * move_high, effort))
    return best.scale, best.zero_point


@dataclass(frozen=True)
class _Trial:
    cost: Tensor
    low: Tensor
    high: Tensor
    scale: Tensor
    zero_point: Tensor | None


def _trial(cost: Cost, low: Tensor, high: Tensor, effort: _Effort) -> _Trial:
    scale, zero_point = _grid(low, high, effort.scheme, effort.dtype)
    return _Trial(cost(scale, zero_point), low, high, scale, zero_point)


def _cheaper(a: _Trial, b: _Trial) -> _Trial:
    """Group by group the cheaper of the two; `a` where they are equal."""
    won = b.cost < a.cost
    zero_point = None
    if a.zero_point is not None and b.zero_point is not None:
        zero_point = torch.where(won, b.zero_point, a.zero_point)
    cost, low, high, scale = (
        torch.where(won, y, x) for x, y in ((a.cost, b.cost), (a.low, b.low), (a.high, b.high), (a.scale, b.scale))
    )
    return _Trial(cost, low, high, scale, zero_point)


def _chunk_cost(
    chunk: Tensor, weighting: _Weighting, scheme: Scheme, buffer: Tensor, scale: Tensor, zero_point: Tensor | None
) -> Tensor:
    """Cost of a chunk `[groups, rows, columns]` on a grid; one buffer like the chunk serves all trials."""
    return weighting.cost(_errors(chunk, scale, zero_point, scheme, buffer))


def _tensor_cost(w: Tensor, weighting: _Weighting, scheme: Scheme, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Cost of one grid for the whole matrix, summed over blocks of rows in a fixed order."""
    total = torch.zeros(1, 1, device=w.device)
    rows = max(1, _CHUNK_ELEMENTS // w.shape[1])
    for r in range(0, w.shape[0], rows):
        block = w[r : r + rows].to(torch.float32).unsqueeze(0)
        e = _errors(block, scale, zero_point, scheme, torch.empty_like(block))
        total += weighting.cost(e).sum()
    return total


def _errors(w: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: Scheme, out: Tensor) -> Tensor:
    """`quantized - w` written to `out`."""
    s = scale.unsqueeze(-1)
    e = torch.div(w, s, out=out)
    if zero_point is None:
        e.round_().clamp_(scheme.qmin, scheme.qmax)
    else:
        z = zero_point.unsqueeze(-1)
        e.add_(z).round_().clamp_(scheme.qmin, scheme.qmax).sub_(z)
    return e.mul_(s).sub_(w)
