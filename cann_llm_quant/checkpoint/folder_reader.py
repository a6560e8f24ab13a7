"""A model folder in the Hugging Face layout: `config.json`, weight shards of one kind, companion files."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from cann_llm_quant.checkpoint.base import TensorInfo
from cann_llm_quant.checkpoint.companions import companion_files
from cann_llm_quant.checkpoint.files import file_names, parse_json_object, read_bytes
from cann_llm_quant.checkpoint.fingerprint import fingerprint
from cann_llm_quant.checkpoint.index import check_index, find_weight_files
from cann_llm_quant.checkpoint.pickle_reader import PickleShard
from cann_llm_quant.checkpoint.safetensors_reader import SafetensorsShard
from cann_llm_quant.errors import CheckpointError


@runtime_checkable
class Shard(Protocol):
    """One weight file: what it holds, and one tensor of it at a time.

    `alone` says that reading leaves something in memory, so that two threads must not do so at once.
    """

    alone: bool
    path: Path
    header: bytes
    tensors: dict[str, TensorInfo]

    def load(self, name: str) -> Tensor:
        """One tensor, owning its memory."""
        ...

    def release(self) -> None:
        """Give back whatever reading left in memory."""
        ...


class FolderCheckpoint:
    """Tensors, config and companions of one folder; implements `base.Checkpoint`."""

    def __init__(self, path: Path, config_bytes: bytes, config: dict[str, Any], shards: Sequence[Shard]) -> None:
        self._path = path
        self._config = config
        self._config_bytes = config_bytes
        self._shards = tuple(shards)
        self._home = {name: shard for shard in self._shards for name in shard.tensors}
        infos = {name: shard.tensors[name] for name, shard in self._home.items()}
        self._tensors: Mapping[str, TensorInfo] = MappingProxyType(infos)
        self._last: Shard | None = None
        self._reading = Lock()

    @property
    def path(self) -> Path:
        """The folder."""
        return self._path

    @property
    def config(self) -> dict[str, Any]:
        """The parsed `config.json`, without a quantization field that was found stale and ignored."""
        return self._config

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every stored tensor, shard after shard, in the order in which the data lies."""
        return self._tensors

    def with_config(self, config: dict[str, Any]) -> "FolderCheckpoint":
        """The same files under another config; the fingerprint stays that of the files."""
        return FolderCheckpoint(self._path, self._config_bytes, config, self._shards)

    def load(self, name: str) -> Tensor:
        """One tensor on the CPU in its stored dtype, owning its memory. Raises CheckpointError when it is not there."""
        shard = self._home.get(name)
        if shard is None:
            raise CheckpointError(f"{self._path} has no tensor {name!r}; its files hold {len(self._tensors)} others")
        with self._reading if shard.alone else nullcontext():
            last, self._last = self._last, shard
            if last is not None and last is not shard:
                last.release()
            return shard.load(name)

    def companion_files(self) -> dict[str, bytes]:
        """Tokenizer, templates, generation config, licence and model card, byte for byte."""
        return companion_files(self._path)

    def fingerprint(self) -> str:
        """Hex sha256 of config, headers and sampled data; see `fingerprint.py`."""
        return fingerprint(self._config_bytes, [(shard.path, shard.header) for shard in self._shards])

    def close(self) -> None:
        """Release what shards keep in memory."""
        for shard in self._shards:
            shard.release()

    def __enter__(self) -> "FolderCheckpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_folder(folder: Path, *, allow_pickle: bool) -> FolderCheckpoint:
    """Open a model folder after checking config, index and shard headers. Raises CheckpointError.

    Safetensors are taken where there are any; `.bin` only when there are none and `allow_pickle` is set.
    """
    config_path = folder / "config.json"
    if config_path.name not in file_names(folder):
        raise CheckpointError(
            f"{folder} has no config.json, so it is not a model folder; pass the folder that holds it"
        )
    config_bytes = read_bytes(config_path)
    config = parse_json_object(config_bytes, config_path)
    files = find_weight_files(folder, ".safetensors", "model")
    shards: list[Shard]
    if files.names:
        shards = [SafetensorsShard(folder / name) for name in files.names]
    else:
        files = find_weight_files(folder, ".bin", "pytorch_model")
        _check_pickle_request(folder, files.names, allow_pickle)
        shards = [PickleShard(folder / name) for name in files.names]
    check_index(folder, files.weight_map, {shard.path.name: shard.tensors for shard in shards})
    if not any(shard.tensors for shard in shards):
        raise CheckpointError(f"the weight files of {folder} hold no tensors; fetch them again")
    return FolderCheckpoint(folder, config_bytes, config, shards)


def _check_pickle_request(folder: Path, names: Sequence[str], allow_pickle: bool) -> None:
    if not names:
        gguf = sorted(path.name for path in folder.glob("*.gguf"))
        advice = f"pass {folder / gguf[0]} itself" if gguf else "fetch them, or pass the folder that holds them"
        raise CheckpointError(f"{folder} has no weights (*.safetensors or pytorch_model*.bin); {advice}")
    if not allow_pickle:
        raise CheckpointError(
            f"{folder} has only pickle weights ({names[0]}), and opening a pickle can run code; use a safetensors "
            "version of the model or pass --allow-pickle (weights are then read as data only)"
        )
