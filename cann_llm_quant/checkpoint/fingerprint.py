"""A digest of a checkpoint that is cheap for any size: everything small is hashed whole, tensor data by samples.

sha256 over the config's bytes, then for each weight file its name, size, header bytes and 16 evenly spaced samples of
64 KiB (the whole file when it is not longer than these). Each part is preceded by its length, so that no two different
sequences of parts give the same bytes. Where the folder lies does not matter.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from cann_llm_quant.checkpoint.files import read_failure

SAMPLES = 16
SAMPLE_BYTES = 64 * 1024


def fingerprint(config: bytes, files: Sequence[tuple[Path, bytes]]) -> str:
    """Hex sha256 of `config` and of weight files, given as (path, header bytes). Raises CheckpointError."""
    digest = hashlib.sha256()
    for part in (config, *(part for path, header in files for part in _file_parts(path, header))):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _file_parts(path: Path, header: bytes) -> list[bytes]:
    try:
        size = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            samples = []
            for offset in sample_offsets(size):
                file.seek(offset)
                samples.append(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise read_failure(path, error) from error
    return [os.fsencode(path.name), str(size).encode("ascii"), header, *samples]


def sample_offsets(size: int) -> list[int]:
    """Where the samples of a file of `size` bytes begin; the first is its start, the last reaches its end."""
    if size <= SAMPLES * SAMPLE_BYTES:
        return list(range(0, size, SAMPLE_BYTES))
    return [i * (size - SAMPLE_BYTES) // (SAMPLES - 1) for i in range(SAMPLES)]
