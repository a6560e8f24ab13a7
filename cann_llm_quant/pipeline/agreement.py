"""Estimates against measurements: which units to measure, how well both agree, and how estimates are corrected.

Estimates miss what is not of second order within one token: keys that all move the same way turn whole attention
patterns, which under a norm of q and k costs twice what is estimated, while MLPs are right within a few percent. That
is a property of the kind of unit, so each kind (qkv, o, gate_up, down) has a correction of its own, the median of
measured / estimated over its measured units. A mean would let one odd unit speak for all: the down that writes a
model's massive activations costs a quarter of what is estimated, its likes about as much. A unit that was measured
itself is corrected by its own ratio, under every scheme.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from cann_llm_quant.pipeline.units import Unit


def units_to_measure(units: Sequence[Unit], estimates: Mapping[str, float], count: int) -> list[Unit]:
    """`count` units (all there are, if fewer), of every kind the same number or one more, evenly spread over its
    ranking from the most damaged on; `estimates` by unit name.
    """
    kinds: dict[str, list[Unit]] = {}
    for unit in sorted(units, key=lambda unit: -estimates[unit.name]):
        if estimates[unit.name] > 0:
            kinds.setdefault(unit.kind, []).append(unit)
    shares = dict.fromkeys(kinds, 0)
    for _ in range(min(count, sum(map(len, kinds.values())))):
        # kinds come by their worst unit, so that this one has what does not divide evenly
        shares[min((kind for kind in kinds if shares[kind] < len(kinds[kind])), key=shares.__getitem__)] += 1
    return [kinds[kind][i * len(kinds[kind]) // share] for kind, share in shares.items() for i in range(share)]


def corrections(kinds: Sequence[str], estimated: Sequence[float], measured: Sequence[float]) -> dict[str, float]:
    """The factor of each kind that was measured; estimates and measurements of 0 say nothing."""
    ratios: dict[str, list[float]] = {}
    for kind, a, b in zip(kinds, estimated, measured, strict=True):
        if a > 0 and b > 0:
            ratios.setdefault(kind, []).append(b / a)
    return {kind: statistics.median(values) for kind, values in ratios.items()}


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's: the correlation of ranks, equal values sharing their mean rank. None for fewer than three pairs."""
    return _correlation(_ranks(a), _ranks(b))


def log_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Pearson's of the logarithms of the pairs that are both positive. None for fewer than three."""
    pairs = [(math.log(x), math.log(y)) for x, y in zip(a, b, strict=True) if x > 0 and y > 0]
    x, y = torch.tensor(pairs, dtype=torch.float64).view(-1, 2).unbind(1)
    return _correlation(x, y)


def _ranks(values: Sequence[float]) -> Float64[Tensor, " n"]:
    v = torch.tensor(values, dtype=torch.float64)
    return (v[:, None] > v).sum(1).double() + ((v[:, None] == v).sum(1).double() - 1) / 2


def _correlation(a: Tensor, b: Tensor) -> float | None:
    a, b = a - a.mean(), b - b.mean()
    spread = float(a.norm() * b.norm())
    return float(a @ b) / spread if len(a) >= 3 and spread > 0 else None
