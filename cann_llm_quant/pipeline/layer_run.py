"""One layer of a run: measured, solved and left behind, with the activations passed on to the next."""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Protocol, runtime_checkable

from torch import Tensor

from cann_llm_quant.calibrate.kv_ranges import watched_attention
from cann_llm_quant.calibrate.stages import StagedLayer
from cann_llm_quant.calibrate.state_store import StateStore
from cann_llm_quant.calibrate.statistics import SiteStatistics
from cann_llm_quant.calibrate.stream import HiddenStates
from cann_llm_quant.checkpoint.writer import CheckpointWriter
from cann_llm_quant.models.arch import Layer
from cann_llm_quant.models.decoder import DecoderLayer
from cann_llm_quant.pipeline.feedback import FeedbackLayer, stored_precision
from cann_llm_quant.pipeline.input_ranges import measured_inputs, sites_with_ranges
from cann_llm_quant.pipeline.kv_cache import KvMeter
from cann_llm_quant.pipeline.kv_smoothing import KeyFold, fold_keys
from cann_llm_quant.pipeline.layer import Inputs, LayerResult, quantize_layer, smooth_checked, unseen, unsmoothed
from cann_llm_quant.pipeline.layer_tensors import (
    build_running,
    layer_schemes,
    load_float,
    quantized_sites,
    storage_dtypes,
)
from cann_llm_quant.pipeline.linear import sites_to_unfold
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
    smoothing = windows if job.recipe.kv_cache is not None and job.recipe.kv_cache.smooth else 0
    if not job.recipe.feedback:
        return max(1, (3 if sites_with_ranges(job, layer) else 2) * windows + smoothing)
    stages = 4 if layer.moe is None else 5
    streams = 2 if job.recipe.effort_plan.drift else 1
    tuning = 3 * job.recipe.tuning_steps
    return windows * (bool(job.recipe.smoothing) + stages + streams) + smoothing + tuning


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
    keys = fold_keys(job, layer, streams, partial(passes, "calibrate"))
    if streams is not None and quantized_sites(job, layer):
        statistics = measure(job, layer, streams.quantized, partial(passes, "calibrate"))
        probe = streams.probe()
    passes("solve", 0)
    result = quantize_layer(
        job.arch,
        layer,
        lambda: keys.over(load_float(job, layer)),
        statistics,
        layer_schemes(job, layer),
        storage_dtypes(job, layer),
        job.recipe,
        Inputs(job.assignment.activations, job.assignment.ranges),
        probe,
    )
    statistics.clear()
    states = None if streams is None else streams.quantized
    inputs = measured_inputs(job, layer, result.running, states, partial(passes, "calibrate"))
    result.stored.update(inputs.stored())
    result.record["warnings"] += inputs.warnings
    meter = KvMeter(job, layer)
    if states is not None:
        running = build_running(job, layer, result.running, inputs.quantizers)
        for _ in _onward(job, layer, running, states, meter):
            passes("propagate")
    return _with_cache(result, meter, keys)


def _by_feedback(job: Job, writer: CheckpointWriter, layer: Layer, streams: Streams, passes: Passes) -> LayerResult:
    keys, meter = fold_keys(job, layer, streams, partial(passes, "calibrate")), KvMeter(job, layer)
    original = load_float(job, layer)
    source = keys.over(original)
    statistics = measure(job, layer, streams.quantized, partial(passes, "calibrate")) if job.recipe.smoothing else {}
    scratch, budget = writer.scratch, job.budgets[1]
    store = StateStore(streams.quantized.shape[0], budget=budget, scratch=scratch, device=job.device)
    unfolded: set[str] = set()
    while True:
        smoothed, warnings = _smoothed(job, layer, streams, source, statistics, unfolded)
        walk = _Walk(job, layer, source, original, smoothed)
        # A walk that is repeated is not counted again.
        step = partial(passes, "calibrate", 0 if unfolded else 1)
        staged = walk.staged(streams, store, meter, step)
        result = walk.feedback.solve(staged)
        worse = sites_to_unfold(layer, smoothed.columns, result.record["linears"])
        if not worse:
            break
        unfolded |= worse
        staged.close()
        meter.restart()
    linears = result.record["linears"]
    result.record["warnings"] = [*warnings, *unsmoothed(layer, smoothed), *result.record["warnings"]]
    result.record["warnings"] += unseen(layer, linears)
    if walk.feedback.tuned:
        meter.restart()
    if not _is_unread(job, layer):
        staged.rerun(walk.running, meter.watch) if walk.feedback.tuned else staged.advance()
        return _with_cache(result, meter, keys)
    staged.close()
    if walk.feedback.tuned:
        for _ in _onward(job, layer, walk.running, streams.quantized, meter):
            passes("calibrate")
    return _with_cache(result, meter, keys)


class _Walk:
    """The folded layer that is solved site by site; `original` is the float model's."""

    def __init__(
        self, job: Job, layer: Layer, source: dict[str, Tensor], original: dict[str, Tensor], smoothed: Smoothed
    ) -> None:
        self._job, self._layer, self._original, self._smoothed = job, layer, original, smoothed
        schemes, storage = layer_schemes(job, layer), storage_dtypes(job, layer)
        smoothed.tensors.update(stored_precision(smoothed.tensors, schemes, storage))
        self.running = build_running(job, layer, smoothed.tensors)
        self.feedback = FeedbackLayer(job, layer, source, smoothed, self.running)

    def staged(self, streams: Streams, store: StateStore, meter: KvMeter, step: Callable[[], None]) -> StagedLayer:
        """The walk over the streams, which `step` is told of."""
        drift = streams.float_model is not None
        return StagedLayer(
            self.running,
            streams.quantized,
            store,
            quantized_sites(self._job, self._layer),
            float_layer=build_running(self._job, self._layer, self._original) if drift else None,
            float_states=streams.float_model,
            factors=self._smoothed.columns,
            every_token=self._job.recipe.moe_all_experts,
            observers=self.feedback.observer,
            attend=meter.watch,
            step=step,
        )


def _onward(job: Job, layer: Layer, running: DecoderLayer, states: HiddenStates, meter: KvMeter) -> Iterator[int]:
    """Run the stored layer: over to the next one's states, or no further than what the cache is measured on."""
    if not _is_unread(job, layer):
        yield from states.advance(running, attend=meter.watch)
    elif meter.watch is not None:
        yield from watched_attention(running, states, meter.watch)


def _with_cache(result: LayerResult, meter: KvMeter, keys: KeyFold) -> LayerResult:
    """The layer's result with what the KV cache adds to it."""
    record, stored = meter.finish()
    result.stored.update(stored)
    if record:
        result.record["kv"] = record | ({} if keys.spread is None else {"smoothed": keys.spread})
    result.record["warnings"] = [*keys.warnings, *result.record["warnings"]]
    return result


def _smoothed(
    job: Job,
    layer: Layer,
    streams: Streams,
    source: dict[str, Tensor],
    statistics: Mapping[str, SiteStatistics],
    unfolded: Collection[str],
) -> tuple[Smoothed, tuple[str, ...]]:
    """The folded layer beside the source's; the very same tensors where the method folds nothing."""
    if not job.recipe.smoothing:
        return Smoothed(dict(source), {}, {}), ()
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
        unfolded,
    )


def _is_unread(job: Job, layer: Layer) -> bool:
    """Whether nothing is solved on the layer's outputs."""
    return layer.index + 1 == job.arch.num_layers and job.arch.head_module not in job.assignment.schemes
