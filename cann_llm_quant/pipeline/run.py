"""The loop: for every layer, measure, solve, write, pass the new activations on; then close the output.

A unit of the output (the embedding, one layer, the head) is journaled as soon as it is whole. A killed run finds its
journal and goes on after the last whole layer, from that layer's spooled activations or, where none were spooled, by
running the stored quantized layers again: the same arithmetic, so the same bits.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.checkpoint.writer import CheckpointWriter, check_output
from cann_llm_quant.export.packed import open_source
from cann_llm_quant.models.arch import Layer
from cann_llm_quant.pipeline.closing import output_files, summarize
from cann_llm_quant.pipeline.embedding import write_embedding
from cann_llm_quant.pipeline.head import HEAD, reads_text_for_head, write_head
from cann_llm_quant.pipeline.kv_choice import choice_files, resolve_kv_bits
from cann_llm_quant.pipeline.layer_run import layer_passes, quantize_one
from cann_llm_quant.pipeline.layer_tensors import require_finite
from cann_llm_quant.pipeline.mixing import resolve_mix
from cann_llm_quant.pipeline.prepare import Job, prepare
from cann_llm_quant.pipeline.request import Event, QuantizeReport, RunOptions, Stage
from cann_llm_quant.pipeline.rotation import rotated_source
from cann_llm_quant.pipeline.states import Streams, streams_before
from cann_llm_quant.recipe import Recipe

EXTRA = "extra"

Tell = Callable[[Event], None]


def quantize_model(
    model: str,
    output: Path,
    recipe: Recipe,
    *,
    options: RunOptions,
    before: Callable[[Job], None] = lambda _: None,
    progress: Tell = lambda _: None,
) -> QuantizeReport:
    """Quantize `model` (folder, GGUF file or hub id) into the folder `output`.

    `before` sees the resolved run and may refuse it before anything is written. Raises InputError's kinds before work
    starts, NumericError when calibration meets NaN or infinity. Whatever stops it, `OUTPUT.partial/` keeps the whole
    layers, and the same call goes on from there.
    """
    started = time.monotonic()
    warnings: list[str] = []

    def tell(event: Event) -> None:
        if event.warning and event.message:
            warnings.append(event.message)
        progress(event)

    named = Path(model)
    check_output(output, overwrite=options.overwrite, sources=[named] if named.exists() else [])
    with open_model(model, options) as opened:
        source = rotated_source(opened, recipe, tell)
        recipe = resolve_mix(source, _name_of(model), recipe, options, tell)
        recipe, kv_choice = resolve_kv_bits(source, _name_of(model), recipe, options, tell)
        job = prepare(source, _name_of(model), recipe, options, tell)
        before(job)
        with CheckpointWriter.open(
            output,
            run=job.run_identity(),
            max_shard_bytes=options.max_shard_bytes,
            overwrite=options.overwrite,
            sources=[source.path],
        ) as writer:
            resumed = sum(unit.startswith("layer.") for unit in writer.completed)
            warnings += [text for record in writer.completed.values() for text in record.get("warnings", [])]
            with torch.no_grad():
                write_embedding(job, writer)
                streams = _quantize_layers(job, writer, resumed, tell)
                _quantize_head(job, writer, streams, tell)
                _write_extra(job, writer)
            tell(Event("write", message="writing shards, index and configs"))
            records = dict(writer.completed)
            written = writer.finish(output_files(job, records) | choice_files(kv_choice))
    report = summarize(job, records, written, resumed, time.monotonic() - started, warnings)
    report = replace(report, kv_choice=kv_choice)
    tell(Event("done"))
    return report


def open_model(model: str, options: RunOptions) -> Checkpoint:
    """The source in float: stored so, or dequantized on load where that is wanted. Raises InputError's kinds."""
    if options.dequantize:
        return open_source(model, revision=options.revision, allow_pickle=options.allow_pickle, dtype=None)
    return open_checkpoint(
        model,
        revision=options.revision,
        allow_pickle=options.allow_pickle,
        ignore_source_quant=options.ignore_source_quant,
    )


def _name_of(model: str) -> str:
    """The folder's or file's own name, or the hub id; bytes that are no UTF-8 are replaced, since it goes into JSON."""
    path = Path(model)
    name = path.resolve().name if path.exists() else model
    return os.fsencode(name).decode("utf-8", "replace")


def _write_extra(job: Job, writer: CheckpointWriter) -> None:
    """Copy tensors that the decoder does not read."""
    if not job.extra or EXTRA in writer.completed:
        return
    tensors = {name: job.source.load(name) for name in job.extra}
    for name, tensor in tensors.items():
        require_finite(name, tensor)
    writer.write_unit(EXTRA, tensors, {"kept": len(tensors)})


def _quantize_head(job: Job, writer: CheckpointWriter, streams: Streams | None, tell: Tell) -> None:
    """Write the head with what surrounds it; a message for each of its warnings that was not told before."""
    if HEAD in writer.completed:
        return
    record = write_head(job, writer, streams)
    for warning in record["warnings"]:
        tell(Event("solve", 1, 1, "head", message=warning, warning=True))
    if record["linears"]:
        tell(Event("solve", 1, 1, "head", _mean_error(record)))


def _quantize_layers(job: Job, writer: CheckpointWriter, finished: int, tell: Tell) -> Streams | None:
    """Quantize the layers that are left; returns the states after the last one where the head is solved on them."""
    if finished == job.arch.num_layers and (HEAD in writer.completed or not reads_text_for_head(job)):
        return None
    streams = streams_before(job, writer, finished, tell)
    passes = _Passes(tell, [layer_passes(job, layer) for layer in job.arch.layers])
    for layer in job.arch.layers[finished:]:
        passes.begin(layer)
        result = quantize_one(job, writer, layer, streams, passes)
        writer.write_unit(f"layer.{layer.index}", result.stored, result.record)
        if streams is not None:
            streams.forget_before(layer.index + 1)
        passes.end(_mean_error(result.record))
    return streams


class _Passes:
    """Progress in passes of one window through one layer."""

    def __init__(self, tell: Tell, counts: list[int]) -> None:
        self._tell, self._counts, self._total = tell, counts, sum(counts)
        self._done, self._layer, self._index = 0, "", 0

    def begin(self, layer: Layer) -> None:
        self._index, self._layer = layer.index, f"layer {layer.index + 1}/{len(self._counts)}"
        self._done = sum(self._counts[: layer.index])

    def __call__(self, stage: Stage, passes: int = 1, message: str | None = None) -> None:
        """`passes` more are done; a message is a warning."""
        self._done += passes
        warning = message is not None
        self._tell(Event(stage, self._done, self._total, self._layer, message=message, warning=warning))

    def end(self, error: float | None) -> None:
        self._done = sum(self._counts[: self._index + 1])
        self._tell(Event("solve", self._done, self._total, self._layer, error))


def _mean_error(record: dict[str, Any]) -> float | None:
    errors = [entry["error"] for entry in record["linears"].values() if entry["error"] is not None]
    return sum(errors) / len(errors) if errors else None
