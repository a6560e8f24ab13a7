"""Writes a checkpoint so that a kill at any moment costs at most the unit in work.

    OUT.partial/run.json       what decides the output, and the shard size; another run may not continue it
    OUT.partial/lock           held while a process writes
    OUT.partial/units/         one safetensors file per finished unit (a layer, the embedding, the head)
    OUT.partial/journal.jsonl  the units that are whole, in order
    OUT.partial/scratch/       the caller's spool files
    OUT.partial/plan.json      from the first moment of `finish`: what every shard will hold
    OUT.partial/result/        the output as it grows; its renaming to OUT publishes it

While OUT.partial exists the run can be continued; once it is gone OUT is whole. The last step renames
OUT.partial to OUT.partial.done before it is deleted, so that a kill in the middle of deleting leaves nothing
to continue from; the next run for OUT deletes the rest.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from torch import Tensor

from cann_llm_quant.checkpoint.claim import clear_leftover, lock_folder, retire, settle
from cann_llm_quant.checkpoint.journal import (
    Entry,
    append_entry,
    disk_errors,
    encode_json,
    file_sha256,
    read_entries,
    recover,
    remove,
    sync_folder,
    write_file,
)
from cann_llm_quant.checkpoint.layout import DTYPE_NAMES, read_header, read_tensors, settle_file, write_unsynced
from cann_llm_quant.checkpoint.merge import Plan, check_shards, index_json, plan_shards, write_shards
from cann_llm_quant.checkpoint.output_place import (
    check_output,
    check_replaceable,
    partial_path,
    place_errors,
)
from cann_llm_quant.errors import CannQuantError, CheckpointError, ResumeError, UsageError

__all__ = ["SUMS_NAME", "CheckpointWriter", "WrittenCheckpoint", "check_output"]

SUMS_NAME = "SHA256SUMS"
MERGED_BYTES = 256 << 20  # below, one file is handier than many and copying it costs little


@dataclass(frozen=True)
class WrittenCheckpoint:
    """What `finish` published: folder, weight files in order, bytes of all tensors and their number."""

    path: Path
    weight_files: tuple[str, ...]
    total_bytes: int
    tensors: int


class CheckpointWriter:
    """An output in the making, made by `CheckpointWriter.open`; leaving its context releases the lock."""

    def __init__(self, out: Path, *, lock: BinaryIO, max_shard_bytes: int, overwrite: bool, plan: Plan | None) -> None:
        self._out = out
        self._partial = partial_path(out)
        self._lock = lock
        self._max_shard_bytes = max_shard_bytes
        self._overwrite = overwrite
        self._plan = plan
        self._units = self._partial / "units"
        self._journal = self._partial / "journal.jsonl"
        self._result = self._partial / "result"
        self.scratch = self._partial / "scratch"
        self._units.mkdir(exist_ok=True)
        self.scratch.mkdir(exist_ok=True)
        self._entries = recover(self._journal, self._units) if plan is None else self._entries_of_merge(plan)
        self._journal_end = self._journal.stat().st_size  # of the lines that count
        self._staged = {entry.unit for entry in self._entries}
        self._owners: dict[str, str] = {}
        if plan is None:
            for entry in self._entries:
                self._owners |= {s.name: entry.unit for s in read_header(self._units / entry.file)[0]}

    @classmethod
    def open(
        cls,
        out: Path,
        *,
        run: dict[str, Any],
        max_shard_bytes: int = 5_000_000_000,
        overwrite: bool = False,
        sources: Sequence[Path] = (),
    ) -> "CheckpointWriter":
        """Start `out`, or continue what a run with the same `run` and shard size left in OUT.partial.

        `overwrite` lets an output of this tool at OUT be replaced (at the end of `finish`) and another run's
        OUT.partial be deleted. Raises UsageError for all that `check_output` refuses, when another process writes
        OUT, and when this very run had published OUT before it was killed; ResumeError, naming the differing
        keys, when OUT.partial belongs to another run.
        """
        if max_shard_bytes <= 0:
            raise UsageError(f"shard size {max_shard_bytes} is not a positive number of bytes")
        out = Path(os.path.abspath(out))
        check_output(out, overwrite=overwrite, sources=sources)
        partial = partial_path(out)
        identity = json.loads(encode_json({"max_shard_bytes": max_shard_bytes, "run": run}))
        with disk_errors(partial), place_errors(out):
            clear_leftover(out, identity, overwrite)
            lock = lock_folder(partial)
            try:
                plan = settle(out, partial, identity, overwrite)
                return cls(out, lock=lock, max_shard_bytes=max_shard_bytes, overwrite=overwrite, plan=plan)
            except BaseException:
                lock.close()
                raise

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock; the files stay for a later run."""
        self._lock.close()

    def abandon(self) -> None:
        """Delete what was written, of a run that turned out to have no end: OUT.partial would only be in the way."""
        with disk_errors(self._partial):
            retire(self._out, self._lock)

    @property
    def completed(self) -> dict[str, dict[str, Any]]:
        """Record of every unit that is whole on disk, in the order in which they were written."""
        return {entry.unit: entry.record for entry in self._entries}

    def write_unit(self, unit: str, tensors: Mapping[str, Tensor], record: dict[str, Any]) -> None:
        """Store one unit; when this returns, it survives a kill and a power cut.

        Tensors may be views, shared or on a device: each is copied to contiguous memory on its own while it
        is written. Raises CheckpointError when a tensor has no data or cannot be stored, or when its name or
        the unit is taken.
        """
        entry = self.stage_unit(unit, tensors, record)
        try:
            self.commit_unit(entry)
        except CannQuantError:  # the system's refusals among them; the unit may be written again
            self._staged.discard(unit)
            self._owners = {name: owner for name, owner in self._owners.items() if owner != unit}
            raise

    def stage_unit(self, unit: str, tensors: Mapping[str, Tensor], record: dict[str, Any]) -> Entry:
        """Hand one unit's bytes to the system; it counts from `commit_unit`, which must follow the order of staging.

        Raises CheckpointError as `write_unit`. One thread may stage while another commits.
        """
        if self._plan is not None or unit in self._staged:
            raise CheckpointError(f"unit {unit!r} is already written to {self._partial}")
        for name, tensor in tensors.items():
            self._check_storable(unit, name, tensor)
        path = self._units / _unit_file(len(self._staged))
        with disk_errors(path):
            size, digest = write_unsynced(path, tensors)
        self._staged.add(unit)
        self._owners |= dict.fromkeys(tensors, unit)
        return Entry(unit, path.name, size, digest, record)

    def commit_unit(self, entry: Entry) -> None:
        """Wait for the disk and enter a staged unit in the journal; from then on it survives a kill and a power cut.

        Raises CheckpointError where the unit before it was staged and not committed: behind a refused one none counts.
        """
        if entry.file != _unit_file(len(self._entries)):
            raise CheckpointError(f"unit {entry.unit!r} cannot count: the one before it was not written")
        path = self._units / entry.file
        with disk_errors(path):
            settle_file(path)
            sync_folder(self._units)
            end = append_entry(self._journal, entry, self._journal_end)
            sync_folder(self._partial)
        self._entries.append(entry)
        self._journal_end = end

    def _check_storable(self, unit: str, name: str, tensor: Tensor) -> None:
        if tensor.is_meta:
            raise CheckpointError(f"tensor {name!r} of unit {unit!r} is on the meta device and has no data to write")
        if tensor.layout != torch.strided or tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"tensor {name!r} of unit {unit!r} is {tensor.dtype} {tensor.layout}, which safetensors cannot hold"
            )
        if name == "__metadata__" or name in self._owners:
            owner = self._owners.get(name, "the file format")
            raise CheckpointError(f"tensor name {name!r} of unit {unit!r} is taken already by {owner!r}")

    def read_unit(self, unit: str) -> dict[str, Tensor]:
        """The tensors of a finished unit, in their own memory. Raises CheckpointError if it is not there."""
        for entry in self._entries:
            path = self._units / entry.file
            if entry.unit == unit and path.exists():
                return read_tensors(path)
        raise CheckpointError(f"unit {unit!r} is not in {self._units}: never written, or already merged into a shard")

    def finish(
        self,
        files: Mapping[str, bytes],
        metadata: Mapping[str, str] | None = None,
        *,
        stem: str = "model",
        file_per_unit: bool = False,
    ) -> WrittenCheckpoint:
        """Merge the units into shards, add the companion `files` and SHA256SUMS, check everything and publish OUT.

        `metadata` joins the safetensors headers. Names of weight files and of their index begin with `stem`. With
        `file_per_unit`, units of a large model become files as they are, without being copied. Raises UsageError for a
        file name that leaves the folder or collides, CheckpointError when a reopened shard is not what was written. Can
        be repeated after a kill.
        """
        with disk_errors(self._partial):
            plan = self._planned(dict(metadata or {}), stem, file_per_unit)
            index_name = f"{stem}.safetensors.index.json"
            companions = _checked_files(files, plan, index_name)
            if self._published():
                check_shards(plan, self._out)
            else:
                write_shards(plan, self._units, self._result)
                if len(plan.shards) > 1:
                    companions[index_name] = index_json(plan)
                companions[SUMS_NAME] = self._sums(plan, companions)
                _write_companions(companions, plan, self._result)
                check_shards(plan, self._result)
                self._publish()
            retire(self._out, self._lock)
        names = tuple(shard.name for shard in plan.shards)
        return WrittenCheckpoint(self._out, names, plan.total_size, len(plan.weight_map))

    def _sums(self, plan: Plan, companions: Mapping[str, bytes]) -> bytes:
        """What `sha256sum` would print of the result's files, in order of their names."""
        known = {entry.file: entry.sha256 for entry in self._entries}
        sums = {name: hashlib.sha256(content).hexdigest() for name, content in companions.items()}
        for shard in plan.shards:
            unit = shard.whole_unit
            sums[shard.name] = file_sha256(self._result / shard.name) if unit is None else known[unit]
        return "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)).encode()

    def _planned(self, metadata: dict[str, str], stem: str, file_per_unit: bool) -> Plan:
        if self._plan is None:
            units = [(entry.file, read_header(self._units / entry.file)[0]) for entry in self._entries]
            if not any(spans for _, spans in units):
                raise CheckpointError(f"no tensors were written to {self._partial}: there is nothing to publish")
            self._result.mkdir(exist_ok=True)
            large = sum(span.nbytes for _, spans in units for span in spans) > MERGED_BYTES
            apart = file_per_unit and large
            self._plan = plan_shards(units, self._max_shard_bytes, metadata, stem=stem, file_per_unit=apart)
            write_file(self._partial / "plan.json", self._plan.to_json())
        if self._plan.metadata != metadata:
            raise ResumeError(
                f"{self._partial} was being merged with metadata {self._plan.metadata}, now {metadata}: "
                f"delete it or pass --overwrite"
            )
        return self._plan

    def _entries_of_merge(self, plan: Plan) -> list[Entry]:
        """Recorded units during merging: each is whole still, or gone into shards that exist."""
        entries = read_entries(self._journal)
        sizes = {entry.file: entry.bytes for entry in entries}
        if self._published():
            return entries
        for shard in plan.shards:
            if (self._result / shard.name).exists():
                continue
            for piece in shard.pieces:
                path = self._units / piece.file
                if not path.exists() or path.stat().st_size != sizes.get(piece.file):
                    raise ResumeError(f"{path} is damaged, so {shard.name} cannot be made: delete {self._partial}")
        return entries

    def _published(self) -> bool:
        return self._plan is not None and not self._result.exists() and self._out.exists()

    def _publish(self) -> None:
        if os.path.lexists(self._out):
            if not self._overwrite:
                raise UsageError(f"{self._out} has appeared meanwhile: move it away and run again, or pass --overwrite")
            check_replaceable(self._out)
            remove(self._partial / "replaced")
            os.replace(self._out, self._partial / "replaced")
        os.replace(self._result, self._out)
        sync_folder(self._out.parent)


def _unit_file(index: int) -> str:
    return f"{index:05d}.safetensors"


def _checked_files(files: Mapping[str, bytes], plan: Plan, index_name: str) -> dict[str, bytes]:
    taken = {shard.name for shard in plan.shards} | {index_name, SUMS_NAME}
    for name in files:
        path = PurePosixPath(name)
        if (
            not name
            or path.is_absolute()
            or ".." in path.parts
            or "\\" in name
            or "\0" in name
            or path == PurePosixPath()
        ):
            raise UsageError(f"companion file name {name!r} would leave the output folder")
        if name in taken or name.endswith(".tmp"):
            raise UsageError(f"companion file name {name!r} belongs to the weights")
    return dict(files)


def _write_companions(files: Mapping[str, bytes], plan: Plan, result: Path) -> None:
    """Write the files beside the weights; whatever an earlier attempt left and nobody asks for goes."""
    wanted = {result / name for name in files} | {result / shard.name for shard in plan.shards}
    for path in sorted(result.rglob("*"), reverse=True):
        if path not in wanted and not any(path in other.parents for other in wanted):
            remove(path)
    for name, data in files.items():
        path = result / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data)
    sync_folder(result)
