"""One quantization written in several layouts: natively first, then each other layout from the native files.

With `native` alone OUT is that output. Otherwise OUT holds a folder for each layout, `native` always among them, since
the others are made from it, and `formats.json`, which says what run it belongs to: a killed run goes on with what is
missing. What a layout cannot hold is refused before anything is quantized.

    {"model": …, "recipe": {…}, "exports": {what is asked of the other layouts}, "replacing": true until a native
    output that was there before has given way to this run's}
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cann_llm_quant.checkpoint.files import parse_json_object, read_bytes
from cann_llm_quant.checkpoint.journal import sync_folder, write_file
from cann_llm_quant.checkpoint.output_place import check_output, place_errors, refuse_existing
from cann_llm_quant.errors import UsageError
from cann_llm_quant.export.convert import FILE_NAME as EXPORT_FILE
from cann_llm_quant.export.inference_config import load_inference_config
from cann_llm_quant.export.layout import PackedModel
from cann_llm_quant.export.layouts import Exported, ExportOptions, check_options, export_model, options_for, precheck
from cann_llm_quant.export.packed import open_packed
from cann_llm_quant.export.packed_model import storage_dtype
from cann_llm_quant.export.to_float import FILE_NAME as FLOAT_FILE
from cann_llm_quant.pipeline.kv_cache import planned_cache
from cann_llm_quant.pipeline.prepare import Job
from cann_llm_quant.pipeline.request import Event, QuantizeReport, RunOptions
from cann_llm_quant.pipeline.run import open_model, quantize_model
from cann_llm_quant.recipe import Recipe

FILE_NAME = "formats.json"
NATIVE = "native"
_NO_PART_OF_A_RUN = ("max_shard_bytes", "overwrite", "allow_pickle")
# Which field of an export's own file says what it was made from.
_ORIGINS = {EXPORT_FILE: "source_fingerprint", FLOAT_FILE: "packed_fingerprint"}
_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".data")


@dataclass(frozen=True)
class Quantized:
    """What was written: the native output's report (None when an earlier run had written it) and the exports."""

    output: Path
    report: QuantizeReport | None
    exports: tuple[Exported, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values: those of the report, and `exports`."""
        report = {"output": str(self.output)} if self.report is None else self.report.to_json()
        return report | {"exports": [export.to_json() for export in self.exports]}


def quantize_into(
    model: str,
    output: Path,
    recipe: Recipe,
    *,
    options: RunOptions,
    exports: ExportOptions,
    progress: Callable[[Event], None] = lambda _: None,
) -> Quantized:
    """Quantize `model` into the recipe's layouts at `output`; `exports` is what is asked of those besides native.

    Raises what `quantize_model` and `export_model` raise, for the layouts before work starts.
    """
    others: list[str] = [layout for layout in recipe.formats if layout != NATIVE]
    check_options(exports, *(others or ["compressed-tensors"]))
    if not others:
        return Quantized(output, quantize_model(model, output, recipe, options=options, progress=progress), ())
    recipe = recipe.model_copy(update={"formats": (NATIVE,)})
    native = output / NATIVE
    asked = {key: value for key, value in asdict(exports).items() if key not in _NO_PART_OF_A_RUN}
    with open_model(model, options) as source:
        made_from = {"model": model, "fingerprint": source.fingerprint()}
    identity = {**made_from, "recipe": recipe.model_dump(mode="json"), "exports": asked}
    _claim(output, model, identity, options)
    report: QuantizeReport | None = None
    if options.overwrite or not native.exists():

        def check(job: Job) -> None:
            _check_layouts(job, others, exports, progress)

        report = quantize_model(model, native, recipe, options=options, before=check, progress=progress)
        _mark(output, identity)
    done = [_export(native, output / layout, layout, exports, progress) for layout in others]
    return Quantized(output, report, tuple(done))


def _claim(output: Path, model: str, identity: Mapping[str, Any], options: RunOptions) -> None:
    """Make OUT this run's. Raises UsageError for one that is another's."""
    named, native, marker = Path(model), output / NATIVE, output / FILE_NAME
    if marker.is_file():
        # of a run that was refused the marker is all there is
        begun = any(path != marker for path in output.iterdir())
        if begun and marker.read_bytes() != _content(identity) and not options.overwrite:
            raise UsageError(f"{output} holds the formats of another run: choose another -o, or pass --overwrite")
    elif os.path.lexists(output) and not (output.is_dir() and not any(output.iterdir())):
        refuse_existing(output)
    else:
        check_output(native, overwrite=False, sources=[named] if named.exists() else [])
    _mark(output, {**identity, "replacing": True} if options.overwrite and native.exists() else identity)


def _mark(output: Path, identity: Mapping[str, Any]) -> None:
    with place_errors(output):
        output.mkdir(parents=True, exist_ok=True)
        write_file(output / FILE_NAME, _content(identity))
        sync_folder(output)


def _content(identity: Mapping[str, Any]) -> bytes:
    return json.dumps(identity, indent=2).encode() + b"\n"


def _check_layouts(job: Job, layouts: list[str], exports: ExportOptions, tell: Callable[[Event], None]) -> None:
    """Refuse what a layout cannot hold, and tell its warnings, before the first layer."""
    schemes = job.assignment.schemes
    shapes = {module: job.source.tensors[f"{module}.weight"].shape for module in schemes}
    model = PackedModel(
        arch=job.arch,
        schemes=schemes,
        activations=job.assignment.activations,
        shapes={module: (shape[0], shape[1]) for module, shape in shapes.items()},
        kv=planned_cache(job),
        dtype=storage_dtype(job.source, job.arch),
        config=job.source.config,
        tied={module: readers[0] for readers in job.assignment.tables.values() for module in readers[1:]},
    )
    for layout in layouts:
        for warning in precheck(model, job.source, layout, exports):
            tell(Event("prepare", message=f"{layout}: {warning}", warning=True))


def _export(native: Path, output: Path, layout: str, exports: ExportOptions, tell: Callable[[Event], None]) -> Exported:
    """One layout from the native files, unless an earlier run had finished it."""
    if not exports.overwrite and _is_made_from(native, output):
        size = sum(path.stat().st_size for path in output.iterdir() if path.suffix in _WEIGHT_SUFFIXES)
        linears = len(load_inference_config(native).weights.linears)
        return Exported(output, layout, size, linears, 0, ())

    def step(done: int, total: int) -> None:
        tell(Event("write", done, total, layer=layout))

    return export_model(native, output, layout, options_for(layout, exports), progress=step)


def _is_made_from(native: Path, output: Path) -> bool:
    origin = next((output / name for name in _ORIGINS if (output / name).is_file()), None)
    if origin is None:
        return False
    with open_packed(native) as checkpoint:
        made_from = parse_json_object(read_bytes(origin), origin).get(_ORIGINS[origin.name])
        return bool(made_from == checkpoint.fingerprint())
