"""What static ranges of inputs need of a layer's sites: a `ValueSketch` of every value that each site was given.

Collected only where a scheme asks for stored ranges, in a run of its own through the layer as it will be (folded norms,
quantized weights): the factors that smoothing divides channels by change the spread of a whole tensor, so that sketches
taken before are of another input.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.quant.value_sketch import BUCKETS, ValueSketch, bucket_counts

MOVING_SHARE = 0.01


class _Running:
    """Sums of one site; extremes are tensors, in which NaN wins every comparison instead of losing it (C06)."""

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(2, BUCKETS, dtype=torch.int64, device=device)
        self.ends = torch.zeros(2, device=device)
        self.moving = torch.zeros(2, device=device)
        self.tokens = 0

    def add(self, x: Float[Tensor, "tokens in"]) -> None:
        self.counts += bucket_counts(x)
        low, high = torch.aminmax(x.to(torch.float32))
        ends = torch.stack([low.clamp(max=0), high.clamp(min=0)])
        self.ends = torch.stack([torch.minimum(self.ends[0], ends[0]), torch.maximum(self.ends[1], ends[1])])
        # the first window sets the average
        self.moving = self.moving + MOVING_SHARE * (ends - self.moving) if self.tokens else ends
        self.tokens += x.shape[0]

    def sketch(self) -> ValueSketch:
        (low, high), (moving_low, moving_high) = self.ends.tolist(), self.moving.tolist()
        return ValueSketch(self.counts.cpu(), low, high, moving_low, moving_high, self.tokens)


class SketchCollector:
    """Collects a sketch for each of the named sites of one layer; pass `observe` to the layer's call."""

    def __init__(self, sites: Iterable[str]) -> None:
        self._wanted = frozenset(sites)
        self._sums: dict[str, _Running] = {}

    def observe(self, site: str, x: Float[Tensor, "tokens in"]) -> None:
        """Add one window's input of a site."""
        if site not in self._wanted or x.shape[0] == 0:
            return
        if site not in self._sums:
            self._sums[site] = _Running(x.device)
        self._sums[site].add(x)

    def finish(self) -> dict[str, ValueSketch]:
        """Sketches by site; a site that saw no token (an unused expert) is absent."""
        return {site: sums.sketch() for site, sums in self._sums.items()}
