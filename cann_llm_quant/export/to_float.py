"""A native directory written back as a plain Hugging Face checkpoint of dequantized weights.

Any tool can then measure it. `float_export.json` beside the weights says where they come from, and that `--overwrite`
may replace the folder.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from cann_llm_quant import __version__
from cann_llm_quant.checkpoint.writer import CheckpointWriter, WrittenCheckpoint, check_output
from cann_llm_quant.export.model_config import json_bytes, output_config
from cann_llm_quant.export.native_reader import NativeReader, open_native
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.models import arch_from_checkpoint

FILE_NAME = "float_export.json"


def export_to_float(
    source: Path,
    output: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> WrittenCheckpoint:
    """Dequantize every packed linear; `dtype` None keeps the storage type, float32 loses nothing.

    One layer is in memory at a time. Raises UsageError for an `output` that cannot be written or must not be replaced,
    CheckpointError for a source that `quantize` did not write.
    """
    check_output(output, overwrite=overwrite, sources=[source])
    with open_native(source, dtype) as checkpoint:
        arch = arch_from_checkpoint(checkpoint)
        units = {"outer": list(arch.outer_shapes())}
        units |= {f"layer.{layer.index}": list(layer.tensor_shapes()) for layer in arch.layers}
        claimed = {name for names in units.values() for name in names}
        units["extra"] = [name for name in checkpoint.tensors if name not in claimed]
        run = {"export": "float", "source": checkpoint.fingerprint(), "dtype": str(dtype)}
        with CheckpointWriter.open(
            output, run=run, max_shard_bytes=max_shard_bytes, overwrite=overwrite, sources=[source]
        ) as writer:
            for done, (unit, names) in enumerate(units.items()):
                if names and unit not in writer.completed:
                    writer.write_unit(unit, {name: _cast(checkpoint.load(name), dtype) for name in names}, {})
                progress(done + 1, len(units))
            sizes: Counter[torch.dtype] = Counter()
            for name in claimed:
                sizes[dtype or checkpoint.tensors[name].dtype] += checkpoint.tensors[name].nbytes
            stored = str(sizes.most_common(1)[0][0]).removeprefix("torch.")
            config = output_config(checkpoint.config, arch, stored, None)
            files = {"config.json": json_bytes(config), FILE_NAME: json_bytes(_origin(checkpoint))}
            return writer.finish(checkpoint.companion_files() | files)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Floating tensors as `dtype`; integers and flags are no weights to round."""
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _origin(checkpoint: PackedCheckpoint[NativeReader]) -> dict[str, str]:
    provenance = checkpoint.reader.inference.provenance
    return {
        "tool": "cann-llm-quant",
        "tool_version": __version__,
        "quantized_source_name": provenance.source_name,
        "quantized_source_fingerprint": provenance.source_fingerprint,
        "packed_fingerprint": checkpoint.fingerprint(),
    }
