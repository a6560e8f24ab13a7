"""A native directory written back as a plain Hugging Face checkpoint of dequantized weights.

Any tool can then measure it.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from cann_llm_quant.checkpoint.writer import CheckpointWriter, WrittenCheckpoint
from cann_llm_quant.export.model_config import json_bytes, output_config
from cann_llm_quant.export.native_reader import open_native
from cann_llm_quant.models import arch_from_checkpoint


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

    One layer is in memory at a time. Raises CheckpointError for a source that `quantize` did not write.
    """
    with open_native(source, dtype) as checkpoint:
        arch = arch_from_checkpoint(checkpoint)
        units = {"outer": list(arch.outer_shapes())}
        units |= {f"layer.{layer.index}": list(layer.tensor_shapes()) for layer in arch.layers}
        claimed = {name for names in units.values() for name in names}
        units["extra"] = [name for name in checkpoint.tensors if name not in claimed]
        run = {
            "export": "float",
            "source": checkpoint.fingerprint(),
            "dtype": str(dtype),
            "max_shard_bytes": max_shard_bytes,
        }
        with CheckpointWriter.open(output, run=run, max_shard_bytes=max_shard_bytes, overwrite=overwrite) as writer:
            for done, (unit, names) in enumerate(units.items()):
                if names and unit not in writer.completed:
                    tensors = {name: checkpoint.load(name) for name in names}
                    writer.write_unit(unit, {n: t if dtype is None else t.to(dtype) for n, t in tensors.items()}, {})
                progress(done + 1, len(units))
            sizes: Counter[torch.dtype] = Counter()
            for name in claimed:
                sizes[checkpoint.tensors[name].dtype if dtype is None else dtype] += checkpoint.tensors[name].nbytes
            stored = str(sizes.most_common(1)[0][0]).removeprefix("torch.")
            config = output_config(checkpoint.config, arch, stored, None)
            return writer.finish(checkpoint.companion_files() | {"config.json": json_bytes(config)})
