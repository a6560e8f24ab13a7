"""`quant_model_description.json` of the AscendV1 layout: the type of every stored tensor, and what holds for all.

    "model_quant_type"  the type of most weights           "version"     "1.0.0"; absent or 0: int4 is not packed
    "group_size"        of int4 weights, 0 without groups  "<tensor>"    its linear's type, FLOAT, or C8 of KV scales
    "kv_cache_type", "kv_quant_type"  "C8" where the KV cache is int8; vllm-ascend reads the one, MindIE the other

The value at `<linear>.weight` alone selects the method. Runtimes look every linear up and fail on one that is missing
(C25), so files and description must name the same tensors; only a tied head may be named without being stored.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cann_llm_quant.checkpoint.files import file_names, parse_json_object, read_bytes
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.shown import shown, shown_name

FILE_NAME = "quant_model_description.json"
VERSION = "1.0.0"
_UNPACKED_VERSIONS = ("0.0.0", "0", "")
KV_TYPE = "C8"


@dataclass(frozen=True)
class Description:
    """The file's content: `types` by tensor name, and whether int4 codes are packed (`version` 1.0.0)."""

    path: Path
    types: Mapping[str, str]
    packed: bool
    group_size: int
    kv_cache: bool


def description_bytes(types: Mapping[str, str], model_type: str, group_size: int, *, kv_cache: bool) -> bytes:
    """The file that names these types."""
    document: dict[str, Any] = {"model_quant_type": model_type, **types, "version": VERSION, "group_size": group_size}
    if kv_cache:
        document |= {"kv_cache_type": KV_TYPE, "kv_quant_type": KV_TYPE}
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def load_description(folder: Path) -> Description:
    """The description of a folder, whatever its type is appended to the name.

    Raises CheckpointError when there is none, or several, or it is damaged; UnsupportedError for another version and
    for features that change what the weights mean.
    """
    names = _descriptions(folder)
    if len(names) != 1:
        found = f"holds {len(names)} of them ({', '.join(names)})" if names else "has none"
        raise CheckpointError(f"{folder} {found}: an Ascend model has one {FILE_NAME}; restore it")
    path = folder / names[0]
    document = parse_json_object(read_bytes(path), path)
    _refuse_rotations(path, document)
    group_size = document.get("group_size", 0)
    if not isinstance(group_size, int) or isinstance(group_size, bool) or group_size < 0:
        raise CheckpointError(
            f"{path}: group_size is {shown(group_size)}, expected a whole number; fetch the file again"
        )
    kv_types = {str(document[key]) for key in ("kv_cache_type", "kv_quant_type") if key in document}
    if kv_types - {KV_TYPE}:
        raise UnsupportedError(
            f"{path}: a KV cache of type {shown_name(min(kv_types - {KV_TYPE}))} is not known; this reads {KV_TYPE}"
        )
    return Description(path, _types(document), _is_packed(path, document), group_size, bool(kv_types))


def is_described(folder: Path) -> bool:
    """Whether a folder holds a description, so that it is a model in this layout."""
    return folder.is_dir() and bool(_descriptions(folder))


def check_names(description: Description, stored: Iterable[str], head: str | None) -> None:
    """Raise CheckpointError when a tensor is in only one of the files and the description (C25).

    `head` is the module of a tied head, which may be described and not stored.
    """
    stored = set(stored)
    missing = [name for name in description.types if name not in stored and name != f"{head}.weight"]
    if missing:
        first = min(missing)
        raise CheckpointError(
            f"{description.path} names {shown_name(first)} ({shown_name(description.types[first])}), which no weight "
            f"file holds{_more(missing)}; restore the missing files"
        )
    unnamed = [name for name in stored if name not in description.types]
    if unnamed:
        raise CheckpointError(
            f"{description.path} does not name {shown_name(min(unnamed))}, which the weight files hold"
            f"{_more(unnamed)}; runtimes fail on tensors without a type"
        )


def _descriptions(folder: Path) -> list[str]:
    """Other savers of msModelSlim append the type: quant_model_description_w8a8.json."""
    stem = FILE_NAME.removesuffix(".json")
    return [name for name in file_names(folder) if name.startswith(stem) and name.endswith(".json")]


def _more(names: list[str]) -> str:
    return f", nor {len(names) - 1} more" if len(names) > 1 else ""


def _is_packed(path: Path, document: Mapping[str, Any]) -> bool:
    version = str(document.get("version", ""))
    if version != VERSION and version not in _UNPACKED_VERSIONS:
        raise UnsupportedError(
            f"{path}: format version {shown_name(version)} is not known; this version of cann-llm-quant "
            f"reads {VERSION} and 0.0.0"
        )
    return version == VERSION


def _types(document: Mapping[str, Any]) -> dict[str, str]:
    """Entries that name a tensor: those with a dot, but for the methods of whole attentions."""
    return {
        name: value
        for name, value in document.items()
        if "." in name and isinstance(value, str) and not name.endswith(".quant_type")
    }


def _refuse_rotations(path: Path, document: Mapping[str, Any]) -> None:
    """What a runtime would have to apply to activations, and we do not."""
    metadata = document.get("metadata")
    rotations = metadata.get("quarot", {}) if isinstance(metadata, Mapping) else {}
    online = [key for key in ("heads_rotation", "kronecker_rotation") if rotations and rotations.get(key)]
    if online:
        raise UnsupportedError(f"{path}: rotations at run time ({online[0]}) are not known; use a model without them")
    for key in ("fa_quant_type", "indexer_quant_type"):
        if key in document:
            raise UnsupportedError(f"{path}: quantized attention ({key} {shown_name(str(document[key]))}) is not known")
