"""SmoothQuant (Xiao et al. 2022, arXiv:2211.10438): outliers migrate from activations to weights; alone or with AWQ.

Candidates for the factor s of a site, per channel, with x = max |x| over the calibration tokens and m = max |W|:

    smoothquant      x^alpha / m^(1-alpha)                        alpha on a grid, or given
    both balanced    the factor that balances what rounding the weights and what quantizing the inputs costs, to powers
                     (balance.py with a term for either)
    mixed            smoothquant^(1-r) * activation-aware^r       of the best of both rules

`search_migration` tries the first, `search_migration_and_protection` all of them and AWQ's own: one search on one
objective, the rounding error of the weights through the Gram matrix plus the quantization error of the inputs on sample
rows (scale_search.py). AWQ after a migration is what `mixed` is, for (a / s)^r s = a^r s^(1-r).

Factors are brought to sqrt(max * min) = 1, which changes neither term. Dead channels, which carry nothing or which no
weight reads, keep the factor 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cann_llm_quant.quant.awq import awq_candidates, balanced_candidates, steps_of, weight_terms
from cann_llm_quant.quant.balance import RangeTerm, class_mean
from cann_llm_quant.quant.scale_search import (
    Candidate,
    Channels,
    ScaleResult,
    ScaleSite,
    SearchEffort,
    SiteInputs,
    best_scale,
    ranked,
)

_TENTHS = tuple(i / 10 for i in range(11))
_ALPHAS = {"fast": _TENTHS[3:10], "balanced": _TENTHS, "best": _TENTHS}
_HYBRID_ALPHAS = {"fast": (0.5, 0.7, 0.9), "balanced": _TENTHS[3:10], "best": _TENTHS}
_MIXES = (0.25, 0.5, 0.75)
_RANKING_ROWS = 128


def search_migration(
    site: ScaleSite, *, alpha: float | None = None, tie: Int[Tensor, "in"] | None = None, effort: SearchEffort = "fast"
) -> ScaleResult:
    """SmoothQuant's factor for one site, its alpha searched on a grid of tenths or given.

    `tie` gives each channel a class whose members share the factor. The factor is 1 where no alpha helps; the result's
    `reason` says so of a given one. Raises ValueError when the site's inputs are not quantized.
    """
    inputs = _required(site)
    channels = Channels.of(inputs.amax, site.column_max(), tie)
    alphas = _ALPHAS[effort] if alpha is None else (alpha,)
    found = best_scale(site, list(migration_candidates(site, channels, alphas)), effort)
    if alpha is not None and found.rule == "identity" and not found.reason:
        return replace(found, reason=f"alpha {alpha:g} would not lower its error")
    return found


def search_migration_and_protection(
    site: ScaleSite,
    mean_abs: Float[Tensor, "in"],
    *,
    tie: Int[Tensor, "in"] | None = None,
    effort: SearchEffort = "fast",
) -> ScaleResult:
    """The best of SmoothQuant's factors, AWQ's and what lies between; AWQ's alone where inputs stay in float.

    The effort `fast` leaves out `mixed`, which hardly ever wins over `both balanced`.
    """
    channels = Channels.of(mean_abs.to(torch.float32), site.column_max(), tie)
    protections = list(awq_candidates(site, channels, mean_abs, effort))
    if site.inputs is None:
        return best_scale(site, protections, effort)
    migrations = list(migration_candidates(site, channels, _HYBRID_ALPHAS[effort]))
    both = list(jointly_balanced_candidates(site, channels))
    mixed = [] if effort == "fast" else list(mixed_candidates(site, channels, migrations, protections))
    return best_scale(site, [*protections, *migrations, *both, *mixed], effort)


def migration_candidates(site: ScaleSite, channels: Channels, alphas: Sequence[float]) -> Iterator[Candidate]:
    """SmoothQuant's rule for every alpha."""
    log_x, log_m = channels.log(_required(site).amax), channels.log(site.column_max())
    for alpha in alphas:
        yield Candidate("smoothquant", alpha, channels.factor(alpha * log_x - (1 - alpha) * log_m))


def jointly_balanced_candidates(site: ScaleSite, channels: Channels) -> Iterator[Candidate]:
    """Powers of the factor that balances both kinds of error; none for inputs whose errors follow no range."""
    inputs = _required(site)
    steps = steps_of(inputs.scheme.dtype)
    if not steps or not inputs.sample.shape[0]:
        return
    term = _input_term(site, inputs, steps)
    start = channels.log(inputs.amax) - channels.log(site.column_max())
    start = class_mean(0.5 * start, channels.live, channels.classes)
    yield from balanced_candidates("both balanced", [*weight_terms(site), term], channels, start)


def _input_term(site: ScaleSite, inputs: SiteInputs, steps: int) -> RangeTerm:
    """What quantizing the inputs costs, for balance.py: one range a row or group of it, or one for all rows."""
    pairs = zip(site.weights, site.row_weights, strict=True)
    energy = torch.stack([weight * w.square().sum(0) for w, weight in pairs]).sum(0)
    if inputs.scheme.strategy == "tensor":
        return RangeTerm(inputs.amax.unsqueeze(0), len(energy), energy, inputs.tokens / steps**2, divided=True)
    rows = inputs.sample.to(torch.float32)
    width = inputs.scheme.group_size or len(energy)
    return RangeTerm(rows, width, energy, inputs.tokens / rows.shape[0] / steps**2, divided=True)


def mixed_candidates(
    site: ScaleSite, channels: Channels, migrations: list[Candidate], protections: list[Candidate]
) -> Iterator[Candidate]:
    """Geometric means of the migration and the protection that are best alone, by a quick look."""
    some = site.strided(_RANKING_ROWS)
    migration, protection = (ranked(some, rules, "quick")[0] for rules in (migrations, protections))
    for r in _MIXES:
        log = (1 - r) * migration.factor.log() + r * protection.factor.log()
        yield Candidate("mixed", r, channels.factor(log))


def _required(site: ScaleSite) -> SiteInputs:
    if site.inputs is None:
        raise ValueError("a migration needs inputs that are quantized")
    return site.inputs
