"""Even out the channels of K before they share a scale, without changing a single score.

A query and a key meet in the sum of q_c k_c over the channels c of a head, after RoPE has turned the pairs (c, c + d/2)
into one another. If both channels of a pair of K are divided by f and the same channels of all queries that read this
head are multiplied by it, every sum stays as it is. K's projection (its rows, its bias, or the gains of its norm) takes
1/f, that of the queries f. Only K is quantized, so nothing speaks against full balance: with one scale for all
channels, the error of a score is the sum of q_c² f_c², and f may not fall below a channel's extreme.

Factors are powers of two. In binary floating point they then change exponents only: weights, K and the products keep
all their bits, so that the function is unchanged to the last one, and codes of weights with a scale a row too.
"""

import torch
from jaxtyping import Float
from torch import Tensor

LARGEST_EXPONENT = 8


def pair_factors(
    amax: Float[Tensor, "heads dim"], rotary_dim: int, *, shared: bool = False
) -> Float[Tensor, "heads dim"]:
    """Powers of two that K's channels are to be divided by, from their largest magnitudes after RoPE.

    Pairs of the first `rotary_dim` channels share a factor, channels that do not turn have one of their own. `shared`
    gives all heads the same, for a norm whose gains are one head wide. Channels that carry nothing keep 1.
    """
    tied, half = amax.to(torch.float32).clone(), rotary_dim // 2
    pairs = torch.maximum(tied[:, :half], tied[:, half:rotary_dim])
    tied[:, :half] = tied[:, half:rotary_dim] = pairs
    if shared:
        tied = tied.amax(0, keepdim=True).expand_as(tied)
    live = tied > 0
    if not bool(live.any()):
        return torch.ones_like(tied)
    size = torch.where(live, tied, 1.0).log2()
    exponent = (size - size[live].mean()).round().clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    return torch.where(live, torch.exp2(exponent), 1.0)


def divided_keys(
    tensor: Float[Tensor, "rows *columns"], factor: Float[Tensor, "heads dim"]
) -> Float[Tensor, "rows *columns"]:
    """K's weight or bias, one row for each channel of each head."""
    rows = factor.flatten().to(tensor.dtype)
    return tensor / rows.view(-1, *[1] * (tensor.dim() - 1))


def multiplied_queries(
    tensor: Float[Tensor, "rows *columns"], factor: Float[Tensor, "heads dim"]
) -> Float[Tensor, "rows *columns"]:
    """The queries' weight or bias; each head of K is read by as many heads, side by side, as the rows hold."""
    group = tensor.shape[0] // factor.numel()
    rows = factor.repeat_interleave(group, 0).flatten().to(tensor.dtype)
    return tensor * rows.view(-1, *[1] * (tensor.dim() - 1))
