"""Second moments of one site's input, in the quantized model and against the float one.

    hessian = sum w y yᵀ              [in, in]    y: what the linears read in the quantized model
    cross   = sum w (x - y) yᵀ        [in, in]    x: what they read in the float model
    wanted  = sum w t yᵀ              [out, in]   t: what the linear should give: the float model's stream after it
                                                  less the quantized model's stream before it

`cross` is measured where a site's linears go on to other linears (q/k/v, gate/up), `wanted` where one linear writes to
the residual stream (o, down): it holds the drift of the linear's input and of the stream that it is added to.

Sums run over tokens, in float32, one addition per window. Tokens weigh w = 1, except where a linear writes to the
stream: the next norm divides every token by its length, so that an error counts relative to it, w = 1 / mean(stream²).
It keeps the few tokens whose stream is a hundred times larger (attention sinks) from deciding alone.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.calibrate.statistics import mirrored, strips

_SMALLEST_STREAM = 1e-2


@dataclass(frozen=True)
class SiteMoments:
    """Moments of one site over `tokens` tokens; `cross` and `wanted` are None where they were not measured.

    `added` is what was added to the Hessian's diagonal for want of tokens (quant/shrinkage.py). `borrowed` and `routed`
    as in `SiteStatistics`.
    """

    hessian: Float[Tensor, "in in"]
    cross: Float[Tensor, "in in"] | None
    wanted: Float[Tensor, "out in"] | None
    tokens: int
    borrowed: int = 0
    routed: int | None = None
    added: Float[Tensor, " in"] | None = None

    def missing(self, w: Float[Tensor, "out in"]) -> Float[Tensor, "out in"] | None:
        """The sum of w e yᵀ, e being what outputs of `w` for y lack; None where no float model walked along."""
        if self.wanted is not None:
            given = w @ self.hessian
            return self.wanted - (given if self.added is None else given.sub_(w * self.added))
        return None if self.cross is None else w @ self.cross

    @property
    def evidence(self) -> int:
        """How many tokens the Hessian is worth: measured ones and those borrowed from other experts."""
        return self.tokens + self.borrowed


class MomentSums:
    """Running sums of one site; `add` takes one window's tokens."""

    def __init__(self) -> None:
        self._hessian: Tensor | None = None
        self._cross: Tensor | None = None
        self._wanted: Tensor | None = None
        self._tokens = 0

    def add(
        self,
        y: Float[Tensor, "tokens in"],
        *,
        x: Float[Tensor, "tokens in"] | None = None,
        wanted: Float[Tensor, "tokens out"] | None = None,
        stream: Float[Tensor, "tokens hidden"] | None = None,
    ) -> None:
        """Add one window; `stream` is what tokens are weighed by, `wanted` is t of the module's text."""
        y = y.to(torch.float32)
        weighted = y if stream is None else y * token_weights(stream)
        if self._hessian is None:
            self._hessian = y.new_zeros(y.shape[1], y.shape[1])
        for begin, end in strips(y.shape[1]):
            self._hessian[begin:end, :end].addmm_(weighted[:, begin:end].T, y[:, :end])
        self._tokens += y.shape[0]
        if x is not None:
            self._cross = _added(self._cross, x.to(torch.float32) - y, weighted)
        if wanted is not None:
            self._wanted = _added(self._wanted, wanted.to(torch.float32), weighted)

    def finish(self) -> SiteMoments | None:
        """The moments; None when no token came."""
        if self._hessian is None or not self._tokens:
            return None
        return SiteMoments(mirrored(self._hessian), self._cross, self._wanted, self._tokens)


def _added(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """`total + leftᵀ right`, in place."""
    if total is None:
        total = left.new_zeros(left.shape[1], right.shape[1])
    return total.addmm_(left.T, right)


def token_weights(stream: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens 1"]:
    """1 / mean(stream²) of every token, at most a hundred times what the window's mean power gives."""
    power = stream.to(torch.float32).square().mean(-1, keepdim=True)
    floor = _SMALLEST_STREAM * power.mean()
    return power.clamp(min=floor.clamp(min=torch.finfo(torch.float32).tiny)).reciprocal_()
