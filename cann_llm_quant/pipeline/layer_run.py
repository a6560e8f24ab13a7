"""One layer of a run: measured, solved and left behind, with the activations passed on to the next."""

from functools import partial
from typing import Protocol, runtime_checkable

from torch import Tensor

from cann_llm_quant.calibrate.stages import StagedLayer
from cann_llm_quant.calibrate.state_store import StateStore
from cann_llm_quant.checkpoint.writer import CheckpointWriter
from cann_llm_quant.models.arch import Layer
from cann_llm_quant.pipeline.feedback import FeedbackLayer, stored_precision
from cann_llm_quant.pipeline.input_ranges import measured_inputs, sites_with_ranges
from cann_llm_quant.pipeline.layer import LayerResult, quantize_layer, smooth_checked, unseen, unsmoothed
from cann_llm_quant.pipeline.layer_tensors import (
    build_running,
    layer_schemes,
    load_float,
    quantized_sites,
    storage_dtypes,
)
from cann_llm_quant.pipeline.measure import measure
from cann_llm_quant.pipeline.prepare import Job
from cann_llm_quant.pipeline.request import Stage
from cann_llm_quant.pipeline.smoothing import Smoothed
from cann_llm_quant.pipeline.states import Streams


@runtime_checkable
class Passes(Protocol):
    """Counts passes of one window through one layer; a message is a warning."""

    def __call__(self, stage: Stage, passes: int = 1, message: str | None = None) -> None:
        """`passes` more are done."""
        ...


def layer_passes(job: Job, layer: Layer) -> int:
    """How many passes `quantize_one` will count for this layer."""
    windows = 0 if job.ids is None else job.ids.shape[0]
    if not job.recipe.feedback:
        return max(1, (3 if sites_with_ranges(job, layer) else 2) * windows)
    stages = 4 if layer.moe is None else 5
    streams = 2 if job.recipe.effort_plan.drift else 1
    tuning = 3 * job.recipe.tuning_steps
    return windows * (bool(job.recipe.smoothing) + stages + streams) + tuning


def quantize_one(
    job: Job, writer: CheckpointWriter, layer: Layer, streams: Streams | None, passes: Passes
) -> LayerResult:
    """Quantize one layer and replace the streams' states by its outputs (where any are read)."""
    if job.recipe.feedback:
        assert streams is not None
        result = _by_feedback(job, writer, layer, streams, passes)
    else:
        result = _by_rounding(job, layer, streams, passes)
    for warning in result.record["warnings"]:
        passes("solve", 0, warning)
    return result


def _by_rounding(job: Job, layer: Layer, streams: Streams | None, passes: Passes) -> LayerResult:
    statistics, probe = {}, None
    if streams is not None:
        statistics = measure(job, layer, streams.quantized, partial(passes, "calibrate"))
        probe = streams.probe()
    passes("solve", 0)
    result = quantize_layer(
        job.arch,
        layer,
        lambda: load_float(job, layer),
        statistics,
        layer_schemes(job, layer),
        storage_dtypes(job, layer),
        job.recipe,
        job.assignment.activations,
        probe,
    )
    statistics.clear()
    states = None if streams is None else streams.quantized
    inputs = measured_inputs(job, layer, result.running, states, partial(passes, "calibrate"))
    result.stored.update(inputs.stored())
    result.record["warnings"] += inputs.warnings
    if states is not None and not _is_unread(job, layer):
        for _ in states.advance(build_running(job, layer, result.running, inputs.quantizers)):
            passes("propagate")
    return result


def _by_feedback(job: Job, writer: CheckpointWriter, layer: Layer, streams: Streams, passes: Passes) -> LayerResult:
    schemes, storage = layer_schemes(job, layer), storage_dtypes(job, layer)
    source = load_float(job, layer)
    smoothed, warnings = _smoothed(job, layer, streams, source, passes)
    smoothed.tensors.update(stored_precision(smoothed.tensors, schemes, storage))
    running = build_running(job, layer, smoothed.tensors)
    feedback = FeedbackLayer(job, layer, source, smoothed, running)
    drift = streams.float_model is not None
    store = StateStore(
        streams.quantized.shape[0],
        budget=job.budgets[1],
        scratch=writer.scratch,
        device=job.device,
    )
    staged = StagedLayer(
        running,
        streams.quantized,
        store,
        quantized_sites(job, layer),
        float_layer=build_running(job, layer, source) if drift else None,
        float_states=streams.float_model,
        factors=smoothed.columns,
        every_token=job.recipe.moe_all_experts,
        observers=feedback.observer,
        step=partial(passes, "calibrate"),
    )
    result = feedback.solve(staged)
    linears = result.record["linears"]
    result.record["warnings"] = [*warnings, *unsmoothed(layer, smoothed), *result.record["warnings"]]
    result.record["warnings"] += unseen(layer, linears)
    if _is_unread(job, layer):
        staged.close()
    elif feedback.tuned:
        staged.rerun(running)
    else:
        staged.advance()
    return result


def _smoothed(
    job: Job, layer: Layer, streams: Streams, source: dict[str, Tensor], passes: Passes
) -> tuple[Smoothed, tuple[str, ...]]:
    """The folded layer beside the source's; the very same tensors where the method folds nothing."""
    if not job.recipe.smoothing:
        return Smoothed(dict(source), {}, {}), ()
    statistics = measure(job, layer, streams.quantized, partial(passes, "calibrate"))
    return smooth_checked(
        job.arch,
        layer,
        dict(source),
        lambda: dict(source),
        statistics,
        layer_schemes(job, layer),
        storage_dtypes(job, layer),
        job.recipe,
        job.assignment.activations,
        streams.probe(),
    )


def _is_unread(job: Job, layer: Layer) -> bool:
    """Whether nothing is solved on the layer's outputs."""
    return layer.index + 1 == job.arch.num_layers and job.arch.head_module not in job.assignment.schemes
