"""What quantization multiplied a layer's weights by before it rounded them, found in the stored weights themselves.

AWQ and SmoothQuant divide a site's producer by a factor s for each channel and multiply the columns of its linears by
it; balanced K takes powers of two from the rows of k and gives them to q. A comparison with the source has to undo
both, or it would call every smoothed weight wrong:

    w_out ~ rows * w_source * columns

    producer is a norm      columns s = (offset + gain_source) / (offset + gain_out), exact by how gains are folded
    producer is a linear    rows of v, up: r_i = <w_out_i, w_i> / <w_i, w_i>, and columns of o, down: 1 / r
    q, k                    rows r rounded to powers of two

Factors alone do not tell a fold from damage: what was taken from a gain, or given to a row of v or up, must be found in
the columns of every linear that reads it. With e = rows * w_source * columns, summed over a site's linears, column j of
w_out has

    slope t = <w_out, e> / <e, e>,    noise r = max(|w_out - t e|, median of |w_out - e| over the columns nearby) / |e|

and a gain that is off by itself leaves t where it should be 1. Columns of one group share their steps and so their
noise; where that is loud (r > 0.3) a column tells nothing, as it may have become 0 as a whole, nor does a row of v or
up. In sound outputs |t - 1|
was never more than 1.1 r (docs/verify.md).

The factor of a row is taken for 1 unless the rows' factors spread wider than rounding noise explains. A scale that was
damaged in v or up therefore shows in o or down, whose columns then do not fit.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.export.verify_findings import Findings
from cann_llm_quant.models.arch import Arch, Layer, Producer, Site
from cann_llm_quant.quant.fold import tie_over_repeats

_NOISE = 3.0  # standard deviations
_NEAR = 0.1  # relative distance from a power of two
_TELLING = 0.3  # the noise of a column that is judged
_LEFT = 2.0  # of the noise, how far a slope may be from 1
_NEARBY = 32  # columns
_CAST = 0.02  # the least that is noticed


@dataclass
class LayerFolds:
    """The factors of one layer as its linears are gone through, sites in their order.

    `rows` has those that consumers undo, by role; `by_module` has the factors of any linear. `slopes` has the rows of q
    and k as multiples of the source's, `loud` the rows that noise hides.
    """

    arch: Arch
    layer: Layer
    rows: dict[str, Tensor] = field(default_factory=dict)
    slopes: dict[str, Tensor] = field(default_factory=dict)
    loud: dict[str, Tensor] = field(default_factory=dict)
    by_module: dict[str, Tensor] = field(default_factory=dict)

    def columns(self, site: Site, ours: Checkpoint, source: Checkpoint) -> Float[Tensor, "in"] | None:
        """What the columns of a site's linears were multiplied by; None for nothing."""
        producer = site.producer
        if producer is None:
            return None
        if producer.kind == "norm":
            return self._norm_factor(producer, ours, source)
        rows = self.rows.get(producer.role)
        if rows is None:
            return None
        inverse = 1 / rows
        if producer.repeat == 1:
            return inverse
        return inverse[self._producing_rows(producer)]

    def _norm_factor(self, producer: Producer, ours: Checkpoint, source: Checkpoint) -> Float[Tensor, "in"] | None:
        _, before, after = self._gains(producer, ours, source)
        if torch.equal(before, after):
            return None
        usable = (before != 0) & (after != 0)
        return torch.where(usable, before / torch.where(usable, after, 1.0), 1.0)

    def _gains(self, producer: Producer, ours: Checkpoint, source: Checkpoint) -> tuple[str, Tensor, Tensor]:
        """A norm's name, and its gains with their offset, in the source and in the output."""
        name = next(p.name for p in self.layer.parameters if p.role == producer.role)
        before, after = (self.arch.norm_offset + c.load(name).to(torch.float32) for c in (source, ours))
        return name, before, after

    def check_undone(
        self, site: Site, slopes: "ColumnSlopes", ours: Checkpoint, source: Checkpoint, findings: Findings
    ) -> None:
        """Whether what the producer of a site lost was given to all columns that read it; a fault otherwise."""
        if site.producer is None or slopes.energy is None:
            return
        if site.producer.kind == "norm":
            self._check_gain(site.producer, slopes, ours, source, findings)
        elif site.producer.role in self.rows:
            self._check_rows(site.producer, slopes, findings)

    def _check_gain(
        self, producer: Producer, slopes: "ColumnSlopes", ours: Checkpoint, source: Checkpoint, findings: Findings
    ) -> None:
        name, before, after = self._gains(producer, ours, source)
        if torch.equal(before, after):
            return
        wrong = slopes.off() | ((before == 0) != (after == 0)) | (before.sign() * after.sign() < 0)
        if bool(wrong.any()):
            channel = int(wrong.nonzero()[0])
            findings.add(
                name,
                f"{int(wrong.sum())} of {len(wrong)} gains are neither the source's nor undone by the columns that "
                f"read them (channel {channel}: {float(before[channel]):.4g} became {float(after[channel]):.4g})",
                "the norm or those columns are damaged; write the model again",
            )

    def _check_rows(self, producer: Producer, slopes: "ColumnSlopes", findings: Findings) -> None:
        rows = self.rows[producer.role]
        feeding = torch.arange(len(rows)) if producer.repeat == 1 else self._producing_rows(producer)
        wrong = slopes.off() & ~self.loud[producer.role][feeding]
        if not bool(wrong.any()):
            return
        channel = int(wrong.nonzero()[0])
        row = int(feeding[channel])
        findings.add(
            self.layer.linear(producer.role).module,
            f"rows are {float(rows[row]):.3g} (row {row}) and other multiples of the source's, which "
            f"{int(wrong.sum())} of {len(wrong)} columns that read them do not undo (column {channel})",
            "scales of those rows or codes of those columns are damaged; write the model again",
        )

    def _producing_rows(self, producer: Producer) -> Tensor:
        """The row of v that feeds each column of o."""
        return tie_over_repeats(self.arch.num_kv_heads, producer.repeat, self.arch.head_dim)

    def take_rows(
        self, role: str, out: Float[Tensor, "out in"], expected: Float[Tensor, "out in"]
    ) -> Float[Tensor, "out"] | None:
        """What the rows of a linear were multiplied by, kept for its consumers; None for nothing.

        `expected` is the source's weight with its columns' factor.
        """
        feeds = any(site.producer is not None and site.producer.role == role for site in self.layer.sites)
        if not feeds and role not in ("q", "k"):
            return None
        rows = row_factors(out, expected)
        if role in ("q", "k"):
            # where q and k have norms, their gains take the factor
            normed = any(parameter.role == "k_norm" for parameter in self.layer.parameters)
            rows = None if rows is None or normed else _powers_of_two(rows)
            self.slopes[role] = row_slopes(out, expected)
        if rows is not None:
            self.by_module[self.layer.linear(role).module] = rows
        known = self.slopes.get(role, rows)
        if known is not None:
            self.loud[role] = _row_noise(out, expected, known) > _TELLING
        if rows is not None and feeds:
            self.rows[role] = rows
        return rows

    def check_keys(self, findings: Findings) -> None:
        """Whether q undoes what the rows of k were multiplied by, once both are known; a fault otherwise."""
        modules = {role: self.layer.linear(role).module for role in self.slopes}
        if modules.keys() != {"q", "k"} or not any(module in self.by_module for module in modules.values()):
            return
        keys = tie_over_repeats(
            self.arch.num_kv_heads, self.arch.num_heads // self.arch.num_kv_heads, self.arch.head_dim
        )
        product = self.slopes["q"] * self.slopes["k"][keys]
        wrong = ~self.loud["q"] & ~self.loud["k"][keys] & (product.log2().abs() > 0.5)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            findings.add(
                modules["q"],
                f"{int(wrong.sum())} of {len(wrong)} rows and those of {modules['k']} that they meet are together "
                f"other multiples of the source's than 1 (row {row}: {float(product[row]):.3g})",
                "scales of those rows are damaged; write the model again",
            )


@dataclass
class ColumnSlopes:
    """Sums over the linears of a site, by column, in float64: <w_out, e>, <e, e> and <w_out, w_out>."""

    product: Tensor | None = None
    energy: Tensor | None = None
    stored: Tensor | None = None

    def add(self, out: Float[Tensor, "out in"], expected: Float[Tensor, "out in"]) -> None:
        """One more linear."""
        sums = [(a * b).sum(0, dtype=torch.float64) for a, b in ((out, expected), (expected, expected), (out, out))]
        old = (self.product, self.energy, self.stored)
        self.product, self.energy, self.stored = (n if o is None else o + n for o, n in zip(old, sums, strict=True))

    def off(self) -> Bool[Tensor, "in"]:
        """Columns whose slope is not 1, beyond what noise explains."""
        assert self.product is not None
        assert self.energy is not None
        assert self.stored is not None
        live = self.energy > 0
        energy = torch.where(live, self.energy, 1.0)
        slope = torch.where(live, self.product / energy, 1.0)
        width = _NEARBY if len(energy) % _NEARBY == 0 else len(energy)
        usual = (self.stored - 2 * self.product + self.energy).view(-1, width).median(1).values.repeat_interleave(width)
        noise = (torch.maximum(self.stored - slope * self.product, usual).clamp(min=0) / energy).sqrt()
        return live & (noise < _TELLING) & ((slope - 1).abs() > torch.clamp(_LEFT * noise, min=_CAST))


def row_slopes(out: Float[Tensor, "out in"], expected: Float[Tensor, "out in"]) -> Float[Tensor, "out"]:
    """The positive multiple of each row of `expected` that comes nearest to `out`; 1 where there is none."""
    energy = expected.square().sum(1)
    live = energy > 0
    factor = torch.where(live, (out * expected).sum(1) / torch.where(live, energy, 1.0), 1.0)
    return torch.where(factor > 0, factor, 1.0)


def row_factors(out: Float[Tensor, "out in"], expected: Float[Tensor, "out in"]) -> Float[Tensor, "out"] | None:
    """The rows' slopes; None where noise explains them all."""
    energy = expected.square().sum(1)
    live = energy > 0
    factor = row_slopes(out, expected)
    left = (out - factor.unsqueeze(1) * expected).square().sum(1)
    noise = torch.where(live, left / torch.where(live, energy, 1.0) / expected.shape[1], 0.0)
    spread = (factor - 1).square().mean().sqrt()
    return factor if bool(spread > _NOISE * noise.mean().sqrt()) and bool(spread > 1e-6) else None


def _row_noise(
    out: Float[Tensor, "out in"], expected: Float[Tensor, "out in"], rows: Float[Tensor, "out"]
) -> Float[Tensor, "out"]:
    """What is left of each row of `out` beside its multiple of `expected`, relative to that."""
    scaled = expected * rows.unsqueeze(1)
    left = (out - scaled).square().sum(1)
    return (left / scaled.square().sum(1).clamp(min=torch.finfo(torch.float32).tiny)).sqrt()


def _powers_of_two(rows: Float[Tensor, "out"]) -> Float[Tensor, "out"] | None:
    nearest = torch.exp2(rows.log2().round())
    if bool((nearest == 1).all()) or float(((rows / nearest - 1).abs() > _NEAR).float().mean()) > 0.1:
        return None
    return nearest
