"""An output folder whose weights are one file that is written in a go: whole or not there.

    OUT.partial/run.json   to which run it belongs
    OUT.partial/lock       held while a process writes
    OUT.partial/result/    the output as it grows; its renaming to OUT publishes it

The rules of `CheckpointWriter` about OUT, but nothing is continued: the same command starts again, and what a refusal
leaves is deleted.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from cann_llm_quant.checkpoint.claim import clear_leftover, lock_folder, retire, settle
from cann_llm_quant.checkpoint.journal import disk_errors, encode_json, remove, sync_folder, write_file
from cann_llm_quant.checkpoint.output_place import (
    check_output,
    check_replaceable,
    partial_path,
    place_errors,
)
from cann_llm_quant.errors import InputError, UsageError


class OutputFolder:
    """An output in the making, made by `open`; what is to be published is written into `result`."""

    def __init__(self, out: Path, lock: BinaryIO, *, overwrite: bool) -> None:
        self._out, self._lock, self._overwrite = out, lock, overwrite
        self._partial = partial_path(out)
        self.result = self._partial / "result"
        remove(self.result)
        self.result.mkdir()

    @classmethod
    def open(cls, out: Path, *, run: Mapping[str, Any], overwrite: bool, sources: Sequence[Path]) -> "OutputFolder":
        """Claim `out`. Raises what `CheckpointWriter.open` does."""
        out = Path(os.path.abspath(out))
        check_output(out, overwrite=overwrite, sources=sources)
        identity = json.loads(encode_json({"max_shard_bytes": 0, "run": run}))
        with disk_errors(partial_path(out), resumes=False), place_errors(out):
            clear_leftover(out, identity, overwrite)
            lock = lock_folder(partial_path(out))
            try:
                settle(out, partial_path(out), identity, overwrite)
                return cls(out, lock, overwrite=overwrite)
            except BaseException:
                lock.close()
                raise

    def __enter__(self) -> "OutputFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, InputError):
            self._abandon()
        self._lock.close()

    def _abandon(self) -> None:
        """Delete what a refused run wrote: nothing could go on with it, and another command would be held up.

        An OUT that was moved aside stays, for a run that puts it back.
        """
        if not self._partial.exists() or (self._partial / "replaced").exists():
            return
        with disk_errors(self._partial, resumes=False):
            retire(self._out, self._lock)

    def publish(self, files: Mapping[str, bytes]) -> Path:
        """Add small `files` by relative name and make OUT of `result`; returns OUT."""
        with disk_errors(self._partial, resumes=False):
            for name, content in files.items():
                path = self.result / name
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, content)
            sync_folder(self.result)
            self._make_way()
            os.replace(self.result, self._out)
            sync_folder(self._out.parent)
            retire(self._out, self._lock)
        return self._out

    def _make_way(self) -> None:
        if not os.path.lexists(self._out):
            return
        if not self._overwrite:
            raise UsageError(f"{self._out} has appeared meanwhile: move it away and run again, or pass --overwrite")
        check_replaceable(self._out)
        remove(self._partial / "replaced")
        os.replace(self._out, self._partial / "replaced")
