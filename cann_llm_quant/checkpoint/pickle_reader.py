"""One PyTorch `.bin` file, read with `torch.load(weights_only=True)` only: data, never code.

A file in the zip format is mapped for the time of one `load`; the format from before torch 1.6 has to be read whole, so
the last such file stays in memory while its tensors are asked for.
"""

import pickle
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from cann_llm_quant.checkpoint.base import TensorInfo
from cann_llm_quant.checkpoint.files import read_failure, refuse_lfs_pointer
from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.shown import shown


class PickleShard:
    """The tensors of one `.bin` file.

    Raises CheckpointError naming the file when it is unreadable, is no flat mapping of names to tensors, or asks for
    anything that plain tensors do not need.
    """

    header = b""  # a pickle has none; the fingerprint's samples cover it

    def __init__(self, path: Path) -> None:
        refuse_lfs_pointer(path)
        self.path = path
        self._whole: dict[str, Tensor] | None = None
        self._mapped = _is_zip(path)
        self.alone = not self._mapped
        self.tensors = {
            name: TensorInfo(name, t.dtype, tuple(t.shape), path.name, t.numel() * t.element_size())
            for name, t in _read(path, self._mapped).items()
        }

    def load(self, name: str) -> Tensor:
        """The tensor in its stored dtype, owning its memory. `name` must be one of `tensors`."""
        if self._mapped:
            return _own(_read(self.path, mapped=True)[name])
        whole = self._whole = self._whole or _read(self.path, mapped=False)
        return _own(whole[name])

    def release(self) -> None:
        """Forget what an old-format file left in memory."""
        self._whole = None


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _is_zip(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except OSError as error:
        raise read_failure(path, error) from error


def _read(path: Path, mapped: bool) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors (or is no pickle) and is refused, because loading it could run code; "
            "use a safetensors version of the model"
        ) from error
    except OSError as error:
        raise read_failure(path, error) from error
    except (RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is not a valid PyTorch file ({reason}); fetch it again") from error
    return _flat_tensors(path, state)


def _flat_tensors(path: Path, state: object) -> dict[str, Tensor]:
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a mapping of names to tensors")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            kind = type(value).__name__
            raise CheckpointError(
                f"{path}: entry {shown(name)} is a {kind}; expected a flat mapping of names to tensors"
            )
    return dict(state)
