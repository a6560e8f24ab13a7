"""Which values keys and values take, channel by channel, exactly as the cache receives them: K after RoPE, and V.

They are seen where a layer calls its attention, so that nothing depends on how projections are named or fused, over all
windows of the calibration set. For each channel the extremes are kept, and counts by size: one bucket for the sign, the
exponent and the first 5 bits of the mantissa of a float32, so that an edge is at most 1/32 above any value below it.
|x| below 2^-20 falls into the first bucket, from 2^16 on into the last.

RoPE turns the channels i and i + d/2 of a key into one another by an angle that grows with the position. Slow pairs
turn further in a text that is longer than the windows, so that the extremes seen do not bound them. What no position
changes is the norm of the pair, `n = sqrt(k_i^2 + k_(i + d/2)^2)`, which either channel takes at some angle. Symmetric
ranges of K are therefore those of n, for both channels and both signs. Ranges about a middle are of the values as they
were seen: a pair that may point anywhere has no middle but 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from cann_llm_quant.calibrate.stream import HiddenStates
from cann_llm_quant.models.attention import Attend, CausalAttend
from cann_llm_quant.models.decoder import DecoderLayer, ignore, rotation_of

OCTAVES, FIRST = 36, -20
BUCKETS = OCTAVES * 32
KV_CHANNEL_BYTES = 2 * BUCKETS * 8
_SHIFT = 23 - 5
_OFFSET = (127 + FIRST) << 5


@dataclass(frozen=True)
class ChannelValues:
    """Extremes and counts of the values of each channel; `counts` go from the most negative bucket to the largest.

    `norms` [heads, pairs] are those of the pairs that RoPE turns, the first `2 * pairs` channels; None: none turn.
    """

    minimum: Float[Tensor, "heads dim"]
    maximum: Float[Tensor, "heads dim"]
    counts: Int64[Tensor, "heads dim buckets"]
    tokens: int
    norms: "ChannelValues | None" = None

    def range(
        self, shared: Sequence[int], *, symmetric: bool, percentile: float = 100.0, headroom: float = 1.0
    ) -> tuple[Float[Tensor, "h 1 d"], Float[Tensor, "h 1 d"]]:
        """Lower and upper end of what a scale should reach, where the axes `shared` (0 heads, 1 channels) share it.

        At most half of `100 - percentile` percent of the values lie beyond either end; where pairs turn and scales are
        `symmetric`, at most `100 - percentile` percent of their norms, so that it holds at every position. `headroom`
        widens the range: about zero where scales are `symmetric`, else about its middle. Of a constant there is
        nothing to widen.
        """
        values = self.turned() if symmetric else self
        low, high, counts = values.minimum, values.maximum, values.counts
        if shared:
            axes = list(shared)
            low, high = low.amin(axes, keepdim=True), high.amax(axes, keepdim=True)
            counts = counts.sum(axes, keepdim=True)
        if percentile < 100:
            inner_low, inner_high = _quantiles(counts, (100 - percentile) / 200)
            low, high = torch.maximum(low, inner_low), torch.minimum(high, inner_high)
        if headroom == 1:
            return low.unsqueeze(1), high.unsqueeze(1)
        middle = torch.where(low == high, low, 0.0) if symmetric else (low + high) / 2
        low, high = middle + (low - middle) * headroom, middle + (high - middle) * headroom
        return low.unsqueeze(1), high.unsqueeze(1)

    def turned(self) -> "ChannelValues":
        """What the channels may hold at any position: those of a pair whatever the norms reach, with either sign."""
        if self.norms is None:
            return self
        norms = self.norms.maximum.repeat(1, 2)
        either = (self.norms.counts + self.norms.counts.flip(-1)).repeat(1, 2, 1)
        still = slice(norms.shape[1], None)
        return ChannelValues(
            torch.cat((-norms, self.minimum[:, still]), 1),
            torch.cat((norms, self.maximum[:, still]), 1),
            # a norm counts once with either sign, so that other channels' values must count twice
            torch.cat((either, 2 * self.counts[:, still]), 1),
            2 * self.tokens,
        )

    def share_outside(self, low: Float[Tensor, "h 1 d"], high: Float[Tensor, "h 1 d"]) -> float:
        """Share of all values beyond these ends, to within a bucket: what quantization clips."""
        below, above = bucket_edges()
        low, high = low.squeeze(1).unsqueeze(-1).double(), high.squeeze(1).unsqueeze(-1).double()
        outside = self.counts.masked_fill((above >= low) & (below <= high), 0)
        return float(outside.sum()) / (self.tokens * self.minimum.numel())


def bucket_edges() -> tuple[Float64[Tensor, "buckets"], Float64[Tensor, "buckets"]]:
    """Lower and upper edge of every bucket, from the most negative to the largest."""
    bits = (torch.arange(BUCKETS + 1, dtype=torch.int32) + _OFFSET) << _SHIFT
    edges = bits.view(torch.float32).double()
    edges[0], edges[-1] = 0.0, float("inf")
    return torch.cat((-edges[1:].flip(0), edges[:-1])), torch.cat((-edges[:-1].flip(0), edges[1:]))


def _quantiles(counts: Int64[Tensor, "h d buckets"], tail: float) -> tuple[Float[Tensor, "h d"], Float[Tensor, "h d"]]:
    """Ends beyond either of which at most the share `tail` of the counted values lies, just inside edges of buckets."""
    below, above = (edges.float() for edges in bucket_edges())
    total = counts.sum(-1, keepdim=True)
    upto = counts.cumsum(-1)
    # the first bucket with more than the tail up to it, and the last with more than the tail from it on
    first = (upto > tail * total).to(torch.uint8).argmax(-1)
    last = counts.shape[-1] - 1 - ((total - upto + counts) > tail * total).flip(-1).to(torch.uint8).argmax(-1)
    return torch.nextafter(below[first], above[first]), torch.nextafter(above[last], below[last])


class _Channels:
    """Running extremes and counts of K or of V."""

    def __init__(self) -> None:
        self._minimum = self._maximum = self._counts = torch.empty(0)
        self._tokens = 0

    def add(self, x: Float[Tensor, "batch heads seq dim"]) -> None:
        flat = x.detach().to("cpu", torch.float32).transpose(1, 2).flatten(0, 1)
        heads, dim = flat.shape[1:]
        if not self._tokens:
            self._minimum, self._maximum = flat.amin(0), flat.amax(0)
            self._counts = torch.zeros(heads * dim * 2 * BUCKETS, dtype=torch.int64)
        self._minimum = torch.minimum(self._minimum, flat.amin(0))
        self._maximum = torch.maximum(self._maximum, flat.amax(0))
        size = ((flat.abs().view(torch.int32) >> _SHIFT) - _OFFSET).clamp_(0, BUCKETS - 1).long()
        bucket = torch.where(flat < 0, BUCKETS - 1 - size, BUCKETS + size).flatten(1)
        bucket += torch.arange(heads * dim) * (2 * BUCKETS)
        self._counts += torch.bincount(bucket.flatten(), minlength=self._counts.numel())
        self._tokens += flat.shape[0]

    def finish(self) -> ChannelValues | None:
        if not self._tokens:
            return None
        heads, dim = self._minimum.shape
        return ChannelValues(self._minimum, self._maximum, self._counts.view(heads, dim, 2 * BUCKETS), self._tokens)


class KvWatch:
    """An `Attend` that measures the K and V that it is handed, and leaves the mixing to another.

    `turning` is how many leading channels of K's heads RoPE turns (`models.rope.rotary_dim`).
    """

    def __init__(self, turning: int = 0, attend: Attend | None = None) -> None:
        self._attend, self._turning = attend or CausalAttend(), turning
        self._k, self._v, self._norms = _Channels(), _Channels(), _Channels()

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "batch heads seq dim"],
        k: Float[Tensor, "batch kv seq dim"],
        v: Float[Tensor, "batch kv seq dim"],
        *,
        scale: float,
        window: int | None,
    ) -> Float[Tensor, "batch heads seq dim"]:
        """Attention as the other object computes it."""
        self._k.add(k)
        self._v.add(v)
        if self._turning:
            self._norms.add(torch.hypot(*k[..., : self._turning].float().chunk(2, -1)))
        return self._attend(layer, q, k, v, scale=scale, window=window)

    def finish(self) -> tuple[ChannelValues, ChannelValues] | None:
        """What K and V were; None when no token came by."""
        k, v = self._k.finish(), self._v.finish()
        return None if k is None or v is None else (replace(k, norms=self._norms.finish()), v)


def watched_attention(layer: DecoderLayer, states: HiddenStates, watch: KvWatch) -> Iterator[int]:
    """Show `watch` all windows without running more of the layer than its attention; yields windows done."""
    positions = torch.arange(states.shape[1], device=states.device)[None]
    rotation = rotation_of(layer.arch, positions, states.dtype)
    for number, x in enumerate(states.windows()):
        layer.mix(layer.norm("input_norm", x), rotation, watch, ignore)
        yield number + 1
