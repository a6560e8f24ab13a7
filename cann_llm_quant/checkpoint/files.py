"""The files of a model folder, read so that every failure names the file and says what to do."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cann_llm_quant.errors import CheckpointError

_LFS_POINTER = b"version https://git-lfs"


def read_failure(path: Path, error: OSError) -> CheckpointError:
    """The error to raise when the operating system would not give us `path`."""
    return CheckpointError(f"cannot read {path}: {error.strerror or error}; check the file and its permissions")


def file_names(folder: Path) -> list[str]:
    """Names of the files (or links to files) in `folder`, sorted. Raises CheckpointError when it cannot be listed."""
    try:
        return sorted(path.name for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise read_failure(folder, error) from error


def refuse_lfs_pointer(path: Path) -> None:
    """Raise CheckpointError when `path` is the small text that git stores in place of a large file."""
    try:
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
    except OSError as error:
        raise read_failure(path, error) from error
    if start == _LFS_POINTER:
        raise CheckpointError(f"{path} is a git-lfs pointer, not the file itself; run `git lfs pull` in its folder")


def read_bytes(path: Path) -> bytes:
    """The whole of a small file. Raises CheckpointError when it cannot be read or is a git-lfs pointer."""
    refuse_lfs_pointer(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise read_failure(path, error) from error


def read_range(path: Path, offset: int, count: int) -> Tensor:
    """`count` bytes of a file from `offset` as a new uint8 vector. Raises CheckpointError when the file is shorter.

    They go straight into the tensor's memory: reading costs its size once and leaves no mapped page behind.
    """
    data = torch.empty(count, dtype=torch.uint8)
    target = memoryview(data.numpy().data)
    done = 0
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while done < count:  # one read gives at most 2 GiB on Linux
                step = file.readinto(target[done:])
                if not step:
                    raise CheckpointError(
                        f"{path} ends at byte {offset + done}, {count - done} bytes early; fetch it again"
                    )
                done += step
    except OSError as error:
        raise read_failure(path, error) from error
    return data


def parse_json_object(data: bytes, path: Path) -> dict[str, Any]:
    """The JSON object in `data`, which was read from `path`. Raises CheckpointError when it is not one."""
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{path} is not valid JSON ({reason}); fetch the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object; fetch the file again")
    return value
