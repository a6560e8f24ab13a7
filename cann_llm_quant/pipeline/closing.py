"""The files beside the weights, and the report: assembled from the journal's records alone, so that a resumed run
writes the same bytes as an unbroken one.
"""

from collections import Counter
from importlib.metadata import version
from typing import Any

import torch

from cann_llm_quant import __version__
from cann_llm_quant.checkpoint.writer import WrittenCheckpoint
from cann_llm_quant.errors import CannQuantError
from cann_llm_quant.export.inference_config import (
    FILE_NAME,
    Accounting,
    InferenceConfig,
    InputFormat,
    Inputs,
    Limits,
    LinearReport,
    Provenance,
    WeightFormat,
    Weights,
)
from cann_llm_quant.export.kv_scales import common_scheme, scales_bytes
from cann_llm_quant.export.kv_section import SCALES_FILE, KvCache
from cann_llm_quant.export.model_config import json_bytes, output_config
from cann_llm_quant.export.packed_model import storage_dtype
from cann_llm_quant.export.quantization_config import quantization_config
from cann_llm_quant.pipeline.expert_counts import expert_counts
from cann_llm_quant.pipeline.input_ranges import FEW_TOKENS
from cann_llm_quant.pipeline.kv_cache import all_scales, kv_section
from cann_llm_quant.pipeline.prepare import LIBRARIES, Job, peak_memory_bytes
from cann_llm_quant.pipeline.request import QuantizeReport
from cann_llm_quant.quant.activations import label

Records = dict[str, dict[str, Any]]


def output_files(job: Job, records: Records) -> dict[str, bytes]:
    """Every file of the output besides weights and index: companions byte for byte, the configs, the recipe."""
    storage = storage_dtype(job.source, job.arch)
    scales, section = all_scales(job, records) if job.kv else (), kv_section(job, records)
    config = output_config(job.source.config, job.arch, str(storage).removeprefix("torch."), _quantization_config(job))
    files = {
        "config.json": json_bytes(config),
        FILE_NAME: _inference_config(job, records, section).to_json(),
        "recipe.json": (job.recipe.to_json() + "\n").encode(),
    }
    if section.scales == SCALES_FILE:
        files[SCALES_FILE] = scales_bytes(scales)
    return job.companions | files


def _quantization_config(job: Job) -> dict[str, Any] | None:
    assigned, kv = job.assignment, common_scheme(job.kv or ())
    return quantization_config(assigned.schemes, assigned.kept, assigned.activations, assigned.tables, kv)


def _inputs(job: Job) -> Inputs:
    activations = job.assignment.activations
    return Inputs(
        schemes={label(scheme): InputFormat.of(scheme) for scheme in activations.values()},
        linears={module: label(scheme) for module, scheme in activations.items()},
    )


def _inference_config(job: Job, records: Records, kv_cache: KvCache) -> InferenceConfig:
    formats = _formats(job, records)
    quantized = _quantization_config(job)
    return InferenceConfig(
        model_type=job.arch.model_type,
        weights=Weights(
            layout="dense" if quantized is None else quantized["format"],
            schemes={weight_format.key(): weight_format for weight_format in formats.values()},
            linears={module: weight_format.key() for module, weight_format in formats.items()},
            float=job.assignment.kept,
            tied={module: readers[0] for readers in job.assignment.tables.values() for module in readers[1:]},
            bits_per_weight=bits_per_weight(job, records),
        ),
        inputs=_inputs(job),
        kv_cache=kv_cache,
        limits=Limits(max_context=job.arch.max_positions),
        accounting=Accounting(**accounting(job, records), dropped=job.dropped, extra=job.extra),
        provenance=Provenance(
            tool_version=__version__,
            source_name=job.source_name,
            source_fingerprint=job.source.fingerprint(),
            recipe=job.recipe.model_dump(mode="json"),
            compute_dtype=job.options.dtype,
            device=job.device.type,
            calibration=job.corpus,
            libraries={name: version(name) for name in LIBRARIES},
        ),
        linears={
            module: LinearReport(**{field: entry[field] for field in LinearReport.model_fields})
            for module, entry in _linears(records).items()
        },
    )


def _formats(job: Job, records: Records) -> dict[str, WeightFormat]:
    """How each linear is really stored: its scheme, and the type that its scales were found to fit in."""
    linears = _linears(records)
    return {
        module: WeightFormat.of(scheme, linears[module]["scale_dtype"])
        for module, scheme in job.assignment.schemes.items()
    }


def _linears(records: Records) -> dict[str, dict[str, Any]]:
    return {module: entry for record in records.values() for module, entry in record.get("linears", {}).items()}


def bits_per_weight(job: Job, records: Records) -> float | None:
    """Stored bits per quantized weight, scales and zero points included; None where none is quantized."""
    linears = _linears(records)
    bits = weights = 0.0
    for module, scheme in job.assignment.schemes.items():
        out, columns = job.source.tensors[f"{module}.weight"].shape
        scale_bits = 32 if linears[module]["scale_dtype"] == "float32" else 16
        bits += scheme.bits_per_weight(out, columns, scale_bits) * out * columns
        weights += out * columns
    return bits / weights if weights else None


def accounting(job: Job, records: Records) -> dict[str, int]:
    """Counts of source tensors as they were really written: `source = quantized + kept + dropped`.

    Raises CannQuantError when the sum does not come out, which would mean a lost tensor.
    """
    source = len(job.source.tensors)
    quantized = sum(len(record.get("linears", {})) for record in records.values())
    kept = sum(record["kept"] for record in records.values())
    if quantized + kept + len(job.dropped) != source:
        raise CannQuantError(
            f"the source has {source} tensors but {quantized} were quantized, {kept} kept and {len(job.dropped)} "
            "dropped; nothing was published, please report this"
        )
    return {"source": source, "quantized": quantized, "kept": kept}


def summarize(
    job: Job, records: Records, written: WrittenCheckpoint, resumed: int, seconds: float, warnings: list[str]
) -> QuantizeReport:
    """The report of a finished run."""
    linears = _linears(records)
    counts = accounting(job, records)
    tensors, schemes = job.source.tensors, job.assignment.schemes
    elements = {name: torch.Size(info.shape).numel() for name, info in tensors.items()}
    return QuantizeReport(
        output=written.path,
        model_type=job.arch.model_type,
        method=job.recipe.method,
        effort=job.recipe.effort,
        layers=job.arch.num_layers,
        resumed_layers=resumed,
        quantized_linears=len(schemes),
        quantized_parameters=sum(elements[f"{module}.weight"] for module in schemes),
        total_parameters=sum(elements[name] for name in job.arch.tensor_shapes()),
        bits_per_weight=bits_per_weight(job, records),
        source_tensors=counts["source"],
        kept_tensors=counts["kept"],
        dropped_tensors=job.dropped,
        extra_tensors=job.extra,
        float_modules=job.assignment.kept,
        formats=dict(Counter(_format_name(job, module, weight) for module, weight in _formats(job, records).items())),
        weight_files=list(written.weight_files),
        output_bytes=sum(path.stat().st_size for path in written.path.rglob("*") if path.is_file()),
        source_bytes=sum(info.nbytes for info in tensors.values()),
        mean_rtn_error=_mean([entry["rtn_error"] for entry in linears.values()]),
        mean_error=_mean([entry["error"] for entry in linears.values()]),
        experts=expert_counts(job.arch, linears, few_tokens=FEW_TOKENS, every_token=job.recipe.moe_all_experts),
        kv_cache=None if job.kv is None else kv_section(job, records),
        calibration=job.corpus,
        seconds=seconds,
        peak_memory_bytes=peak_memory_bytes(),
        warnings=warnings,
    )


def _format_name(job: Job, module: str, weight: WeightFormat) -> str:
    scheme = job.assignment.activations.get(module)
    return weight.key() if scheme is None else f"{weight.key()} with {label(scheme)} inputs"


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
