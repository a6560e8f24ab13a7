"""Second moments of one site's input, in the quantized model and against the float one.

    hessian  = sum w y yᵀ              [in, in]       y: what the linear reads in the quantized model
    cross    = sum w (x - y) yᵀ        [in, in]       x: what it reads in the float model
    residual = sum w (r_x - r_y) yᵀ    [hidden, in]   r: the stream that the linear's output is added to

Sums run over tokens, in float32, one addition per window. Tokens weigh w = 1, except where a linear writes to the
residual stream (o, down): the next norm divides every token by its length, so that an error counts relative to the
stream, w = 1 / mean(r²). It keeps the few tokens whose stream is a hundred times larger (attention sinks) from deciding
alone.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.calibrate.statistics import mirrored, strips

_SMALLEST_STREAM = 1e-2


@dataclass(frozen=True)
class SiteMoments:
    """Moments of one site over `tokens` tokens; `cross` and `residual` are None where no float stream was paired.

    `borrowed` and `routed` as in `SiteStatistics`.
    """

    hessian: Float[Tensor, "in in"]
    cross: Float[Tensor, "in in"] | None
    residual: Float[Tensor, "hidden in"] | None
    tokens: int
    borrowed: int = 0
    routed: int | None = None

    @property
    def evidence(self) -> int:
        """How many tokens the Hessian is worth: measured ones and those borrowed from other experts."""
        return self.tokens + self.borrowed


class MomentSums:
    """Running sums of one site; `add` takes one window's tokens."""

    def __init__(self) -> None:
        self._hessian: Tensor | None = None
        self._cross: Tensor | None = None
        self._residual: Tensor | None = None
        self._tokens = 0

    def add(
        self,
        y: Float[Tensor, "tokens in"],
        x: Float[Tensor, "tokens in"] | None = None,
        stream: tuple[Float[Tensor, "tokens hidden"], Float[Tensor, "tokens hidden"] | None] | None = None,
    ) -> None:
        """Add one window; `stream` is r_y and r_x (None without a float model), for linears that write to it."""
        y = y.to(torch.float32)
        weighted = y
        if stream is not None:
            weighted = y * _weights(stream[0] if stream[1] is None else stream[1])
        if self._hessian is None:
            self._hessian = y.new_zeros(y.shape[1], y.shape[1])
        for begin, end in strips(y.shape[1]):
            self._hessian[begin:end, :end].addmm_(weighted[:, begin:end].T, y[:, :end])
        self._tokens += y.shape[0]
        if x is None:
            return
        if self._cross is None:
            self._cross = y.new_zeros(y.shape[1], y.shape[1])
        self._cross.addmm_((x.to(torch.float32) - y).T, weighted)
        if stream is None or stream[1] is None:
            return
        r_y, r_x = stream[0].to(torch.float32), stream[1].to(torch.float32)
        if self._residual is None:
            self._residual = y.new_zeros(r_y.shape[1], y.shape[1])
        self._residual.addmm_((r_x - r_y).T, weighted)

    def finish(self) -> SiteMoments | None:
        """The moments; None when no token came."""
        if self._hessian is None or not self._tokens:
            return None
        return SiteMoments(mirrored(self._hessian), self._cross, self._residual, self._tokens)


def _weights(stream: Tensor) -> Tensor:
    """One weight a token, at most a hundred times the window's typical one."""
    power = stream.to(torch.float32).square().mean(-1, keepdim=True)
    floor = _SMALLEST_STREAM * power.mean()
    return power.clamp(min=floor.clamp(min=torch.finfo(torch.float32).tiny)).reciprocal_()
