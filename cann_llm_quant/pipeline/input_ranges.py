"""How a layer's linears quantize their inputs: dynamic schemes as they are, static ones with ranges from sketches.

An expert that few tokens reached has seen too little of what it will be given: its range is that of all experts of the
layer together, which read the same normalized states (gate, up) or values of the same kind (down). Where every expert
is measured on every token, each has a range of its own. No range is ever a placeholder (C52).
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cann_llm_quant.calibrate.experts import expert_of, on_every_token
from cann_llm_quant.calibrate.input_samples import SampleCollector
from cann_llm_quant.calibrate.input_sketches import SketchCollector
from cann_llm_quant.calibrate.stream import HiddenStates, run_layer
from cann_llm_quant.errors import NumericError
from cann_llm_quant.export.native_inputs import encode_range
from cann_llm_quant.models.arch import Layer
from cann_llm_quant.models.decoder import DecoderLayer, Observe
from cann_llm_quant.pipeline.layer_tensors import build_running, storage_dtypes
from cann_llm_quant.pipeline.prepare import Job
from cann_llm_quant.quant.activation_ranges import static_range
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.value_sketch import ValueSketch, merged

FEW_TOKENS = 128


@dataclass(frozen=True)
class LayerInputs:
    """How linears quantize their inputs, by module; what of it is stored; what the user should know."""

    quantizers: dict[str, InputQuantizer]
    warnings: tuple[str, ...] = ()

    def stored(self) -> dict[str, Tensor]:
        """The ranges' tensors by full name."""
        tensors: dict[str, Tensor] = {}
        for module, inputs in self.quantizers.items():
            if inputs.fixed is not None:
                tensors |= encode_range(module, inputs.scheme, inputs.fixed)
        return tensors


def sites_with_ranges(job: Job, layer: Layer) -> list[str]:
    """Sites whose values must be sketched: some linear of theirs stores a range of its input."""
    ranges = job.assignment.ranges
    return [site.name for site in layer.sites if any(layer.linear(role).module in ranges for role in site.linears)]


def sites_with_quantized_inputs(job: Job, layer: Layer) -> list[str]:
    """Sites some linear of which quantizes its input."""
    schemes = job.assignment.activations
    return [site.name for site in layer.sites if any(layer.linear(role).module in schemes for role in site.linears)]


def measured_inputs(
    job: Job, layer: Layer, running: Mapping[str, Tensor], states: HiddenStates | None, step: Callable[[], None]
) -> LayerInputs:
    """The inputs of a layer whose weights are quantized already; `running` are its float32 tensors by name.

    All windows run through it once, with inputs in float, where a range must be measured.
    """
    collector = SketchCollector(sites_with_ranges(job, layer))
    if states is not None and sites_with_ranges(job, layer):
        built = build_running(job, layer, running)
        observe = range_observer(job, built, collector)
        for _ in run_layer(built, states.windows(), layer.index, observe):
            step()
    return inputs_of_sites(job, layer, [site.name for site in layer.sites], collector.finish())


def range_observer(job: Job, running: DecoderLayer, *collectors: SketchCollector | SampleCollector) -> Observe:
    """What shows collectors the sites' inputs, those of experts on every token where the recipe asks for that."""

    def show(site: str, x: Tensor) -> None:
        for collector in collectors:
            collector.observe(site, x)

    return on_every_token(running, show) if job.recipe.moe_all_experts else show


def inputs_of_sites(job: Job, layer: Layer, sites: Collection[str], sketches: Mapping[str, ValueSketch]) -> LayerInputs:
    """The inputs of the linears of these sites; `sketches` are those of all sites of their kinds.

    Raises NumericError naming the site when values to take a range of are not finite.
    """
    storage = storage_dtypes(job, layer)
    quantizers: dict[str, InputQuantizer] = {}
    shared: set[str] = set()
    for site in (site for site in layer.sites if site.name in sites):
        modules = [layer.linear(role).module for role in site.linears]
        for module in (module for module in modules if module in job.assignment.activations):
            if module not in job.assignment.ranges:
                quantizers[module] = InputQuantizer(job.assignment.activations[module])
                continue
            sketch = sketches.get(site.name)
            if _too_few(job, site.name, sketch):
                sketch = merged(_siblings(site.name, sketches))
                shared.add(site.name.split(".")[1])
            if sketch is None:
                raise ValueError(f"layer {layer.index}: site {site.name} was never observed")
            quantizers[module] = _stored(job, layer, site.name, module, sketch, storage[f"{module}.weight"])
    return LayerInputs(quantizers, _warnings(layer, shared))


def _too_few(job: Job, site: str, sketch: ValueSketch | None) -> bool:
    """Whether an expert's own values are too few for a range; on every token there are no more to be had."""
    if expert_of(site) is None or job.recipe.moe_all_experts:
        return False
    return sketch is None or sketch.tokens < FEW_TOKENS


def _stored(
    job: Job, layer: Layer, site: str, module: str, sketch: ValueSketch, storage: torch.dtype
) -> InputQuantizer:
    scheme, wanted = job.assignment.activations[module], job.assignment.ranges[module]
    dtype = torch.float32 if storage == torch.float64 else storage
    try:
        fixed = static_range(sketch, scheme, wanted.range, percentile=wanted.percentile, dtype=dtype)
    except NumericError as error:
        raise NumericError(f"layer {layer.index}, {site}: {error}; use --dtype fp32 or bf16") from error
    return InputQuantizer(scheme, fixed)


def _siblings(site: str, sketches: Mapping[str, ValueSketch]) -> list[ValueSketch]:
    """Sketches of the same site of every expert that saw a token."""
    kind = site.split(".")[-1]
    return [sketch for name, sketch in sketches.items() if name.startswith("experts.") and name.endswith(f".{kind}")]


def _warnings(layer: Layer, shared: set[str]) -> tuple[str, ...]:
    if not shared or layer.moe is None:
        return ()
    count = f"{len(shared)} of {layer.moe.num_experts} experts"
    return (
        f"layer {layer.index}: {count} saw fewer than {FEW_TOKENS} calibration tokens; "
        "the stored ranges of their inputs are those of all experts together",
    )
