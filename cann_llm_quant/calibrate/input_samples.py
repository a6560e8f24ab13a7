"""Some of the inputs that a layer's sites are given, and their extremes: what an input's quantization is judged on.

Collected while a layer is walked site by site, where no other statistics keep rows (calibrate/moments.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.calibrate.statistics import EvenSample


@dataclass(frozen=True)
class InputSample:
    """`sample` are evenly spaced rows of a site's input, `amax` the largest magnitudes of all `evidence` rows."""

    sample: Float[Tensor, "rows in"] | None
    amax: Float[Tensor, " in"]
    evidence: int

    def multiplied(self, factor: Float[Tensor, " in"]) -> "InputSample":
        """The same input with every channel multiplied: as it was before a producer divided it."""
        rows = None if self.sample is None else self.sample * factor
        return InputSample(rows, self.amax * factor, self.evidence)


class SampleCollector:
    """Collects up to `rows` rows of each named site's input; pass `observe` to the layer's call."""

    def __init__(self, sites: Iterable[str], rows: int) -> None:
        self._rows = {site: EvenSample(rows) for site in sites}
        self._amax: dict[str, Tensor] = {}
        self._tokens = dict.fromkeys(self._rows, 0)

    def observe(self, site: str, x: Float[Tensor, "tokens in"]) -> None:
        """Look at one window's input of a site."""
        if site not in self._rows or x.shape[0] == 0:
            return
        amax = x.to(torch.float32).abs().amax(0)
        self._amax[site] = torch.maximum(self._amax.get(site, amax), amax)
        self._rows[site].add(x)
        self._tokens[site] += x.shape[0]

    def finish(self) -> dict[str, InputSample]:
        """Samples by site; a site that saw no token (an unused expert) is absent."""
        return {
            site: InputSample(self._rows[site].rows(), amax, self._tokens[site]) for site, amax in self._amax.items()
        }
