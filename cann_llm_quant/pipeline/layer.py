"""One decoder layer from float to codes: smooth, check, solve each linear, and say how much each lost."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.calibrate.moments import SiteMoments
from cann_llm_quant.calibrate.statistics import SiteStatistics
from cann_llm_quant.calibrate.stream import run_layer
from cann_llm_quant.export import native
from cann_llm_quant.models.arch import Arch, Layer
from cann_llm_quant.models.weights import build_layer
from cann_llm_quant.pipeline.linear import (
    SolvedLinear,
    fused_amax,
    linear_inputs,
    rounding_error,
    sites_to_unfold,
    solve_linear,
)
from cann_llm_quant.pipeline.smoothing import Smoothed, smooth_layer
from cann_llm_quant.quant.scale_search import SiteInputs
from cann_llm_quant.quant.scheme import ActivationScheme, Scheme
from cann_llm_quant.recipe import ActivationFormat, Recipe

FOLD_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Inputs:
    """How linears quantize their inputs, by module: the schemes, and how the ranges are measured that are stored."""

    schemes: Mapping[str, ActivationScheme]
    ranges: Mapping[str, ActivationFormat]

    def of(self, module: str, seen: SiteStatistics | None) -> SiteInputs | None:
        """What judges the quantization of one linear's input."""
        return linear_inputs(seen, self.schemes.get(module), self.ranges.get(module))


@dataclass(frozen=True)
class LayerResult:
    """`stored` goes to the file; `running` is the same layer as float32 tensors for the next activations.

    `record` is JSON.
    """

    stored: dict[str, Tensor]
    running: dict[str, Tensor]
    record: dict[str, Any]


def quantize_layer(
    arch: Arch,
    layer: Layer,
    load: Callable[[], dict[str, Tensor]],
    statistics: Mapping[str, SiteStatistics],
    schemes: Mapping[str, Scheme],
    storage: Mapping[str, torch.dtype],
    recipe: Recipe,
    inputs: Inputs,
    probe: Float[Tensor, "1 seq hidden"] | None,
) -> LayerResult:
    """Quantize one layer. `load` reads its float32 tensors by stored name; one copy of them is held at any time.

    `schemes` go by module, `storage` is each tensor's stored dtype. `probe` is one window of the layer's input, for the
    check that folding left the float function alone (None: the method reads no activations). Sites whose factor leaves
    a linear worse than plain rounding are done again without it.
    """
    tensors = load()
    plain = _rounding_errors(layer, tensors, statistics, schemes, storage, inputs)
    unfolded: set[str] = set()
    while True:
        smoothed = Smoothed(tensors, dict(statistics), {})
        warnings: tuple[str, ...] = ()
        if recipe.smoothing and probe is not None:
            smoothed, warnings = smooth_checked(
                arch, layer, tensors, load, statistics, schemes, storage, recipe, inputs.schemes, probe, unfolded
            )
        result = _solved(layer, smoothed, schemes, storage, recipe, inputs, plain)
        worse = sites_to_unfold(layer, smoothed.columns, result.record["linears"])
        if not worse:
            break
        unfolded |= worse
        tensors = load()
    linears = result.record["linears"]
    warnings += unsmoothed(layer, smoothed) + (() if probe is None else unseen(layer, linears))
    result.record["warnings"] += warnings
    return result


def _rounding_errors(
    layer: Layer,
    tensors: Mapping[str, Tensor],
    statistics: Mapping[str, SiteStatistics],
    schemes: Mapping[str, Scheme],
    storage: Mapping[str, torch.dtype],
    inputs: Inputs,
) -> dict[str, float | None]:
    """What plain rounding of the source costs each linear, by module."""
    largest, site_of = fused_amax(layer, schemes, tensors), layer.site_names()
    errors = {}
    for module, scheme in schemes.items():
        name, site = f"{module}.weight", statistics.get(site_of[module])
        errors[module] = rounding_error(
            tensors[name], scheme, storage[name], site, largest.get(module), inputs.of(module, site)
        )
    return errors


def _solved(
    layer: Layer,
    smoothed: Smoothed,
    schemes: Mapping[str, Scheme],
    storage: Mapping[str, torch.dtype],
    recipe: Recipe,
    inputs: Inputs,
    plain: Mapping[str, float | None],
) -> LayerResult:
    """Every linear solved, its float tensor dropped from `smoothed`; no warnings yet."""
    stored: dict[str, Tensor] = {}
    running: dict[str, Tensor] = {}
    linears: dict[str, Any] = {}
    largest, site_of = fused_amax(layer, schemes, smoothed.tensors), layer.site_names()
    for module, scheme in schemes.items():
        name, site = f"{module}.weight", smoothed.statistics.get(site_of[module])
        solved = solve_linear(
            smoothed.tensors.pop(name),
            scheme,
            storage[name],
            site,
            clip=recipe.clipping,
            rtn_error=plain[module],
            amax=largest.get(module),
            rows=smoothed.rows.get(module),
            inputs=inputs.of(module, site),
        )
        running[name] = solved.weight.dequantize()
        stored |= native.encode(module, solved.weight, inputs.schemes.get(module))
        linears[module] = linear_entry(solved, plain[module], site)
    for name, tensor in smoothed.tensors.items():
        stored[name] = tensor.to(storage[name])
        running[name] = stored[name].to(torch.float32)
    record = {"kept": len(smoothed.tensors), "linears": linears, "warnings": []}
    return LayerResult(stored, running, record)


def linear_entry(
    solved: SolvedLinear, rtn_error: float | None, seen: SiteStatistics | SiteMoments | None
) -> dict[str, Any]:
    """What is recorded of a linear; errors are relative, of plain rounding and of what was chosen."""
    return {
        "rtn_error": _nine_digits(rtn_error),
        "error": _nine_digits(solved.error),
        "tokens": None if seen is None else seen.tokens,
        "borrowed": 0 if seen is None else seen.borrowed,
        "routed": None if seen is None else seen.routed,
        "scale_dtype": str(solved.weight.scale.dtype).removeprefix("torch."),
    }


def _nine_digits(value: float | None) -> float | None:
    """Digits behind these depend on how a sum was split over threads, and the record goes into the output."""
    return None if value is None else float(f"{value:.9g}")


def unsmoothed(layer: Layer, smoothed: Smoothed) -> tuple[str, ...]:
    """Sites that got no factor for want of a candidate (C03, C08), each with the reason."""
    found = smoothed.searched.items()
    return tuple(f"layer {layer.index}, {site}: not scaled, {result.reason}" for site, result in found if result.reason)


def unseen(layer: Layer, linears: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Experts that nothing was routed to are solved for other tokens; that is a result, so it is said."""
    roles = {spec.module: spec.role for spec in layer.linears}
    unseen = {roles[module].split(".")[1] for module, entry in linears.items() if entry["tokens"] == 0}
    if layer.moe is None or not unseen:
        return ()
    count = f"{len(unseen)} of {layer.moe.num_experts} experts"
    return (f"layer {layer.index}: {count} saw no calibration token; they are solved for what other experts saw",)


def smooth_checked(
    arch: Arch,
    layer: Layer,
    tensors: dict[str, Tensor],
    load: Callable[[], dict[str, Tensor]],
    statistics: Mapping[str, SiteStatistics],
    schemes: Mapping[str, Scheme],
    storage: Mapping[str, torch.dtype],
    recipe: Recipe,
    activations: Mapping[str, ActivationScheme],
    probe: Float[Tensor, "1 seq hidden"],
    unfolded: Collection[str] = (),
) -> tuple[Smoothed, tuple[str, ...]]:
    """Fold the method's factors into `tensors`, except at the sites `unfolded`.

    Undone, with a warning, when the float layer's output moves.
    """
    x = probe.to(torch.float32)
    before = next(run_layer(build_layer(arch, layer.index, tensors), iter([x]), layer.index)) - x
    smoothed = smooth_layer(arch, layer, tensors, statistics, schemes, storage, recipe, activations, unfolded)
    after = next(run_layer(build_layer(arch, layer.index, smoothed.tensors), iter([x]), layer.index)) - x
    change = float((after - before).abs().max()) / max(float(before.abs().max()), torch.finfo(torch.float32).tiny)
    if change <= FOLD_TOLERANCE:
        return smoothed, ()
    warning = (
        f"layer {layer.index}: folding scaling factors changed the float layer's output by {change:.1e}; "
        "the layer was quantized without them"
    )
    return Smoothed(load(), dict(statistics), {}), (warning,)
