"""A model streamed from one layout into another that is made of safetensors; nothing is quantized again unless asked.

One layer is in memory at a time. Every layer is a unit of the writer, so that a killed export goes on where it was,
and becomes a weight file of its own, so that no byte is written twice. `export.json` beside the weights says where they
come from, and that `--overwrite` may replace the folder.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cann_llm_quant import __version__
from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.checkpoint.write_ahead import WriteAhead
from cann_llm_quant.checkpoint.writer import CheckpointWriter, WrittenCheckpoint, check_output
from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.export.fitting import Fit, fit, fitted
from cann_llm_quant.export.in_order import Job, in_order
from cann_llm_quant.export.layout import Encoder, PackedModel
from cann_llm_quant.export.model_config import json_bytes
from cann_llm_quant.export.packed import open_source
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.export.packed_model import packed_model, units
from cann_llm_quant.loading import family_warnings

FILE_NAME = "export.json"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Converted:
    """What was written, how many linears stayed in their codes or were rounded anew, and what the user should know."""

    written: WrittenCheckpoint
    linears: int
    rounded: int
    warnings: list[str]


def convert(
    source: str | Path,
    output: Path,
    make: Callable[[PackedModel, Checkpoint], Encoder],
    *,
    regroup: int | None = None,
    requantize: bool = False,
    allow_pickle: bool = False,
    options: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Write `source` in the layout of the encoder that `make` gives for it; `options` say what was asked of it.

    Raises UsageError for an `output` that cannot be written or must not be replaced, UnsupportedError for what the
    layout cannot hold (see `fitting`), CheckpointError for a source that is damaged.
    """
    with open_source(str(source), allow_pickle=allow_pickle, dtype=None) as checkpoint:
        check_output(output, overwrite=overwrite, sources=[checkpoint.path])
        model = packed_model(checkpoint)
        encoder = make(model, checkpoint)
        chosen = fit(model, encoder, size=regroup, requantize=requantize)
        model = fitted(model, chosen)
        warnings = family_warnings(model.arch) + encoder.check(model)
        run = {
            "export": encoder.layout,
            "options": dict(options or {}),
            "source": checkpoint.fingerprint(),
            "regroup": regroup,
            "requantize": requantize,
        }
        with CheckpointWriter.open(
            output, run=run, max_shard_bytes=max_shard_bytes, overwrite=overwrite, sources=[checkpoint.path]
        ) as writer:
            try:
                _write_units(writer, checkpoint, model, chosen, encoder, progress)
            except UnsupportedError:  # of something that only the weights themselves show
                writer.abandon()
                raise
            files = encoder.files(model, _dtypes(writer)) | {FILE_NAME: json_bytes(origin(checkpoint, encoder.layout))}
            written = writer.finish(checkpoint.companion_files() | files, stem=encoder.stem, file_per_unit=True)
    return Converted(written, len(model.schemes), len(chosen.rounded), warnings)


def _write_units(
    writer: CheckpointWriter,
    checkpoint: Checkpoint,
    model: PackedModel,
    chosen: Fit,
    encoder: Encoder,
    progress: Progress,
) -> None:
    parts = units(checkpoint, model.arch)
    completed = set(writer.completed)
    todo = {unit: _jobs(checkpoint, names, chosen, encoder) for unit, names in parts.items() if unit not in completed}
    jobs = (job for jobs in todo.values() for job in jobs)
    with in_order(jobs) as made, WriteAhead(writer) as ahead:
        for done, unit in enumerate(parts):
            if unit in todo:
                tensors = {name: tensor for stored in islice(made, len(todo[unit])) for name, tensor in stored.items()}
                record = {"tensors": {name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()}}
                ahead.write_unit(unit, tensors, record)
            progress(done + 1, len(parts))


def _jobs(checkpoint: Checkpoint, names: list[str], chosen: Fit, encoder: Encoder) -> list[Job[Mapping[str, Tensor]]]:
    """What makes the stored tensors of one unit, linear by linear."""
    packed = {name.removesuffix(".weight") for name in names if name.endswith(".weight")} & set(chosen.schemes)

    def plain(name: str) -> Mapping[str, Tensor]:
        return encoder.plain(name, checkpoint.load(name))

    def linear(module: str) -> Mapping[str, Tensor]:
        assert isinstance(checkpoint, PackedCheckpoint), "only a packed source has packed linears"
        weight = checkpoint.quantized(module)
        assert weight is not None, "the scheme says that it is packed"
        bias = checkpoint.load(f"{module}.bias") if f"{module}.bias" in checkpoint.tensors else None
        return encoder.encode(module, chosen.weight(module, weight), checkpoint.inputs(module), bias)

    jobs: list[Job[Mapping[str, Tensor]]] = []
    for name in names:
        module, _, kind = name.rpartition(".")
        nbytes = checkpoint.tensors[name].nbytes
        if module not in packed:
            jobs.append(Job(nbytes, partial(plain, name)))
        elif kind == "weight":
            jobs.append(Job(nbytes, partial(linear, module)))
    return jobs


def _dtypes(writer: CheckpointWriter) -> dict[str, torch.dtype]:
    return {
        name: getattr(torch, dtype) for record in writer.completed.values() for name, dtype in record["tensors"].items()
    }


def origin(checkpoint: Checkpoint, layout: str) -> Mapping[str, Any]:
    """The content of `export.json`."""
    source_layout = checkpoint.reader.layout if isinstance(checkpoint, PackedCheckpoint) else "float"
    return {
        "tool": "cann-llm-quant",
        "tool_version": __version__,
        "layout": layout,
        "source_name": checkpoint.path.resolve().name,
        "source_layout": source_layout,
        "source_fingerprint": checkpoint.fingerprint(),
    }
