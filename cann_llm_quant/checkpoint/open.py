"""One door to every kind of checkpoint: a model folder, a GGUF file or a hub id.

A new kind (natively quantized, foreign quantized) is another implementation of `base.Checkpoint`, chosen here.
"""

from pathlib import Path

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.checkpoint.files import file_names
from cann_llm_quant.checkpoint.folder_reader import open_folder
from cann_llm_quant.checkpoint.gguf_reader import GgufCheckpoint, is_gguf_file
from cann_llm_quant.checkpoint.hub import locate
from cann_llm_quant.checkpoint.source_quant import float_source_config
from cann_llm_quant.checkpoint.unfused import unfused
from cann_llm_quant.errors import CheckpointError


def open_checkpoint(
    model: str,
    *,
    revision: str | None = None,
    allow_pickle: bool = False,
    ignore_source_quant: bool = False,
    accept_quantized: bool = False,
) -> Checkpoint:
    """Open a model folder, a GGUF file or a hub id (`revision` applies to the latter) after validating its files.

    `allow_pickle` admits `.bin` weights where there are no safetensors. A folder that stores quantized tensors is
    refused unless `accept_quantized`; one whose config merely claims so is refused unless `ignore_source_quant`, which
    drops the claim. A family that fuses or renames its matrices is shown as the plain one that it is (`unfused.py`),
    but as it is stored with `accept_quantized`. Raises CheckpointError, UnsupportedError or UsageError.
    """
    path = locate(model, revision=revision, allow_pickle=allow_pickle)
    if path.is_file():
        if not is_gguf_file(path):
            raise CheckpointError(f"{path} is a file but no GGUF model; pass the folder that holds config.json")
        return GgufCheckpoint(path)
    gguf = _only_gguf(path)
    if gguf is not None:
        return GgufCheckpoint(gguf, companions=path)
    folder = open_folder(path, allow_pickle=allow_pickle)
    if accept_quantized:
        return folder
    config = float_source_config(path, folder.config, folder.tensors.values(), ignore_stale=ignore_source_quant)
    return unfused(folder.with_config(config))


def _only_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder that holds no `config.json`; None when it holds no GGUF or is a model folder."""
    names = file_names(folder)
    ggufs = [name for name in names if name.endswith(".gguf")]
    if "config.json" in names or not ggufs:
        return None
    if len(ggufs) > 1:
        raise CheckpointError(f"{folder} holds {len(ggufs)} GGUF files ({', '.join(ggufs)}); pass one of them")
    return folder / ggufs[0]
