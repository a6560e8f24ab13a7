"""One decoder layer by error feedback: smooth, then walk through it site by site, solving each on what it really gets.

See calibrate/stages.py for the walk and quant/drift.py for what a site aims at. The layer that walks is the one that is
stored: norms and linears kept in float are rounded to their stored type before anything is measured.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cann_llm_quant.calibrate.input_samples import InputSample, SampleCollector
from cann_llm_quant.calibrate.input_sketches import SketchCollector
from cann_llm_quant.calibrate.moments import SiteMoments
from cann_llm_quant.calibrate.stages import StagedLayer
from cann_llm_quant.export import native
from cann_llm_quant.models.arch import Layer
from cann_llm_quant.models.decoder import DecoderLayer, DenseLinear, Observe
from cann_llm_quant.models.quantized_input import QuantizedInputLinear
from cann_llm_quant.pipeline.input_ranges import (
    inputs_of_sites,
    range_observer,
    sites_with_quantized_inputs,
    sites_with_ranges,
)
from cann_llm_quant.pipeline.layer import LayerResult, linear_entry
from cann_llm_quant.pipeline.layer_tensors import layer_schemes, storage_dtypes
from cann_llm_quant.pipeline.linear import SolvedLinear, fused_amax, linear_inputs
from cann_llm_quant.pipeline.measure import SAMPLE_ROWS, trusted_moments
from cann_llm_quant.pipeline.prepare import Job
from cann_llm_quant.pipeline.site import FloatLinear, solve_site
from cann_llm_quant.pipeline.smoothing import Smoothed
from cann_llm_quant.pipeline.tuning import can_tune, tune_layer
from cann_llm_quant.quant import rtn
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.grid import choose_scale_dtype
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme


class FeedbackLayer:
    """Collects a layer's result while its sites are solved one after another.

    `source` are the layer's float32 tensors, `smoothed` the same after folding (the very same where nothing was
    folded); `running` is the layer that walks, whose linears are replaced.
    """

    def __init__(
        self, job: Job, layer: Layer, source: Mapping[str, Tensor], smoothed: Smoothed, running: DecoderLayer
    ) -> None:
        self._job, self._layer, self._source, self._smoothed, self._running = job, layer, source, smoothed, running
        self._schemes, self._storage = layer_schemes(job, layer), storage_dtypes(job, layer)
        self._largest = fused_amax(layer, self._schemes, source)
        self._folded_largest = fused_amax(layer, self._schemes, smoothed.tensors)
        self._weights: dict[str, QuantizedTensor] = {}
        self._linears: dict[str, dict[str, Any]] = {}
        self._warnings: tuple[str, ...] = ()
        self._inputs: dict[str, InputQuantizer] = {}
        self._ranges: dict[str, Tensor] = {}
        self._stage, self._sketches, self._samples = "", SketchCollector([]), SampleCollector([], 0)
        self._seen: dict[str, InputSample] = {}
        self.tuned = False

    def observer(self, stage: str) -> Observe:
        """What looks at the inputs of a stage's sites: for the ranges that are stored of them, and to judge those."""
        self._stage = stage
        self._sketches = SketchCollector(s for s in sites_with_ranges(self._job, self._layer) if s.endswith(stage))
        quantized = sites_with_quantized_inputs(self._job, self._layer)
        self._samples = SampleCollector((s for s in quantized if s.endswith(stage)), SAMPLE_ROWS)
        return range_observer(self._job, self._running, self._sketches, self._samples)

    def solve(self, staged: StagedLayer) -> LayerResult:
        """Walk the layer and solve every site; returns what is stored and recorded."""
        for measured in staged.sites():
            self._settle_inputs()
            for site, moments in measured.items():
                self._solve_site(site, moments)
        self.tuned = self._tune(staged)
        kept = {n: t for n, t in self._smoothed.tensors.items() if n.removesuffix(".weight") not in self._schemes}
        stored = {name: tensor.to(self._storage[name]) for name, tensor in kept.items()} | self._ranges
        for module in self._schemes:
            stored |= native.encode(module, self._weights[module], self._job.assignment.activations.get(module))
        linears = {module: self._linears[module] for module in self._schemes}
        record = {"kept": len(kept), "linears": linears, "warnings": list(self._warnings)}
        return LayerResult(stored, {}, record)

    def _settle_inputs(self) -> None:
        """How the linears of the stage just measured quantize their inputs."""
        sites = [site.name for site in self._layer.sites if site.name.endswith(self._stage)]
        inputs = inputs_of_sites(self._job, self._layer, sites, self._sketches.finish())
        self._seen |= self._samples.finish()
        self._inputs |= inputs.quantizers
        self._ranges |= inputs.stored()
        self._warnings += inputs.warnings

    def _tune(self, staged: StagedLayer) -> bool:
        """Tune the solved layer where the recipe asks for it; whether anything changed.

        The recipe and `prepare` have seen to it that a float model walks along and that inputs stay in float.
        """
        steps = self._job.recipe.tuning_steps
        if not steps:
            return False
        modules = {self._role(module): module for module, weight in self._weights.items() if can_tune(weight)}
        gains = {parameter.role: parameter.name for parameter in self._layer.parameters}
        tuned = tune_layer(
            self._running,
            {role: self._weights[module] for role, module in modules.items()},
            {role: self._storage[name] for role, name in gains.items()},
            staged.pair,
            staged.windows,
            steps=steps,
            seed=self._job.recipe.calibration.seed + self._layer.index,
            step=staged.step,
        )
        if tuned is None:
            return False
        for role, weight in tuned.weights.items():
            self._weights[modules[role]] = weight
            self._run_with(role, weight)
        for role, gain in tuned.gains.items():
            self._smoothed.tensors[gains[role]] = gain.to(torch.float32)
            _entries(self._running.parameters)[role] = gain.to(self._job.device, self._job.dtype)
        return True

    def _role(self, module: str) -> str:
        return next(spec.role for spec in self._layer.linears if spec.module == module)

    def _solve_site(self, site: str, moments: SiteMoments) -> None:
        roles = next(s.linears for s in self._layer.sites if s.name == site)
        modules = {self._layer.linear(role).module: role for role in roles}
        linears = {
            module: self._float_linear(module, site, self._schemes[module])
            for module in modules
            if module in self._schemes
        }
        if not linears:
            return
        recipe = self._job.recipe
        trusted = trusted_moments(f"layer {self._layer.index}, {site}", moments)
        solved = solve_site(linears, trusted, recipe.effort_plan, clip=recipe.clipping)
        self._warnings += solved.warnings
        for module, linear in solved.linears.items():
            own, plain = self._input_errors(module, site)
            judged = SolvedLinear(linear.weight, None if linear.error is None else linear.error + own)
            self._take(modules[module], module, judged, solved.plain[module] + plain, moments)

    def _float_linear(self, module: str, site: str, scheme: Scheme) -> FloatLinear:
        name = f"{module}.weight"
        source, folded = self._source[name], self._smoothed.tensors[name]
        scale_dtype = choose_scale_dtype(source, scheme, self._storage[name])
        plain = rtn.solve(source, scheme, scale_dtype, amax=self._largest.get(module)).dequantize()
        folded_dtype = choose_scale_dtype(folded, scheme, self._storage[name])
        amax = self._folded_largest.get(module)
        return FloatLinear(folded, self._smoothed.fold(module, site, plain), scheme, folded_dtype, amax)

    def _input_errors(self, module: str, site: str) -> tuple[float, float]:
        """What quantizing the linear's input costs (see `linear_inputs`), and what it would cost had nothing folded."""
        assignment, seen = self._job.assignment, self._seen.get(site)
        scheme, wanted = assignment.activations.get(module), assignment.ranges.get(module)
        inputs = linear_inputs(seen, scheme, wanted)
        if inputs is None or seen is None:
            return 0.0, 0.0
        weight, factor = self._smoothed.tensors[f"{module}.weight"], self._smoothed.columns.get(site)
        own = inputs.relative_error(weight)
        before = None if factor is None else linear_inputs(seen.multiplied(factor), scheme, wanted)
        return own, own if before is None or factor is None else before.relative_error(weight / factor)

    def _take(self, role: str, module: str, linear: SolvedLinear, plain: float, moments: SiteMoments) -> None:
        self._weights[module] = linear.weight
        self._linears[module] = linear_entry(linear, plain, moments)
        self._run_with(role, linear.weight)

    def _run_with(self, role: str, weight: QuantizedTensor) -> None:
        old = self._running.linears[role]
        bias = old.bias if isinstance(old, DenseLinear) else None
        dense = weight.dequantize().to(self._job.device, self._job.dtype)
        inputs = self._inputs.get(self._layer.linear(role).module)
        _entries(self._running.linears)[role] = (
            DenseLinear(dense, bias) if inputs is None else QuantizedInputLinear(DenseLinear(dense), inputs, bias)
        )


def _entries(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The running layer's own dict, in which parts are replaced while it walks."""
    assert isinstance(mapping, dict)
    return mapping


def stored_precision(
    tensors: Mapping[str, Tensor], schemes: Mapping[str, Scheme], storage: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """The layer's float32 tensors with all that is not quantized rounded to its stored type."""
    return {
        name: tensor if name.removesuffix(".weight") in schemes else tensor.to(storage[name]).to(torch.float32)
        for name, tensor in tensors.items()
    }
