"""The loop: for every layer, measure, solve, write, pass the new activations on; then close the output.

A unit of the output (the embedding, one layer, the head) is journaled as soon as it is whole. A killed run finds its
journal and goes on after the last whole layer, from that layer's spooled activations or, where none were spooled, by
running the stored quantized layers again: the same arithmetic, so the same bits.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cann_llm_quant.calibrate.statistics import SiteStatistics, StatisticsCollector
from cann_llm_quant.calibrate.stream import HiddenStates, run_layer
from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.checkpoint.writer import CheckpointWriter, check_output
from cann_llm_quant.errors import NumericError
from cann_llm_quant.export import native
from cann_llm_quant.models.arch import Layer
from cann_llm_quant.models.decoder import DecoderLayer
from cann_llm_quant.models.weights import build_layer, load_layer
from cann_llm_quant.pipeline.closing import output_files, summarize
from cann_llm_quant.pipeline.layer import LayerResult, quantize_layer
from cann_llm_quant.pipeline.prepare import Job, prepare
from cann_llm_quant.pipeline.request import Event, QuantizeReport, RunOptions, Stage
from cann_llm_quant.quant.shrinkage import shrink_hessian
from cann_llm_quant.recipe import Recipe

EMBEDDING, HEAD, EXTRA = "embedding", "head", "extra"

Tell = Callable[[Event], None]


def quantize_model(
    model: str, output: Path, recipe: Recipe, *, options: RunOptions, progress: Tell = lambda _: None
) -> QuantizeReport:
    """Quantize `model` (folder, GGUF file or hub id) into the folder `output`.

    Raises InputError's kinds before work starts, NumericError when calibration meets NaN or infinity. Whatever stops
    it, `OUTPUT.partial/` keeps the whole layers, and the same call goes on from there.
    """
    started = time.monotonic()
    warnings: list[str] = []

    def tell(event: Event) -> None:
        if event.warning and event.message:
            warnings.append(event.message)
        progress(event)

    named = Path(model)
    check_output(output, overwrite=options.overwrite, sources=[named] if named.exists() else [])
    with open_checkpoint(
        model,
        revision=options.revision,
        allow_pickle=options.allow_pickle,
        ignore_source_quant=options.ignore_source_quant,
    ) as source:
        job = prepare(source, _name_of(model), recipe, options, tell)
        with CheckpointWriter.open(
            output,
            run=job.run_identity(),
            max_shard_bytes=options.max_shard_bytes,
            overwrite=options.overwrite,
            sources=[source.path],
        ) as writer:
            resumed = sum(unit.startswith("layer.") for unit in writer.completed)
            warnings += [text for record in writer.completed.values() for text in record.get("warnings", [])]
            with torch.inference_mode():
                _write_outer(job, writer, EMBEDDING, [job.arch.embedding_name])
                _quantize_layers(job, writer, resumed, tell)
                head = [name for name in job.arch.outer_shapes() if name != job.arch.embedding_name]
                _write_outer(job, writer, HEAD, head)
                if job.extra:
                    _write_outer(job, writer, EXTRA, job.extra)
            tell(Event("write", message="writing shards, index and configs"))
            records = dict(writer.completed)
            written = writer.finish(output_files(job, records))
    report = summarize(job, records, written, resumed, time.monotonic() - started, warnings)
    tell(Event("done"))
    return report


def _name_of(model: str) -> str:
    """The folder's or file's own name, or the hub id; bytes that are no UTF-8 are replaced, since it goes into JSON."""
    path = Path(model)
    name = path.resolve().name if path.exists() else model
    return os.fsencode(name).decode("utf-8", "replace")


def _write_outer(job: Job, writer: CheckpointWriter, unit: str, names: list[str]) -> None:
    """Copy tensors that stay as they are."""
    if unit in writer.completed:
        return
    tensors = {name: job.source.load(name) for name in names}
    for name, tensor in tensors.items():
        _require_finite(name, tensor)
    writer.write_unit(unit, tensors, {"kept": len(names)})


def _quantize_layers(job: Job, writer: CheckpointWriter, finished: int, tell: Tell) -> None:
    if finished == job.arch.num_layers:
        return
    states = None if job.ids is None else _states_before(job, writer, finished, tell)
    for layer in job.arch.layers[finished:]:
        _quantize_layer(job, writer, layer, states, tell)


def _quantize_layer(job: Job, writer: CheckpointWriter, layer: Layer, states: HiddenStates | None, tell: Tell) -> None:
    """Measure, solve, pass the activations on, write; a function of its own so that nothing of a layer outlives it."""
    windows = 0 if job.ids is None else job.ids.shape[0]
    passes, count = max(1, 2 * windows), job.arch.num_layers
    name, done, total = f"layer {layer.index + 1}/{count}", passes * layer.index, passes * count
    statistics: dict[str, SiteStatistics] = {}
    probe = None
    if states is not None:
        statistics = _measure(job, layer, states, partial(_tell_pass, tell, "calibrate", done, total, name))
        probe = next(states.windows())
    tell(Event("solve", done + windows, total, name))
    result = _solve(job, layer, statistics, probe)
    statistics.clear()
    for warning in result.record["warnings"]:
        tell(Event("solve", done + windows, total, name, message=warning, warning=True))
    error = _mean_error(result.record)
    if states is not None and layer.index + 1 < count:
        for window in states.advance(_build(job, layer, result.running)):
            _tell_pass(tell, "propagate", done + windows, total, name, window, error)
    writer.write_unit(f"layer.{layer.index}", result.stored, result.record)
    if states is not None:
        states.forget_before(layer.index + 1)
    tell(Event("solve", done + passes, total, name, error))


def _tell_pass(
    tell: Tell, stage: Stage, done: int, total: int, layer: str, window: int, error: float | None = None
) -> None:
    tell(Event(stage, done + window, total, layer, error))


def _states_before(job: Job, writer: CheckpointWriter, index: int, tell: Tell) -> HiddenStates:
    """The hidden states before layer `index`: found in a spool file, or computed from the embedding up."""
    assert job.ids is not None
    shape = (job.ids.shape[0], job.ids.shape[1], job.arch.hidden_size)
    states = HiddenStates(
        shape, job.dtype, budget=job.options.activation_budget, scratch=writer.scratch, device=job.device
    )
    if index and states.resume(index):
        return states
    states.start(job.source.load(job.arch.embedding_name), job.ids)
    for layer in job.arch.layers[:index]:
        running = _build(job, layer, _stored_layer(writer, layer))
        for window in states.advance(running):
            done, total = layer.index * shape[0] + window, index * shape[0]
            tell(Event("replay", done, total, f"layer {layer.index + 1}/{index}"))
    return states


def _stored_layer(writer: CheckpointWriter, layer: Layer) -> dict[str, Tensor]:
    """A journaled layer as float32 tensors under their source names."""
    stored = writer.read_unit(f"layer.{layer.index}")
    tensors: dict[str, Tensor] = {}
    for spec in layer.linears:
        if f"{spec.module}.weight_packed" in stored:
            tensors[f"{spec.module}.weight"] = native.decode(spec.module, stored).dequantize()
    names = layer.tensor_shapes()
    tensors |= {name: tensor.to(torch.float32) for name, tensor in stored.items() if name in names}
    return tensors


def _measure(job: Job, layer: Layer, states: HiddenStates, step: Callable[[int], None]) -> dict[str, SiteStatistics]:
    """Statistics of every site that has a quantized linear, over all windows, with the layer in float."""
    schemes = job.assignment.schemes
    sites = [s.name for s in layer.sites if any(layer.linear(role).module in schemes for role in s.linears)]
    collector = StatisticsCollector(sites)
    running = _build(job, layer, _load(job, layer))
    for done, _ in enumerate(run_layer(running, states.windows(), layer.index, collector.observe)):
        step(done + 1)
    statistics = collector.finish()
    for site, measured in statistics.items():
        if not bool(torch.isfinite(measured.hessian.diagonal()).all()):
            raise NumericError(
                f"layer {layer.index}: the input of {site} holds NaN, infinity or values whose squares leave float32; "
                "scan the source's weights with inspect --scan"
            )
        # Replaced one by one, so that only one Gram matrix is held twice.
        statistics[site] = replace(measured, hessian=shrink_hessian(measured.hessian, measured.tokens))
    return statistics


def _load(job: Job, layer: Layer) -> dict[str, Tensor]:
    tensors = load_layer(job.source, job.arch, layer.index, job.device, torch.float32)
    for name, tensor in tensors.items():
        _require_finite(name, tensor)
    return tensors


def _require_finite(name: str, tensor: Tensor) -> None:
    """NaN would spread through its group, and infinity would come out as a large number that no scan finds later."""
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        first = (~torch.isfinite(tensor)).nonzero()[0].tolist()
        raise NumericError(
            f"tensor {name} of the source holds NaN or infinity, first at {first}; inspect --scan lists all of them"
        )


def _build(job: Job, layer: Layer, tensors: dict[str, Tensor]) -> DecoderLayer:
    """The layer as it runs: in the compute dtype, on the device."""
    return build_layer(job.arch, layer.index, {n: t.to(job.device, job.dtype) for n, t in tensors.items()})


def _solve(job: Job, layer: Layer, statistics: dict[str, SiteStatistics], probe: Tensor | None) -> LayerResult:
    schemes = {
        spec.module: job.assignment.schemes[spec.module]
        for spec in layer.linears
        if spec.module in job.assignment.schemes
    }
    storage = {name: job.source.tensors[name].dtype for name in layer.tensor_shapes()}
    return quantize_layer(job.arch, layer, lambda: _load(job, layer), statistics, schemes, storage, job.recipe, probe)


def _mean_error(record: dict[str, Any]) -> float | None:
    errors = [entry["error"] for entry in record["linears"].values() if entry["error"] is not None]
    return sum(errors) / len(errors) if errors else None
