"""AWQ, SmoothQuant or both in one layer: search a factor for every smooth pair, fold it, keep the float function.

Order matters. Pairs whose producer is a linear of the same layer (v→o, up→down) come first, because they change rows
of v and up before those are judged and quantized; pairs whose producer is a norm follow. A norm's new gain is rounded
to its storage type at once, and the linears take the factor that the rounded gain really divides by, so that folding
into a bf16 norm costs nothing. Before the layer is used, one window runs through the float layer before and after: a
relative change above 1e-4 undoes all folds of the layer and is reported.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cann_llm_quant.calibrate.statistics import SiteStatistics
from cann_llm_quant.models.arch import Arch, Layer, Site
from cann_llm_quant.quant.awq import search_scale
from cann_llm_quant.quant.fold import (
    divide_rows,
    multiply_columns,
    rescale_hessian,
    spread_rows,
    stored_norm_gain,
    tie_over_repeats,
)
from cann_llm_quant.quant.scale_search import ScaleResult, ScaleSite, SiteInputs
from cann_llm_quant.quant.scheme import ActivationScheme, Scheme
from cann_llm_quant.quant.smooth import search_migration, search_migration_and_protection
from cann_llm_quant.recipe import Recipe


@dataclass(frozen=True)
class Smoothed:
    """A layer's float32 tensors after folding, statistics of the folded inputs, and each searched site's result.

    `columns` is what the input columns of each folded site's linears were multiplied by, `rows` what the rows of
    linears (by module) were divided by.
    """

    tensors: dict[str, Tensor]
    statistics: dict[str, SiteStatistics]
    searched: dict[str, ScaleResult]
    columns: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)

    def fold(self, module: str, site: str, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
        """A matrix in the place of the source's weight, folded as that was."""
        if site in self.columns:
            weight = multiply_columns(weight, self.columns[site])
        return divide_rows(weight, None, self.rows[module])[0] if module in self.rows else weight


def smooth_layer(
    arch: Arch,
    layer: Layer,
    tensors: dict[str, Tensor],
    statistics: Mapping[str, SiteStatistics],
    schemes: Mapping[str, Scheme],
    storage: Mapping[str, torch.dtype],
    recipe: Recipe,
    activations: Mapping[str, ActivationScheme],
    unfolded: Collection[str] = (),
) -> Smoothed:
    """Search and fold every smooth pair of a layer by the recipe's method, except at the sites `unfolded`.

    `tensors` are float32 by stored name; their entries are replaced, so that one copy of the layer exists; `schemes`
    and `activations` go by module; `storage` is each tensor's stored dtype.
    """
    folded, measured = tensors, dict(statistics)
    searched: dict[str, ScaleResult] = {}
    columns: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    pairs = [s for s in layer.sites if s.producer is not None and s.name in measured]
    for site in sorted(pairs, key=lambda s: s.producer is not None and s.producer.kind == "norm"):
        quantized = [m for m in (layer.linear(role).module for role in site.linears) if m in schemes]
        if not quantized:
            continue
        seen = measured[site.name]
        judged = _judged_site(arch, layer, site, quantized, folded, seen, schemes, storage, recipe, activations)
        if judged.inputs is None and recipe.smoothing == {"smoothquant"}:
            continue
        if site.name in unfolded:
            searched[site.name] = _left_alone(seen, recipe)
            continue
        result = _search(judged, seen, _shared_rows(arch, site), recipe)
        searched[site.name] = result
        if result.rule == "identity":
            continue
        factor = _fold_producer(arch, layer, site, folded, result.factor, storage)
        for role in site.linears:
            name = f"{layer.linear(role).module}.weight"
            folded[name] = multiply_columns(folded[name], factor)
        measured[site.name] = _rescale(measured[site.name], factor)
        columns[site.name] = factor
        if site.producer is not None and site.producer.kind == "linear":
            rows[layer.linear(site.producer.role).module] = _producer_rows(arch, site, factor)
    return Smoothed(folded, measured, searched, columns, rows)


def _judged_site(
    arch: Arch,
    layer: Layer,
    site: Site,
    quantized: list[str],
    tensors: Mapping[str, Tensor],
    statistics: SiteStatistics,
    schemes: Mapping[str, Scheme],
    storage: Mapping[str, torch.dtype],
    recipe: Recipe,
    activations: Mapping[str, ActivationScheme],
) -> ScaleSite:
    """What judges a factor: the quantized linears, and the input's own quantization where there is any."""
    stored = storage[f"{quantized[0]}.weight"]
    dtype = torch.float32 if stored == torch.float64 else stored
    scheme, sample = activations.get(quantized[0]), statistics.sample
    inputs = None
    if scheme is not None and sample is not None:
        inputs = SiteInputs(scheme, sample, statistics.amax, statistics.evidence)
    return ScaleSite(
        [tensors[f"{module}.weight"] for module in quantized],
        statistics.hessian,
        [schemes[module] for module in quantized],
        dtype,
        dtype,
        "mse" if recipe.clipping else "minmax",
        _producer_max(arch, layer, site, tensors),
        inputs,
    )


def _search(site: ScaleSite, statistics: SiteStatistics, tie: Int[Tensor, " in"] | None, recipe: Recipe) -> ScaleResult:
    tie = None if tie is None else tie.to(statistics.hessian.device)
    if recipe.smoothing == {"awq"}:
        return search_scale(site, statistics.mean_abs, tie=tie, effort=recipe.effort)
    if recipe.smoothing == {"smoothquant"}:
        return search_migration(site, alpha=recipe.smooth_alpha, tie=tie, effort=recipe.effort)
    return search_migration_and_protection(site, statistics.mean_abs, tie=tie, effort=recipe.effort)


def _left_alone(statistics: SiteStatistics, recipe: Recipe) -> ScaleResult:
    """No factor, which is said where the user gave its exponent."""
    alpha, reason = recipe.smooth_alpha, ""
    if alpha is not None:
        reason = f"alpha {alpha:g} would leave a linear worse than plain rounding"
    return ScaleResult(torch.ones_like(statistics.amax), math.nan, math.nan, "identity", 0.0, reason)


def _producer_max(arch: Arch, layer: Layer, site: Site, tensors: Mapping[str, Tensor]) -> Float[Tensor, " in"]:
    """Largest magnitude that the producer stores for each channel of the site's input."""
    producer = site.producer
    assert producer is not None
    if producer.kind == "norm":
        return (arch.norm_offset + tensors[_parameter(layer, producer.role)]).abs()
    module = layer.linear(producer.role).module
    rows = tensors[f"{module}.weight"].abs().amax(1)
    if f"{module}.bias" in tensors:
        rows = torch.maximum(rows, tensors[f"{module}.bias"].abs())
    tie = _shared_rows(arch, site)
    return rows if tie is None else rows[tie.to(rows.device)]


def _parameter(layer: Layer, role: str) -> str:
    return next(p.name for p in layer.parameters if p.role == role)


def _shared_rows(arch: Arch, site: Site) -> Int[Tensor, " in"] | None:
    """For each input channel the producer row that feeds it, where one row feeds several channels."""
    producer = site.producer
    if producer is None or producer.repeat == 1:
        return None
    return tie_over_repeats(arch.num_kv_heads, producer.repeat, arch.head_dim)


def _fold_producer(
    arch: Arch,
    layer: Layer,
    site: Site,
    tensors: dict[str, Tensor],
    factor: Float[Tensor, " in"],
    storage: Mapping[str, torch.dtype],
) -> Float[Tensor, " in"]:
    """Divide the producer by the factor, in `tensors`; returns the factor that the linears must be multiplied by."""
    producer = site.producer
    assert producer is not None
    if producer.kind == "norm":
        name = _parameter(layer, producer.role)
        stored, divided = stored_norm_gain(tensors[name], factor, arch.norm_offset, storage[name])
        tensors[name] = stored.to(torch.float32)
        return divided
    module = layer.linear(producer.role).module
    rows = _producer_rows(arch, site, factor)
    bias = tensors.get(f"{module}.bias")
    tensors[f"{module}.weight"], scaled_bias = divide_rows(tensors[f"{module}.weight"], bias, rows)
    if scaled_bias is not None:
        tensors[f"{module}.bias"] = scaled_bias
    return factor


def _producer_rows(arch: Arch, site: Site, factor: Float[Tensor, " in"]) -> Float[Tensor, " rows"]:
    """The factor of every row of the linear that produces the site's input."""
    tie = _shared_rows(arch, site)
    return factor if tie is None else spread_rows(factor, tie.to(factor.device))


def _rescale(statistics: SiteStatistics, factor: Float[Tensor, " in"]) -> SiteStatistics:
    return replace(
        statistics,
        hessian=rescale_hessian(statistics.hessian, factor),
        mean_abs=statistics.mean_abs / factor,
        amax=statistics.amax / factor,
        sample=None if statistics.sample is None else statistics.sample / factor,
    )
