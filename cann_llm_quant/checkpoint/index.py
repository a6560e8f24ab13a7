"""Which weight files make up a model folder, and whether an index tells the truth about them.

An index (`model.safetensors.index.json`) maps tensor names to shard file names. It must agree with the shard headers
exactly; `metadata.total_size` is not compared, because many published indexes carry a stale or differently counted one.
Shard names are plain file names: no index leads out of its folder. Symbolic links that the user's own file system holds
are followed (the Hugging Face cache consists of them).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cann_llm_quant.checkpoint.files import file_names, parse_json_object, read_bytes
from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.shown import shown, shown_name

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})(?P<suffix>\.\w+)")


@dataclass(frozen=True)
class WeightFiles:
    """Weight file names of one kind, sorted, and the index (name to file) where the folder has one."""

    names: tuple[str, ...]
    weight_map: Mapping[str, str] | None


def find_weight_files(folder: Path, suffix: str, stem: str) -> WeightFiles:
    """The `suffix` files of `folder` that hold the model: those of its index, else `stem` + `suffix`, else all.

    For safetensors any name counts, for `.bin` only names that begin with `stem`, because trainers leave other pickles.
    `names` is empty when there is none. Raises CheckpointError for a broken or contradictory index and missing shards.
    """
    present = file_names(folder)
    single = stem + suffix
    indexes = [name for name in present if name.endswith(suffix + ".index.json")]
    if len(indexes) > 1 and single + ".index.json" in indexes:
        indexes = [single + ".index.json"]
    if len(indexes) > 1:
        raise CheckpointError(f"{folder} has several indexes ({', '.join(indexes)}); leave only the right one")
    if indexes:
        return _indexed_files(folder, indexes[0], present, single)
    if single in present:
        return WeightFiles((single,), None)
    matching = [n for n in present if n.endswith(suffix) and (suffix == ".safetensors" or n.startswith(stem))]
    _refuse_missing_numbers(folder, matching)
    return WeightFiles(tuple(matching), None)


def check_index(folder: Path, weight_map: Mapping[str, str] | None, shards: Mapping[str, Iterable[str]]) -> None:
    """Compare an index (None: there is none) with the tensor names that each shard really holds.

    Raises CheckpointError for the first tensor that two shards hold, that the index places wrongly, that no shard holds
    or that the index lacks.
    """
    found: dict[str, str] = {}
    for file, names in shards.items():
        for name in names:
            if name in found:
                raise CheckpointError(
                    f"{folder}: tensor {shown(name)} is in both {found[name]} and {file}; remove one file"
                )
            found[name] = file
    if weight_map is None:
        return
    advice = "fetch the index again or write it anew from the files"
    for name, file in weight_map.items():
        if name not in found:
            raise CheckpointError(
                f"{folder}: the index lists tensor {shown(name)} in {file}, but no file holds it; {advice}"
            )
        if found[name] != file:
            raise CheckpointError(
                f"{folder}: the index puts tensor {shown(name)} in {file}, it is in {found[name]}; {advice}"
            )
    for name, file in found.items():
        if name not in weight_map:
            raise CheckpointError(f"{folder}: {file} holds tensor {shown(name)}, which the index lacks; {advice}")


def _indexed_files(folder: Path, index_name: str, present: list[str], single: str) -> WeightFiles:
    index = folder / index_name
    weight_map = _read_weight_map(index)
    names = sorted(set(weight_map.values()))
    for name in names:
        if name not in present:
            raise CheckpointError(
                f"{index} names {shown_name(name)}, which is not in {folder}; fetch the missing shard"
            )
    if single in present and single not in names:
        raise CheckpointError(f"{folder} has both {single} and an index of other files; remove the one that is stale")
    _refuse_unlisted_numbers(index, names, present)
    return WeightFiles(tuple(names), weight_map)


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = parse_json_object(read_bytes(index), index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map of tensor names to files; fetch it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file:
            raise CheckpointError(
                f"{index} maps tensor {shown(name)} to {shown(file)}, not to a file name; fetch it again"
            )
        if file in (".", "..") or any(character in file for character in "/\\:\0"):
            raise CheckpointError(
                f"{index} maps tensor {shown(name)} to {shown(file)}, which is not a plain file name; refused, because "
                "a shard must lie beside its index"
            )
    return weight_map


def _refuse_unlisted_numbers(index: Path, names: list[str], present: list[str]) -> None:
    """A shard of the same numbered series that the index leaves out holds weights that would be lost silently."""
    series = {_series(name) for name in names} - {None}
    for name in present:
        if name not in names and _series(name) in series:
            raise CheckpointError(
                f"{index} does not mention {name}, which belongs to the same series; fetch the index again"
            )


def _refuse_missing_numbers(folder: Path, names: list[str]) -> None:
    """Without an index, `-00001-of-00003` still promises two more files."""
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is None:
            continue
        for number in range(1, int(match["total"]) + 1):
            wanted = f"{match['stem']}-{number:05d}-of-{match['total']}{match['suffix']}"
            if wanted not in names:
                raise CheckpointError(f"{folder} has {name} but not {wanted}; fetch the missing shard")


def _series(name: str) -> tuple[str, str, str] | None:
    match = _NUMBERED.fullmatch(name)
    return (match["stem"], match["total"], match["suffix"]) if match else None
