"""The factor that balances ranges against what they cost, by a fixed-point iteration.

Rounding errors within a group are nearly independent and as large as the group's step, so for a site with
factor s the error that rounding the weights makes is

    loss(s) ~ sum over groups g of  R_g(s) * B_g(s) / levels²
    R_g = sum over rows of range(W_rg s)²        B_g = sum over columns of H_cc / s_c²

Quantizing the inputs adds a term of the same form with 1/s in the place of s: rows of x / s have ranges, and a column's
error costs the energy |W_c|² s_c² of the weights that read it. With the range replaced by the p-norm (p = 8) the sum is
smooth, and where it is smallest every column's shares of both factors, summed over the terms, agree; for weights
share_R(c) = sum over rows of range² * |w s|_c^p / sum of |w s|^p, share_B(c) = H_cc / s_c² / B_g. The iteration
multiplies s by (what pulls up / what pulls down)^(1 / (p + 2)), which is exact for one group with one row. Ten rounds
cost about as much as judging one candidate and beat the best of a grid over powers of the activations on most sites.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_NORM = 8
_ROUNDS = 10
_CHUNK_ELEMENTS = 1 << 17


@dataclass(frozen=True)
class RangeTerm:
    """One term of the loss: `weight` times the sum over rows and groups of `width` columns of range² * B.

    `energy` is what a column's squared error costs before any factor. The matrix is multiplied by s, or divided where
    it is `divided`; its energy the other way round.
    """

    matrix: Float[Tensor, "rows in"]
    width: int
    energy: Float[Tensor, "in"]
    weight: float
    divided: bool = False


def class_mean(
    values: Float[Tensor, "in"], weight: Bool[Tensor, "in"], classes: Int[Tensor, "in"]
) -> Float[Tensor, "in"]:
    """Every channel's value replaced by the mean over those of its class that count; 0 for a class without any."""
    counted = class_sum(torch.where(weight, values, 0.0), classes)
    return counted / class_sum(weight.to(values.dtype), classes).clamp(min=1)


def class_sum(values: Float[Tensor, "in"], classes: Int[Tensor, "in"]) -> Float[Tensor, "in"]:
    """Every channel's value replaced by the sum over its class."""
    total = torch.zeros(int(classes.max()) + 1, dtype=values.dtype, device=values.device)
    return total.index_add_(0, classes, values)[classes]


def balanced_log_factor(
    terms: Sequence[RangeTerm],
    start: Float[Tensor, "in"],
    live: Bool[Tensor, "in"],
    classes: Int[Tensor, "in"],
) -> Float[Tensor, "in"]:
    """Logarithm of the balanced factor, from the logarithm `start`.

    Channels of one class move together; those that are not `live` do not move.
    """
    scaled = _normalized(terms)
    log_s = start.clone()
    for _ in range(_ROUNDS):
        s = log_s.exp()
        up, down = torch.zeros_like(s), torch.zeros_like(s)
        for term in scaled:
            by_range, by_energy = _pulls(term, 1 / s if term.divided else s)
            up.add_(by_range if term.divided else by_energy, alpha=term.weight)
            down.add_(by_energy if term.divided else by_range, alpha=term.weight)
        up, down = class_sum(up, classes), class_sum(down, classes)
        moves = live & (up > 0) & (down > 0)
        log_s = log_s + torch.where(moves, (up / down).log() / (_NORM + 2), 0.0)
        log_s = log_s - log_s.mean()
    return class_mean(log_s, live, classes)


def _normalized(terms: Sequence[RangeTerm]) -> list[RangeTerm]:
    """Energies brought to a mean of 1 and weights to a largest of 1, so that sums stay within float32."""
    means = [float(term.energy.mean(dtype=torch.float64)) for term in terms]
    weights = [term.weight * mean for term, mean in zip(terms, means, strict=True)]
    largest = max(weights, default=0.0)
    return [
        RangeTerm(term.matrix, term.width, (term.energy / mean).to(torch.float32), weight / largest, term.divided)
        for term, mean, weight in zip(terms, means, weights, strict=True)
        if weight > 0
    ]


def _pulls(term: RangeTerm, s: Tensor) -> tuple[Tensor, Tensor]:
    """Each column's shares of R_g and of B_g, times R_g * B_g: for a matrix times s, what moves s down and up."""
    w = term.matrix
    scaled_energy = (term.energy / s.square()).view(-1, term.width)
    share = torch.zeros_like(scaled_energy)
    rows = max(1, _CHUNK_ELEMENTS // w.shape[1])
    for r in range(0, w.shape[0], rows):
        x = (w[r : r + rows] * s).view(-1, *scaled_energy.shape)
        top = x.abs().amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
        powered = (x / top).square_().square_().square_()
        total = powered.sum(-1, keepdim=True).clamp_(min=1.0)
        # range² * power / total with range = top * total^(1/p)
        share += powered.mul_(top.square() * total.pow(2 / _NORM - 1)).sum(0)
    by_range = share * scaled_energy.sum(-1, keepdim=True)
    by_energy = scaled_energy * share.sum(-1, keepdim=True)
    return by_range.reshape(-1), by_energy.reshape(-1)
