"""The factor that balances ranges against activations, by a fixed-point iteration.

Rounding errors within a group are nearly independent and as large as the group's step, so for a site with
factor s

    loss(s) ~ sum over groups g of  R_g(s) * B_g(s)
    R_g = sum over rows of range(W_rg s)²        B_g = sum over columns of H_cc / s_c²

With the range replaced by the p-norm (p = 8) this is smooth, and where it is smallest every column's shares
of both factors agree: share_R(c) = sum over rows of range² * |w s|_c^p / sum of |w s|^p, share_B(c) = H_cc /
s_c² / B_g. The iteration multiplies s by (share_B / share_R)^(1 / (p + 2)), which is exact for one group with
one row. Ten rounds cost about as much as judging one candidate and beat the best of a grid over powers of the
activations on most sites.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_NORM = 8
_ROUNDS = 10
_CHUNK_ELEMENTS = 1 << 17


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
    weights: Sequence[Float[Tensor, "_ in"]],
    widths: Sequence[int],
    energy: Float[Tensor, "in"],
    start: Float[Tensor, "in"],
    live: Bool[Tensor, "in"],
    classes: Int[Tensor, "in"],
) -> Float[Tensor, "in"]:
    """Logarithm of the balanced factor, from the logarithm `start`.

    `widths` are the columns that share a scale, for each linear; `energy` is the diagonal of the Hessian.
    Channels of one class move together; those that are not `live` do not move.
    """
    h = (energy / energy.mean().clamp(min=torch.finfo(torch.float32).tiny)).to(torch.float32)
    log_s = start.clone()
    for _ in range(_ROUNDS):
        s = log_s.exp()
        pull_range, pull_energy = torch.zeros_like(s), torch.zeros_like(s)
        for w, width in zip(weights, widths, strict=True):
            by_range, by_energy = _pulls(w, width, h, s)
            pull_range += by_range
            pull_energy += by_energy
        pull_range, pull_energy = class_sum(pull_range, classes), class_sum(pull_energy, classes)
        moves = live & (pull_range > 0) & (pull_energy > 0)
        step = (pull_energy / pull_range).log() / (_NORM + 2)
        log_s = log_s + torch.where(moves, step, 0.0)
        log_s = log_s - log_s.mean()
    return class_mean(log_s, live, classes)


def _pulls(w: Tensor, width: int, h: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Each column's shares of R_g and of B_g, times R_g * B_g: what moves s down and what moves it up."""
    scaled_energy = (h / s.square()).view(-1, width)
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
