"""Search for the range of every group that costs least; `grid.search_grid` is its door and explains the costs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cann_llm_quant.quant.number_formats import nearest_
from cann_llm_quant.quant.ranges import ScaleStorage
from cann_llm_quant.quant.scheme import Scheme

_MAX_BLOCK = 128

Cost = Callable[[Tensor, Tensor | None], Tensor]
"""Cost of every group on the grid (scale, zero_point), shaped like the scale."""


@dataclass(frozen=True)
class Weighting:
    """What an error costs: `squares` weighs e² per column, `blocks` holds H_gg cut to `[groups, parts, c, c]`."""

    squares: Tensor | None
    blocks: Tensor | None

    @classmethod
    def of(cls, width: int, importance: Tensor | None, hessian: Tensor | None) -> "Weighting":
        """For groups of `width` columns; what both know of a last, shorter one is filled with zeros."""
        if hessian is not None:
            missing = -hessian.shape[0] % width
            h = torch.nn.functional.pad(hessian, (0, missing, 0, missing)) if missing else hessian
            c = max(size for size in range(1, min(width, _MAX_BLOCK) + 1) if width % size == 0)
            count = h.shape[0] // c
            diagonal = h.to(torch.float32).reshape(count, c, count, c).diagonal(dim1=0, dim2=2)
            return cls(None, diagonal.permute(2, 0, 1).reshape(-1, width // c, c, c).contiguous())
        if importance is None:
            return cls(None, None)
        squares = torch.nn.functional.pad(importance, (0, -importance.shape[0] % width))
        return cls(squares.to(torch.float32).reshape(-1, 1, width), None)

    def groups(self, begin: int, end: int) -> "Weighting":
        """That of some of the groups."""
        squares = None if self.squares is None else self.squares[begin:end]
        return Weighting(squares, None if self.blocks is None else self.blocks[begin:end])

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
class Effort:
    """Which ranges are tried: common factors first, then moves of either end."""

    factors: Sequence[float]
    refine: Sequence[float]
    storage: ScaleStorage

    @classmethod
    def of(cls, storage: ScaleStorage, steps: int, shrink_to: float, refine: Sequence[float]) -> "Effort":
        """Factors that suit the format.

        Power-of-two scales have neighbours at a half and at twice only. The numbers of fp4_e2m1 are so far apart that
        putting the extreme on 4 instead of 6 can pay, so its ranges are widened too.
        """
        scheme = storage.scheme
        if scheme.scale_type == "e8m0":
            return cls((2.0, 0.5), (), storage)
        widest = 1.5 if scheme.dtype == "fp4_e2m1" else 1.0
        return cls(torch.linspace(widest, shrink_to, steps).tolist(), refine, storage)

    def moves(self, delta: float) -> list[tuple[float, float]]:
        """Factors for the low and the high end, around what is best so far."""
        if self.storage.scheme.symmetric:
            return [(1 + delta, 1 + delta), (1 - delta, 1 - delta)]
        return [(1 + delta, 1), (1 - delta, 1), (1, 1 + delta), (1, 1 - delta)]


def search(cost: Cost, low: Tensor, high: Tensor, effort: Effort) -> tuple[Tensor, Tensor | None]:
    """The cheapest grid of every group; the min-max grid is among the candidates."""
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


def _trial(cost: Cost, low: Tensor, high: Tensor, effort: Effort) -> _Trial:
    scale, zero_point = effort.storage.grid(low, high)
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


def chunk_cost(
    chunk: Tensor, weighting: Weighting, scheme: Scheme, buffer: Tensor, scale: Tensor, zero_point: Tensor | None
) -> Tensor:
    """Cost of a chunk `[groups, rows, columns]` on a grid; one buffer like the chunk serves all trials."""
    return weighting.cost(_errors(chunk, scale, zero_point, scheme, buffer))


def tile_cost(chunk: Tensor, weighting: Weighting, scheme: Scheme, buffer: Tensor, scale: Tensor, _: None) -> Tensor:
    """Cost `[groups, 1]` of one row of tiles, `[groups, 128, 128]`, on scales `[groups, 1]`."""
    return weighting.cost(_errors(chunk, scale, None, scheme, buffer)).sum(1, keepdim=True)


def matrix_cost(
    w: Tensor, weighting: Weighting, scheme: Scheme, rows: int, scale: Tensor, zero_point: Tensor | None
) -> Tensor:
    """Cost of one grid for the whole matrix, summed over blocks of `rows` rows in a fixed order."""
    total = torch.zeros(1, 1, device=w.device)
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
        nearest_(e, scheme.dtype)
    else:
        z = zero_point.unsqueeze(-1)
        nearest_(e.add_(z), scheme.dtype).sub_(z)
    return e.mul_(s).sub_(w)
