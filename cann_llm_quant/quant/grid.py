"""Grids: the scale and zero point of every group of weights, and the codes of weights on them.

`minmax_grid` takes each group's extremes (ranges.py has the rules), `search_grid` the range that costs least:

    |e|²    sum of importance * e²    e H_gg eᵀ    (e = quantized - w; H_gg the group's block of the Gram
    matrix)

The last is the error of the linear's outputs as far as it arises within groups. Blocks wider than 128 columns
are cut, which bounds the work. The min-max grid is always among the candidates.

A scale is rounded to its storage first; zero point and codes are then chosen against the rounded scale, so that storing
loses nothing more. Matrices that a runtime fuses must share what belongs to the whole matrix: a scale per tensor, the
global scale of NVFP4. For these `shared_amax` of all of them is passed as `amax`.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from jaxtyping import Float, Float8e4m3fn, Int8
from torch import Tensor

from cann_llm_quant.errors import NumericError
from cann_llm_quant.quant.number_formats import nearest_, to_codes
from cann_llm_quant.quant.range_search import Effort, Weighting, chunk_cost, matrix_cost, search, tile_cost
from cann_llm_quant.quant.ranges import ScaleStorage, extremes, grouped, raw_scale, rounded_to
from cann_llm_quant.quant.scheme import TILE, Scheme, in_groups, row_scales

# What stays in a core's cache; an accelerator wants few large launches.
_CHUNK_ELEMENTS, _DEVICE_CHUNK_ELEMENTS = 1 << 17, 1 << 23


def minmax_grid(
    w: Float[Tensor, "out in"], scheme: Scheme, scale_dtype: torch.dtype, *, amax: float | None = None
) -> tuple[Float[Tensor, "rows groups"], Int8[Tensor, "rows groups"] | None]:
    """Scale (in `scale_dtype`, or float32 where the scheme has a scale type of its own) and zero point of every group.

    Raises UsageError when the group size does not divide the columns, ValueError for a `scale_dtype` that cannot hold
    scales, NumericError when the extremes are not finite.
    """
    storage = ScaleStorage.of(w, scheme, scale_dtype, amax)
    return _stored(*storage.grid(*_finite_range(w, scheme, amax)), storage)


def search_grid(
    w: Float[Tensor, "out in"],
    scheme: Scheme,
    scale_dtype: torch.dtype,
    *,
    importance: Float[Tensor, "in"] | None = None,
    hessian: Float[Tensor, "in in"] | None = None,
    amax: float | None = None,
    steps: int = 12,
    shrink_to: float = 0.45,
    refine: Sequence[float] = (0.1, 0.05, 0.025),
) -> tuple[Float[Tensor, "rows groups"], Int8[Tensor, "rows groups"] | None]:
    """Scale and zero point of every group that cost least, see the module's criteria; `hessian` wins over
    `importance`.

    First `steps` factors from 1 to `shrink_to` shrink the whole range; then, for every number in `refine`,
    each end of the best range is moved by that fraction of itself. A scale that other matrices share (`amax` and one
    scale per tensor) is not searched. Raises as `minmax_grid` does.
    """
    if scheme.strategy == "tensor" and amax is not None:
        return minmax_grid(w, scheme, scale_dtype, amax=amax)
    width = scheme.columns_per_scale(w.shape[1])
    weighting = Weighting.of(width, importance, hessian)
    storage = ScaleStorage.of(w, scheme, scale_dtype, amax)
    effort = Effort.of(storage, steps, shrink_to, refine)
    low, high = _finite_range(w, scheme, None)
    if scheme.strategy == "tensor":
        rows = max(1, _chunk_elements(w) // w.shape[1])
        return _stored(*search(partial(matrix_cost, w, weighting, scheme, rows), low, high, effort), storage)
    if scheme.strategy == "tile":
        return _search_tiles(w, low, high, weighting, effort), None
    return _search_groups(w, low.T, high.T, weighting, effort)


def _search_groups(
    w: Tensor, low: Tensor, high: Tensor, weighting: Weighting, effort: Effort
) -> tuple[Tensor, Tensor | None]:
    """Chunk by chunk, groups first: `low` and `high` are `[groups, out]`."""
    scheme = effort.storage.scheme
    width = scheme.columns_per_scale(w.shape[1])
    groups = w.reshape(w.shape[0], -1, width).transpose(0, 1)
    scales = torch.empty(groups.shape[:2], device=w.device)
    zero_points = None if scheme.symmetric else torch.empty_like(scales)
    limit = _chunk_elements(w)
    rows = min(w.shape[0], max(1, limit // width))
    count = max(1, limit // (width * rows))
    for g in range(0, groups.shape[0], count):
        for r in range(0, w.shape[0], rows):
            part = (slice(g, g + count), slice(r, r + rows))
            chunk = groups[part].to(torch.float32).contiguous()
            cost = partial(chunk_cost, chunk, weighting.groups(g, g + count), scheme, torch.empty_like(chunk))
            scale, zero_point = search(cost, low[part], high[part], effort)
            scales[part] = scale
            if zero_points is not None and zero_point is not None:
                zero_points[part] = zero_point
    zero_points = None if zero_points is None else zero_points.t().contiguous()
    return _stored(scales.t().contiguous(), zero_points, effort.storage)


def _search_tiles(w: Tensor, low: Tensor, high: Tensor, weighting: Weighting, effort: Effort) -> Tensor:
    """One row of tiles at a time."""
    scales = torch.empty_like(low)
    for i in range(low.shape[0]):
        rows = in_groups(w[i * TILE : (i + 1) * TILE].to(torch.float32), TILE)
        chunk = rows.transpose(0, 1).contiguous()
        cost = partial(tile_cost, chunk, weighting, effort.storage.scheme, torch.empty_like(chunk))
        scales[i] = search(cost, low[i, :, None], high[i, :, None], effort)[0].squeeze(1)
    return scales.to(effort.storage.dtype)


def quantize_codes(
    w: Float[Tensor, "out in"],
    scale: Float[Tensor, "rows groups"],
    zero_point: Int8[Tensor, "rows groups"] | None,
    scheme: Scheme,
) -> Int8[Tensor, "out in"] | Float8e4m3fn[Tensor, "out in"]:
    """Codes of the values nearest to `w / scale + zero_point`, ties to even.

    Raises NumericError for weights that are not finite: casts to small floats would hide infinity as the largest.
    """
    out, columns = w.shape
    width = scheme.columns_per_scale(columns)
    steps = row_scales(scale, scheme, out)
    zeros = None if zero_point is None else zero_point.to(torch.float32).expand(out, -1)
    codes = torch.empty(
        w.shape, dtype=torch.float8_e4m3fn if scheme.dtype == "fp8_e4m3" else torch.int8, device=w.device
    )
    rows = max(1, _chunk_elements(w) // columns)
    for r in range(0, out, rows):
        part = slice(r, r + rows)
        q = in_groups(w[part].to(torch.float32), width) / steps[part].unsqueeze(-1)
        if zeros is not None:
            q += zeros[part].unsqueeze(-1)
        if not scheme.is_integer and not bool(q.isfinite().all()):
            raise NumericError("the matrix holds NaN or infinity and cannot be quantized")
        codes[part] = to_codes(nearest_(q, scheme.dtype).flatten(1)[:, :columns], scheme.dtype)
    return codes


def shared_amax(weights: Iterable[Float[Tensor, "_ in"]]) -> float:
    """The largest absolute weight of matrices that a runtime fuses into one."""
    return max(float(w.abs().amax()) for w in weights)


def minmax_scale(w: Float[Tensor, "out in"], scheme: Scheme) -> Float[Tensor, "rows groups"]:
    """The unrounded, unfloored float32 scale of every group's extremes: 0 for a group of zeros."""
    return raw_scale(*extremes(grouped(w, scheme)), scheme)


def scale_fits(scale: Float[Tensor, "..."], dtype: torch.dtype) -> bool:
    """Whether storing these scales in `dtype` changes none by more than 1 %; zeros do not count.

    NaN and infinity fit nowhere.
    """
    if not bool(torch.isfinite(scale).all()):
        return False
    scale = scale[scale > 0].to(torch.float32)
    return bool(((rounded_to(scale, dtype) - scale).abs() <= 0.01 * scale).all())


def choose_scale_dtype(w: Float[Tensor, "out in"], scheme: Scheme, preferred: torch.dtype) -> torch.dtype:
    """`preferred` where it can hold this matrix's scales, else bfloat16, else float32.

    A preference for float64 (a float64 source) gives float32, the widest type of scales; so do schemes with a scale
    type of their own.
    """
    if preferred == torch.float64 or scheme.scale_type != "float":
        return torch.float32
    scale = minmax_scale(w, scheme)
    return next((dtype for dtype in (preferred, torch.bfloat16) if scale_fits(scale, dtype)), torch.float32)


def _finite_range(w: Tensor, scheme: Scheme, amax: float | None) -> tuple[Tensor, Tensor]:
    """Ends of every group's range; `amax` is that of a scale per tensor."""
    if scheme.strategy == "tensor" and amax is not None:
        high = torch.full((1, 1), amax, dtype=torch.float32, device=w.device)
        return -high, high
    low, high = extremes(grouped(w, scheme))
    if not bool(torch.isfinite(low).all() and torch.isfinite(high).all()):
        raise NumericError("the matrix holds NaN or infinity and cannot be quantized")
    return low, high


def _stored(scale: Tensor, zero_point: Tensor | None, storage: ScaleStorage) -> tuple[Tensor, Tensor | None]:
    return scale.to(storage.dtype), None if zero_point is None else zero_point.to(torch.int8)


def _chunk_elements(w: Tensor) -> int:
    return _CHUNK_ELEMENTS if w.device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS
