"""A quantized source written back as a plain Hugging Face checkpoint of dequantized weights.

Any tool can then measure it. `float_export.json` beside the weights says where they come from, and that `--overwrite`
may replace the folder.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cann_llm_quant import __version__
from cann_llm_quant.checkpoint.write_ahead import WriteAhead
from cann_llm_quant.checkpoint.writer import CheckpointWriter, WrittenCheckpoint, check_output
from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.export.in_order import Job, in_order
from cann_llm_quant.export.model_config import json_bytes, output_config
from cann_llm_quant.export.native_reader import NativeReader
from cann_llm_quant.export.packed import open_packed
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.export.packed_model import storage_dtype, units
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.quant.number_formats import all_finite

FILE_NAME = "float_export.json"


def export_to_float(
    source: str | Path,
    output: Path,
    *,
    dtype: torch.dtype | None = None,
    allow_pickle: bool = False,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> WrittenCheckpoint:
    """Dequantize every packed linear; `dtype` None keeps the storage type, float32 loses nothing.

    A few layers are in memory at a time. Raises UsageError for an `output` that cannot be written or must not be
    replaced, UnsupportedError for a source that is not quantized and for numbers that float16 cannot hold,
    CheckpointError for a source that is damaged.
    """
    check_output(output, overwrite=overwrite, sources=[Path(source)] if Path(source).exists() else [])
    with open_packed(str(source), dtype, allow_pickle=allow_pickle) as checkpoint:
        arch = arch_from_checkpoint(checkpoint)
        parts = units(checkpoint, arch)
        run = {"export": "float", "source": checkpoint.fingerprint(), "dtype": str(dtype)}
        with CheckpointWriter.open(
            output, run=run, max_shard_bytes=max_shard_bytes, overwrite=overwrite, sources=[checkpoint.path]
        ) as writer:
            try:
                _write_units(writer, checkpoint, parts, dtype, progress)
            except UnsupportedError:  # of numbers, which only the weights show
                writer.abandon()
                raise
            stored = str(storage_dtype(checkpoint, arch, dtype)).removeprefix("torch.")
            config = output_config(checkpoint.config, arch, stored, None)
            files = {"config.json": json_bytes(config), FILE_NAME: json_bytes(_origin(checkpoint))}
            return writer.finish(checkpoint.companion_files() | files, file_per_unit=True)


def _write_units(
    writer: CheckpointWriter,
    checkpoint: PackedCheckpoint[Any],
    parts: Mapping[str, list[str]],
    dtype: torch.dtype | None,
    progress: Callable[[int, int], None],
) -> None:
    completed = set(writer.completed)

    def job(name: str) -> Job[Tensor]:
        return Job(checkpoint.tensors[name].nbytes, lambda: _load(checkpoint, name, dtype))

    jobs = (job(name) for unit, names in parts.items() if unit not in completed for name in names)
    with in_order(jobs) as made, WriteAhead(writer) as ahead:
        for done, (unit, names) in enumerate(parts.items()):
            if unit not in completed:
                ahead.write_unit(unit, dict(zip(names, made, strict=False)), {})
            progress(done + 1, len(parts))


def _load(checkpoint: PackedCheckpoint[Any], name: str, dtype: torch.dtype | None) -> Tensor:
    """A tensor, floating ones as `dtype`; integers and flags are no weights to round.

    Raises UnsupportedError where float16 makes an infinity of a number.
    """
    tensor = checkpoint.load(name)
    cast = tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
    made = cast is not tensor or name.removesuffix(".weight") in checkpoint.modules
    if cast.dtype == torch.float16 and made and not all_finite(cast) and (cast is tensor or all_finite(tensor)):
        raise UnsupportedError(f"{name} holds numbers beyond float16; export with --dtype bf16 or fp32")
    return cast


def _origin(checkpoint: PackedCheckpoint[Any]) -> dict[str, str]:
    """What is known of the source; of one that this tool quantized, also the float model that it was made from."""
    known = {"tool": "cann-llm-quant", "tool_version": __version__, "source_layout": checkpoint.reader.layout}
    if isinstance(checkpoint.reader, NativeReader):
        provenance = checkpoint.reader.inference.provenance
        known["quantized_source_name"] = provenance.source_name
        known["quantized_source_fingerprint"] = provenance.source_fingerprint
    return known | {"packed_fingerprint": checkpoint.fingerprint()}
