"""What calibration measures at a site: the Gram matrix of its input and per-channel magnitudes.

    hessian  = sum over tokens of x xᵀ     [in, in], float32: tr(ΔW H ΔWᵀ) is the exact squared output error of ΔW
    mean_abs = mean over tokens of |x|     [in]
    amax     = max over tokens of |x|      [in]
    sample   = some of the inputs themselves, evenly spaced over all tokens     [rows, in]

Sums run over windows in a fixed order, one addition per window, so that nothing depends on how windows are batched:
adding the same rows in other chunks changes the last bits (measured 1.5e-3 for 512-row chunks of a float32 Gram
matrix).
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class SiteStatistics:
    """Measured input statistics of one site; see the module's formulas.

    `borrowed` tokens' worth of the sums come from other experts of a mixture (see calibrate/experts.py); `routed` is
    how many tokens the router sent to the expert, None for other sites.
    """

    hessian: Float[Tensor, "in in"]
    mean_abs: Float[Tensor, " in"]
    amax: Float[Tensor, " in"]
    tokens: int
    sample: Float[Tensor, "rows in"] | None = None
    borrowed: int = 0
    routed: int | None = None

    @property
    def evidence(self) -> int:
        """How many tokens the Gram matrix is worth: measured ones and those borrowed from other experts."""
        return self.tokens + self.borrowed


class EvenSample:
    """Every `stride`-th row of a stream of unknown length; the stride doubles whenever `limit` rows would be passed.

    Between half of `limit` and `limit` rows remain (all of a shorter stream). Which ones depends on their number alone.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._stride, self._seen = limit, 1, 0
        self._rows: list[Tensor] = []

    def add(self, x: Float[Tensor, "tokens in"]) -> None:
        """Take the rows of `x` whose turn it is."""
        if not self._limit:
            return
        first = -self._seen % self._stride
        self._seen += x.shape[0]
        self._rows.append(x[first :: self._stride].to(torch.float32, copy=True))
        while -(-self._seen // self._stride) > self._limit:
            self._stride *= 2
            self._rows = [torch.cat(self._rows)[::2].clone()]

    def rows(self) -> Float[Tensor, "rows in"] | None:
        """What was kept; None when nothing was asked for or nothing came."""
        return torch.cat(self._rows) if self._rows else None


class _Accumulator:
    """Running sums of one site."""

    def __init__(self, features: int, device: torch.device, sample_rows: int) -> None:
        self.hessian = torch.zeros(features, features, dtype=torch.float32, device=device)
        self.abs_sum = torch.zeros(features, dtype=torch.float64, device=device)
        self.amax = torch.zeros(features, dtype=torch.float32, device=device)
        self.tokens = 0
        self.sample = EvenSample(sample_rows)

    def add(self, x: Float[Tensor, "tokens in"]) -> None:
        x = x.to(torch.float32)
        for begin, end in strips(x.shape[1]):
            self.hessian[begin:end, :end].addmm_(x[:, begin:end].T, x[:, :end])
        magnitude = x.abs()
        self.abs_sum += magnitude.sum(0).to(torch.float64)
        self.amax = torch.maximum(self.amax, magnitude.amax(0))
        self.tokens += x.shape[0]
        self.sample.add(x)


def strips(features: int) -> list[tuple[int, int]]:
    """Row ranges of the Gram matrix; of each only the columns up to its end are summed, the rest is their mirror image.

    Four strips need 5/8 of the products; below 256 columns the calls cost more than the products saved.
    """
    count = 4 if features >= 256 else 1
    edges = [features * i // count for i in range(count + 1)]
    return list(itertools.pairwise(edges))


class StatisticsCollector:
    """Collects `SiteStatistics` for the named sites of one layer; pass `observe` to the layer's call.

    Up to `sample_rows` rows of each site's input are kept as they are; none by default.
    """

    def __init__(self, sites: Iterable[str], *, sample_rows: int = 0) -> None:
        self._wanted, self._sample_rows = frozenset(sites), sample_rows
        self._sums: dict[str, _Accumulator] = {}

    def observe(self, site: str, x: Float[Tensor, "tokens in"]) -> None:
        """Add one window's input of a site."""
        if site not in self._wanted:
            return
        if site not in self._sums:
            self._sums[site] = _Accumulator(x.shape[1], x.device, self._sample_rows)
        self._sums[site].add(x)

    def finish(self) -> dict[str, SiteStatistics]:
        """Statistics by site as they were summed; a site that saw no token (an unused expert) is absent."""
        return {
            site: SiteStatistics(
                mirrored(s.hessian), (s.abs_sum / s.tokens).to(torch.float32), s.amax, s.tokens, s.sample.rows()
            )
            for site, s in self._sums.items()
        }


def mirrored(hessian: Float[Tensor, "in in"]) -> Float[Tensor, "in in"]:
    """The lower triangle copied over the upper, in place, a strip at a time."""
    for begin, end in strips(hessian.shape[0]):
        hessian[:begin, begin:end] = hessian[begin:end, :begin].T
    return hessian
