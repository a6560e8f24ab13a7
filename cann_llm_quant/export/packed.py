"""One door to quantized sources: which layout a folder or file has, by what it says and holds.

| evidence, in this order                              | layout             |
|------------------------------------------------------|--------------------|
| a GGUF file                                          | GGUF               |
| inference_config.json                                | native             |
| quant_model_description*.json                        | Ascend             |
| `quant_method` of config.json's quantization section | as it is named     |
| quantize_config.json beside packed weights           | GPTQ               |
| `quantization` in config.json                        | MLX                |
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.checkpoint.files import file_names
from cann_llm_quant.checkpoint.gguf_reader import GgufCheckpoint
from cann_llm_quant.checkpoint.hub import locate
from cann_llm_quant.checkpoint.source_quant import is_quantized_tensor, quantization_method, refuse_quantized
from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.export.ascend_description import is_described
from cann_llm_quant.export.ascend_reader import AscendReader
from cann_llm_quant.export.auto_round_config import METHOD as AUTO_ROUND
from cann_llm_quant.export.auto_round_config import OLD_METHOD as OLD_AUTO_ROUND
from cann_llm_quant.export.auto_round_reader import auto_round_reader
from cann_llm_quant.export.awq_reader import AwqReader
from cann_llm_quant.export.compressed_tensors_reader import CompressedTensorsReader
from cann_llm_quant.export.fp8_reader import Fp8Reader
from cann_llm_quant.export.gguf_reader import GgufReader
from cann_llm_quant.export.gptq_reader import GptqReader
from cann_llm_quant.export.inference_config import load_inference_config
from cann_llm_quant.export.layout import Reader
from cann_llm_quant.export.mlx_folder import MlxFolder, is_mlx
from cann_llm_quant.export.mlx_reader import MlxReader
from cann_llm_quant.export.native_reader import NativeReader, is_native
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.export.unfused_reader import unfused_packed
from cann_llm_quant.export.unreadable import refuse_unreadable

# By `quant_method`.
_READERS: Mapping[str, Callable[[Checkpoint], Reader]] = {
    "compressed-tensors": CompressedTensorsReader,
    "fp8": Fp8Reader,
    "fbgemm_fp8": Fp8Reader,
    "awq": AwqReader,
    "gptq": GptqReader,
    AUTO_ROUND: auto_round_reader,
    OLD_AUTO_ROUND: auto_round_reader,
}


def open_source(
    model: str, *, revision: str | None = None, allow_pickle: bool = False, dtype: torch.dtype | None = torch.float32
) -> Checkpoint:
    """Whatever a user names as a model: a quantized one as `PackedCheckpoint`, a float one as it is.

    `revision` applies to hub ids; `dtype` is that of dequantized weights (None: each in its own). The caller closes
    it. Raises InputError's kinds.
    """
    path = locate(model, revision=revision, allow_pickle=allow_pickle)
    inner = open_checkpoint(str(path), allow_pickle=allow_pickle, accept_quantized=True)
    if is_mlx(inner.config):
        folder = MlxFolder(inner)
        return PackedCheckpoint(folder, MlxReader(folder), dtype)
    reader = reader_of(inner)
    if isinstance(reader, NativeReader):
        return PackedCheckpoint(inner, reader, dtype)
    if reader is not None:
        return unfused_packed(PackedCheckpoint(inner, reader, dtype), dtype)
    inner.close()
    return open_checkpoint(str(path), allow_pickle=allow_pickle)


def open_packed(
    model: str | Path, dtype: torch.dtype | None = torch.float32, *, allow_pickle: bool = False
) -> PackedCheckpoint[Any]:
    """A quantized folder, GGUF file or hub id. Raises UnsupportedError for one that is stored in float."""
    checkpoint = open_source(str(model), allow_pickle=allow_pickle, dtype=dtype)
    if isinstance(checkpoint, PackedCheckpoint):
        return checkpoint
    checkpoint.close()
    raise UnsupportedError(f"{model} is not quantized: none of its linears is stored in codes; name a quantized model")


def reader_of(checkpoint: Checkpoint) -> Reader | None:
    """The reader of an opened source's layout; None where nothing in it is quantized.

    Raises CheckpointError or UnsupportedError for what its layout cannot mean or we cannot read.
    """
    if is_native(checkpoint.path):
        return NativeReader(checkpoint, load_inference_config(checkpoint.path))
    if isinstance(checkpoint, GgufCheckpoint):
        gguf = GgufReader(checkpoint)
        return gguf if gguf.linears else None
    if is_described(checkpoint.path):
        return AscendReader(checkpoint)
    refuse_unreadable(checkpoint.path, checkpoint.config, checkpoint.tensors)
    if not any(is_quantized_tensor(info) for info in checkpoint.tensors.values()):
        return None
    reader = _READERS.get(_method(checkpoint) or "")
    if reader is None:
        refuse_quantized(checkpoint.path, checkpoint.config, checkpoint.tensors.values())
    return reader(checkpoint)


def _method(checkpoint: Checkpoint) -> str | None:
    """What quantized a folder, by its config, or by the file that GPTQ writes beside it."""
    named = quantization_method(checkpoint.config)
    return named or ("gptq" if "quantize_config.json" in file_names(checkpoint.path) else None)
