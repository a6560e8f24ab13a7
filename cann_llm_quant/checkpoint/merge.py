"""Unit files to shards: plan once, then copy raw bytes, one shard at a time.

Units keep their order. A unit goes whole into the open shard if it fits there, else it opens the next one; a
unit larger than a shard is split between tensors; a tensor larger than a shard gets its own. A shard that is
exactly one unit has that unit's bytes already and is renamed instead of copied. The plan is on disk before
the first shard, since finished shards let go of their units: after a kill it alone knows what the shards must
hold.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cann_llm_quant.checkpoint.journal import CHUNK_BYTES, sync_folder
from cann_llm_quant.checkpoint.layout import (
    Span,
    encode_header,
    entry_bound,
    header_bound,
    lay_out,
    read_header,
)
from cann_llm_quant.errors import CheckpointError


@dataclass(frozen=True)
class Piece:
    """One tensor that goes into a shard: the unit file that it comes from and its span there."""

    file: str
    span: Span


@dataclass(frozen=True)
class Shard:
    """One output file; `whole_unit` names the unit file that it is, byte for byte, if there is one."""

    name: str
    pieces: tuple[Piece, ...]
    whole_unit: str | None

    @property
    def spans(self) -> list[Span]:
        """The shard's tensors where they lie in it."""
        return lay_out(piece.span for piece in self.pieces)

    @property
    def ordered(self) -> list[Piece]:
        """The pieces in the order of `spans`."""
        return sorted(self.pieces, key=lambda piece: -piece.span.width)


@dataclass(frozen=True)
class Plan:
    """Every shard of the output, and the metadata that their headers carry."""

    shards: tuple[Shard, ...]
    metadata: dict[str, str]

    @property
    def weight_map(self) -> dict[str, str]:
        """Tensor name to shard, in the order of the units."""
        return {piece.span.name: shard.name for shard in self.shards for piece in shard.pieces}

    @property
    def total_size(self) -> int:
        """Bytes of all tensors (not of the files)."""
        return sum(piece.span.nbytes for shard in self.shards for piece in shard.pieces)

    def to_json(self) -> bytes:
        """The plan as it is stored."""
        return json.dumps(asdict(self), ensure_ascii=False).encode("utf-8")

    @classmethod
    def from_json(cls, data: bytes) -> "Plan":
        """Read what `to_json` wrote."""
        stored = json.loads(data.decode("utf-8"))
        return cls(tuple(_shard_from_json(shard) for shard in stored["shards"]), stored["metadata"])


def _shard_from_json(stored: dict[str, Any]) -> Shard:
    pieces = []
    for piece in stored["pieces"]:
        span = piece["span"]
        pieces.append(Piece(piece["file"], Span(**{**span, "shape": tuple(span["shape"])})))
    return Shard(stored["name"], tuple(pieces), stored["whole_unit"])


def plan_shards(
    units: Sequence[tuple[str, Sequence[Span]]],
    max_shard_bytes: int,
    metadata: Mapping[str, str],
    *,
    stem: str = "model",
    file_per_unit: bool = False,
) -> Plan:
    """Divide `units` (file, tensors; in order) into files of at most `max_shard_bytes`, headers included.

    Their names begin with `stem`. `file_per_unit` lets no two units share a file.
    """
    frame = header_bound([], metadata)
    groups: list[list[Piece]] = [[]]
    size = frame
    for file, spans in units:
        costs = [span.nbytes + entry_bound(span) for span in spans]
        fits_alone = frame + sum(costs) <= max_shard_bytes
        if groups[-1] and (file_per_unit or (fits_alone and size + sum(costs) > max_shard_bytes)):
            groups.append([])
            size = frame
        for span, cost in zip(spans, costs, strict=True):
            if groups[-1] and size + cost > max_shard_bytes:
                groups.append([])
                size = frame
            groups[-1].append(Piece(file, span))
            size += cost
    counts = {file: len(spans) for file, spans in units}
    groups = [group for group in groups if group]
    names = shard_names(len(groups), stem)
    shards = (
        Shard(name, tuple(group), _whole_unit(group, counts, metadata))
        for name, group in zip(names, groups, strict=True)
    )
    return Plan(tuple(shards), dict(metadata))


def _whole_unit(group: Sequence[Piece], counts: Mapping[str, int], metadata: Mapping[str, str]) -> str | None:
    files = {piece.file for piece in group}
    file = group[0].file
    # Extra metadata changes the header, and unit files are written without.
    return file if len(files) == 1 and counts[file] == len(group) and not metadata else None


def shard_names(count: int, stem: str = "model") -> list[str]:
    """File names of `count` shards, as transformers and every other loader expects them."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]


def write_shards(plan: Plan, units: Path, result: Path) -> None:
    """Write what is missing of the plan into `result`; a unit file goes as soon as its last shard is whole.

    A shard's name appears by rename only, so that a shard that is there is whole. Besides the units and the
    shards the disk holds at most one shard (or one unit, where a unit is larger than a shard) twice.
    """
    last_use = {piece.file: shard.name for shard in plan.shards for piece in shard.pieces}
    for shard in plan.shards:
        target = result / shard.name
        if not target.exists():
            if shard.whole_unit is not None:
                os.replace(units / shard.whole_unit, target)
            else:
                temporary = result / (shard.name + ".tmp")
                _copy(shard, plan.metadata, units, temporary)
                os.replace(temporary, target)
            sync_folder(result)
            sync_folder(units)
        for file, name in last_use.items():
            if name == shard.name:
                (units / file).unlink(missing_ok=True)


def _copy(shard: Shard, metadata: Mapping[str, str], units: Path, target: Path) -> None:
    with target.open("wb") as out:
        out.write(encode_header(shard.spans, metadata))
        source: BinaryIO | None = None
        opened, start = "", 0
        try:
            for piece in shard.ordered:
                if source is None or piece.file != opened:
                    if source is not None:
                        source.close()
                    opened = piece.file
                    start = read_header(units / opened)[1]
                    source = (units / opened).open("rb")
                source.seek(start + piece.span.begin)
                _copy_bytes(source, out, piece.span.nbytes)
        finally:
            if source is not None:
                source.close()
        out.flush()
        os.fsync(out.fileno())


def _copy_bytes(source: BinaryIO, out: BinaryIO, count: int) -> None:
    while count:
        chunk = source.read(min(count, CHUNK_BYTES))
        if not chunk:
            raise CheckpointError(f"{source.name} ended early while it was copied: delete the unfinished output")
        out.write(chunk)
        count -= len(chunk)


def check_shards(plan: Plan, folder: Path) -> None:
    """Reopen every shard and compare its header with the plan. Raises CheckpointError where they differ."""
    for shard in plan.shards:
        path = folder / shard.name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing though it was written: delete the unfinished output")
        spans, _ = read_header(path)
        if spans != shard.spans:
            raise CheckpointError(f"{path} holds other tensors than were written: delete the unfinished output")


def index_json(plan: Plan) -> bytes:
    """`model.safetensors.index.json`: which shard holds which tensor, and the bytes of all tensors."""
    index = {"metadata": {"total_size": plan.total_size}, "weight_map": dict(sorted(plan.weight_map.items()))}
    return (json.dumps(index, ensure_ascii=False, indent=2) + "\n").encode("utf-8")
