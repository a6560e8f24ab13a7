"""How often values of each size occur, in bounded memory: what ranges over a whole calibration set are read from.

A value's bucket is the sign, the exponent and the first 8 bits of the mantissa of its float32: buckets are 1/256 of
their own value wide or less, whatever the scale of the data, so that none must be guessed or widened while data comes
in. Counts are integers: their sum does not depend on any order. |x| below 2^-30 falls into bucket 0, from 2^34 on into
the last; the extremes are kept exactly beside them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

BUCKETS = 64 * 256
SKETCH_BYTES = 2 * BUCKETS * 8
_SHIFT = 23 - 8
_FIRST = (127 - 30) << 8


@dataclass(frozen=True)
class ValueSketch:
    """`counts[0]` of negative values, `counts[1]` of the others, by bucket of |x|; extremes, widened to hold 0.

    `moving_low` and `moving_high` follow the extremes of one window after another, see activation_ranges.py.
    """

    counts: Int64[Tensor, "2 buckets"]
    low: float
    high: float
    moving_low: float
    moving_high: float
    tokens: int

    @property
    def amax(self) -> float:
        """Largest magnitude."""
        return max(-self.low, self.high)


def bucket_counts(x: Float[Tensor, "..."]) -> Int64[Tensor, "2 buckets"]:
    """Counts of the values of `x`; see the module for the buckets."""
    flat = x.to(torch.float32).flatten()
    bucket = (flat.abs().view(torch.int32) >> _SHIFT).sub_(_FIRST).clamp_(0, BUCKETS - 1)
    bucket += BUCKETS * (flat >= 0)
    return torch.bincount(bucket, minlength=2 * BUCKETS).view(2, BUCKETS)


def bucket_edges() -> Float64[Tensor, "edges"]:
    """Lower edge of every bucket of |x| and the upper edge of the last."""
    bits = (torch.arange(BUCKETS + 1, dtype=torch.int32) + _FIRST) << _SHIFT
    edges = bits.view(torch.float32).to(torch.float64)
    edges[0] = 0.0
    return edges


def merged(sketches: Sequence[ValueSketch]) -> ValueSketch:
    """One sketch of all the values; moving extremes are averaged by tokens. Raises ValueError without any sketch."""
    if not sketches:
        raise ValueError("there is nothing to merge")
    tokens = sum(sketch.tokens for sketch in sketches)
    return ValueSketch(
        counts=torch.stack([sketch.counts for sketch in sketches]).sum(0),
        low=min(sketch.low for sketch in sketches),
        high=max(sketch.high for sketch in sketches),
        moving_low=sum(sketch.moving_low * sketch.tokens for sketch in sketches) / tokens,
        moving_high=sum(sketch.moving_high * sketch.tokens for sketch in sketches) / tokens,
        tokens=tokens,
    )
