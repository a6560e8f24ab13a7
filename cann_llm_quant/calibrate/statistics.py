"""What calibration measures at a site: the Gram matrix of its input and per-channel magnitudes.

    hessian  = sum over tokens of x xᵀ     [in, in], float32: tr(ΔW H ΔWᵀ) is the exact squared output error of ΔW
    mean_abs = mean over tokens of |x|     [in]
    amax     = max over tokens of |x|      [in]

Sums run over windows in a fixed order, one addition per window, so that nothing depends on how windows are batched:
adding the same rows in other chunks changes the last bits (measured 1.5e-3 for 512-row chunks of a float32 Gram
matrix).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class SiteStatistics:
    """Measured input statistics of one site; see the module's formulas."""

    hessian: Float[Tensor, "in in"]
    mean_abs: Float[Tensor, " in"]
    amax: Float[Tensor, " in"]
    tokens: int


class _Accumulator:
    """Running sums of one site."""

    def __init__(self, features: int, device: torch.device) -> None:
        self.hessian = torch.zeros(features, features, dtype=torch.float32, device=device)
        self.abs_sum = torch.zeros(features, dtype=torch.float64, device=device)
        self.amax = torch.zeros(features, dtype=torch.float32, device=device)
        self.tokens = 0

    def add(self, x: Float[Tensor, "tokens in"]) -> None:
        x = x.to(torch.float32)
        self.hessian.addmm_(x.T, x)
        magnitude = x.abs()
        self.abs_sum += magnitude.sum(0).to(torch.float64)
        self.amax = torch.maximum(self.amax, magnitude.amax(0))
        self.tokens += x.shape[0]


class StatisticsCollector:
    """Collects `SiteStatistics` for the named sites of one layer; pass `observe` to the layer's call."""

    def __init__(self, sites: Iterable[str]) -> None:
        self._wanted = frozenset(sites)
        self._sums: dict[str, _Accumulator] = {}

    def observe(self, site: str, x: Float[Tensor, "tokens in"]) -> None:
        """Add one window's input of a site."""
        if site not in self._wanted:
            return
        if site not in self._sums:
            self._sums[site] = _Accumulator(x.shape[1], x.device)
        self._sums[site].add(x)

    def finish(self) -> dict[str, SiteStatistics]:
        """Statistics by site; a site that saw no token (an expert that nothing was routed to) is absent."""
        return {
            site: SiteStatistics(s.hessian, (s.abs_sum / s.tokens).to(torch.float32), s.amax, s.tokens)
            for site, s in self._sums.items()
        }
