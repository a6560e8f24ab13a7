"""Statistics of a layer whose experts see different tokens, some of them few or none.

Routed (the default): each expert's sites are measured on the tokens routed to it. An expert that has seen fewer than 16
tokens a column borrows from all tokens of the layer: an evenly spaced sample of the mixture's inputs, each weighted
with the probability that the router gives the expert, runs through it once more and joins its sums (quant/shrinkage.py
has the formula). So no expert is rounded without statistics, and one that saw three tokens is not solved for those
alone.

Every token (`--moe-all-experts`): every expert is measured on all tokens of the layer, whatever the router says.

In both, what the layer puts out is mixed by the true routing, in the very operations of a plain run: the observer only
looks on, and what it runs besides goes nowhere.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.calibrate.statistics import EvenSample, SiteStatistics, StatisticsCollector
from cann_llm_quant.models.decoder import DecoderLayer, Observe, ignore
from cann_llm_quant.quant.shrinkage import borrowed_hessian

ALL_INPUTS = "experts"
SHARED_ROWS = 4096
ENOUGH_PER_COLUMN = 16


class ExpertCollector:
    """A `StatisticsCollector` for any layer, with the module's rules for the experts of a mixture.

    `layer` is the one whose calls are observed; the sites of experts among `sites` are `experts.N.gate_up` and
    `experts.N.down`.
    """

    def __init__(
        self, layer: DecoderLayer, sites: Iterable[str], *, sample_rows: int = 0, every_token: bool = False
    ) -> None:
        self._layer, self._every_token, self._sample_rows = layer, every_token, sample_rows
        self._sites = tuple(sites)
        self._collector = StatisticsCollector(
            [*self._sites, ALL_INPUTS] if every_token else self._sites, sample_rows=sample_rows
        )
        self._inputs, self._dtype = EvenSample(0 if every_token else SHARED_ROWS), torch.float32
        self._experts = sorted({expert for site in self._sites if (expert := expert_of(site)) is not None})
        moe = layer.layer.moe
        self.routed = [0] * (moe.num_experts if moe is not None else 0)

    def observe(self, site: str, x: Float[Tensor, "tokens in"]) -> None:
        """Add one window's input of a site."""
        if site == ALL_INPUTS:
            self._add_mixture(x)
            return
        expert = expert_of(site)
        if expert is not None and site.endswith("gate_up"):
            self.routed[expert] += x.shape[0]
        if expert is None or not self._every_token:
            self._collector.observe(site, x)

    def finish(self) -> dict[str, SiteStatistics]:
        """Statistics by site, those of experts joined with what they borrow.

        A site is absent only when no token at all came.
        """
        found = self._collector.finish()
        rows = self._inputs.rows()
        if self._every_token:
            everything = found.pop(ALL_INPUTS, None)
            if everything is not None:
                found |= {site: everything for site in self._sites if _is_expert_input(site)}
        elif rows is not None:
            for expert in self._experts:
                found |= self._borrowing(expert, rows, found)
        return {site: self._counted(site, statistics) for site, statistics in found.items()}

    def _counted(self, site: str, statistics: SiteStatistics) -> SiteStatistics:
        expert = expert_of(site)
        return statistics if expert is None else replace(statistics, routed=self.routed[expert])

    def _add_mixture(self, x: Float[Tensor, "tokens in"]) -> None:
        """All tokens of the mixture. Every expert's gate and up read the same, so their sums are made once."""
        if not self._every_token:
            self._dtype = x.dtype
            self._inputs.add(x)
            return
        self._collector.observe(ALL_INPUTS, x)
        for expert in self._experts:
            if f"experts.{expert}.down" in self._sites:
                self._layer.gate(f"experts.{expert}.", x, _only("down", self._collector.observe))

    def _borrowing(
        self, expert: int, rows: Float[Tensor, "rows in"], found: dict[str, SiteStatistics]
    ) -> dict[str, SiteStatistics]:
        """The statistics of an expert's sites that have too few tokens of their own, joined with borrowed ones."""
        prefix = f"experts.{expert}."
        own = {kind: found.get(prefix + kind) for kind in ("gate_up", "down") if prefix + kind in self._sites}
        short = [kind for kind, s in own.items() if s is None or s.tokens < ENOUGH_PER_COLUMN * s.hessian.shape[0]]
        if not short:
            return {}
        x = rows.to(self._dtype)
        chances = torch.softmax(self._layer.linears["router"](x), dim=-1, dtype=torch.float32)[:, expert]
        # All tokens count alike for an expert whose chances are too small for float32.
        weights = chances.clamp(min=torch.finfo(torch.float32).tiny)
        inputs = {"gate_up": rows}
        if "down" in short:
            inputs["down"] = self._layer.gate(prefix, x, ignore).to(torch.float32)
        return {prefix + kind: join(own[kind], inputs[kind], weights, self._sample_rows) for kind in short}


def join(
    own: SiteStatistics | None, rows: Float[Tensor, "rows in"], weights: Float[Tensor, " rows"], sample_rows: int
) -> SiteStatistics:
    """One expert's measured statistics (None: it saw no token) with those of weighted `rows` added.

    `amax` and `sample` stay what was measured; without any they come from the rows of most weight.
    """
    hessian, borrowed = borrowed_hessian(rows, weights)
    share = weights / weights.sum()
    mean_abs = (rows.abs() * share.unsqueeze(1)).sum(0)
    if own is None:
        likely = weights.argsort(descending=True, stable=True)[: max(borrowed, sample_rows)]
        sample = rows[likely[:sample_rows]] if sample_rows else None
        return SiteStatistics(hessian, mean_abs, rows[likely[:borrowed]].abs().amax(0), 0, sample, borrowed)
    total = own.tokens + borrowed
    mean_abs = (own.mean_abs * own.tokens + mean_abs * borrowed) / total
    return SiteStatistics(own.hessian + hessian, mean_abs, own.amax, own.tokens, own.sample, borrowed)


def on_every_token(layer: DecoderLayer, observe: Observe) -> Observe:
    """`observe` made to see every expert of a mixture on all tokens, instead of those routed to it."""
    moe = layer.layer.moe
    experts = range(0 if moe is None else moe.num_experts)

    def look(site: str, x: Tensor) -> None:
        if site == ALL_INPUTS:
            for expert in experts:
                layer.gate(f"experts.{expert}.", x, observe)
        elif expert_of(site) is None:
            observe(site, x)

    return look


def expert_of(site: str) -> int | None:
    """The number in `experts.N.gate_up` and `experts.N.down`; None for other sites."""
    first, _, rest = site.partition(".")
    number, dot, _ = rest.partition(".")
    return int(number) if first == "experts" and dot else None


def _is_expert_input(site: str) -> bool:
    return expert_of(site) is not None and site.endswith("gate_up")


def _only(kind: str, observe: Observe) -> Observe:
    return lambda site, x: observe(site, x) if site.endswith(kind) else None
