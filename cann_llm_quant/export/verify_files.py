"""Whether the files of an output are whole and agree with one another: headers, indexes, names, SHA256SUMS.

Everything is listed, not only the first fault; nothing but headers is read, and the files once for their digests.
"""

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath

from cann_llm_quant.checkpoint.base import TensorInfo
from cann_llm_quant.checkpoint.files import file_names, parse_json_object, read_bytes, read_failure
from cann_llm_quant.checkpoint.journal import file_sha256
from cann_llm_quant.checkpoint.safetensors_reader import SafetensorsShard
from cann_llm_quant.checkpoint.writer import SUMS_NAME
from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.export.verify_findings import Findings, Tick, listed
from cann_llm_quant.export.verify_json import check_keys
from cann_llm_quant.shown import shown

_INDEX = ".safetensors.index.json"
_SUM_LINE = re.compile(r"(?P<sum>[0-9a-f]{64}) [ *](?P<name>.+)")
_FILES = (".json", ".safetensors", ".gguf", ".onnx", ".bin", ".model")
_AGAIN = "fetch or write the file again"


def check_shards(folder: Path, findings: Findings) -> dict[str, dict[str, TensorInfo]]:
    """The tensors of every safetensors file by file name; files that cannot be read are faults."""
    shards: dict[str, dict[str, TensorInfo]] = {}
    for name in file_names(folder):
        if name.endswith(".safetensors"):
            with findings.caught(str(folder / name)):
                shard = SafetensorsShard(folder / name)
                shards[name] = shard.tensors
                check_keys(f"{folder / name}: the header", shard.header[8:], findings)
    owner: dict[str, str] = {}
    for file, tensors in shards.items():
        for name in tensors:
            other = owner.setdefault(name, file)
            if other != file:
                findings.add(name, f"is in both {other} and {file}", "remove the file that is stale")
    return shards


def check_entries(folder: Path, findings: Findings) -> None:
    """What takes the place of a file: pipes and devices, also behind links, and folders with a file's name."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name.endswith(_FILES) or path.name == SUMS_NAME:
                findings.add(str(path), "is a folder where a file of this name is expected", "remove it")
        elif path.exists() and not path.is_file():
            findings.add(str(path), "is no file but a pipe, a socket or a device, at which readers hang", "remove it")


def check_links(folder: Path, findings: Findings) -> None:
    """Links that lead nowhere are faults; those that leave the folder, the hub's cache apart, are remarks."""
    blobs = folder.resolve().parent.parent / "blobs"  # snapshots/<revision>/ of the cache consists of links there
    outside: list[str] = []
    for path in sorted(folder.iterdir()):
        if not path.is_symlink():
            continue
        try:
            target = path.resolve(strict=True)
        except (OSError, RuntimeError):  # nothing there, or a ring of links
            findings.add(str(path), "is a link to what is not there", "fetch the file")
            continue
        if not target.is_relative_to(folder.resolve()) and not target.is_relative_to(blobs):
            outside.append(path.name)
    if outside:
        findings.remark(f"links lead out of the folder, which a copy may leave behind: {listed(outside)}")


def check_unread(folder: Path, shards: Mapping[str, Mapping[str, TensorInfo]], findings: Findings) -> None:
    """Weights beside `model.safetensors` that no index names: some readers load them all, some only that file."""
    indexed = any(name.endswith(_INDEX) for name in file_names(folder))
    others = [name for name in shards if name != "model.safetensors"]
    if "model.safetensors" in shards and others and not indexed:
        findings.add(
            str(folder),
            f"holds weights beside model.safetensors that no index names: {listed(others)}",
            "readers differ in whether they load them; remove them, or write an index",
        )


def check_index(folder: Path, shards: Mapping[str, Mapping[str, TensorInfo]], findings: Findings) -> None:
    """Every index against the headers, both ways, and its total size."""
    for index in (folder / name for name in file_names(folder) if name.endswith(_INDEX)):
        document = {}
        with findings.caught(str(index)):
            document = parse_json_object(read_bytes(index), index)
        weight_map = document.get("weight_map")
        if not isinstance(weight_map, dict):
            findings.add(str(index), "has no weight_map", _AGAIN)
            continue
        _check_map(index, weight_map, shards, findings)
        metadata = document.get("metadata")
        said = metadata.get("total_size") if isinstance(metadata, dict) else None
        total = sum(info.nbytes for tensors in shards.values() for info in tensors.values())
        if said is not None and said != total:
            findings.remark(f"{index.name} says total_size {said}, the tensors take {total} bytes")


def _check_map(
    index: Path, weight_map: Mapping[str, object], shards: Mapping[str, Mapping[str, TensorInfo]], findings: Findings
) -> None:
    missing: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not is_inside(file) or "/" in file:
            findings.add(str(index), f"maps {name} to {shown(file)}, which is no file beside it", _AGAIN)
        elif name not in shards.get(file, {}):
            missing.setdefault(file, []).append(name)
    for file, names in missing.items():
        state = "does not hold them" if (index.parent / file).is_file() else "is not there"
        findings.add(str(index), f"places {len(names)} tensors in {file}, which {state}: {listed(names)}", _AGAIN)
    unlisted = [name for tensors in shards.values() for name in tensors if name not in weight_map]
    if unlisted:
        findings.add(str(index), f"lacks {len(unlisted)} stored tensors: {listed(unlisted)}", "write the index anew")


def is_inside(name: str) -> bool:
    """Whether a relative name, read on any system, stays below the folder that it is written in."""
    path = PurePosixPath(name)
    plain = not path.is_absolute() and ".." not in path.parts and name not in ("", ".")
    return plain and "\\" not in name and "\0" not in name and not PureWindowsPath(name).drive


def check_sums(folder: Path, findings: Findings, tick: Tick) -> int:
    """Every file that SHA256SUMS names against its digest; the number that agree.

    Weight files that it leaves out are faults, other files remarks.
    """
    path = folder / SUMS_NAME
    if not path.is_file():
        findings.remark(f"no {SUMS_NAME}, so changed bytes show only where they make no sense")
        return 0
    sums: dict[str, str] = {}
    with findings.caught(str(path)):
        sums = _parse_sums(path)
    agreeing = 0
    for number, (name, said) in enumerate(sums.items()):
        tick(number, len(sums), name)
        with findings.caught(str(folder / name)):
            agreeing += _agrees(folder, name, said, findings)
    _check_unlisted(folder, sums, findings)
    return agreeing


def _agrees(folder: Path, name: str, said: str, findings: Findings) -> bool:
    path = folder / name
    if not is_inside(name):
        findings.add(str(folder / SUMS_NAME), f"names {shown(name)}, which leads out of the folder", "remove the line")
        return False
    if not path.is_file():
        findings.add(str(path), f"is not there, but {SUMS_NAME} names it", _AGAIN)
        return False
    try:
        digest = file_sha256(path)
    except OSError as error:
        raise read_failure(path, error) from error
    if digest != said:
        findings.add(str(path), f"is not what was written: its sha256 is not that of {SUMS_NAME}", _AGAIN)
    return digest == said


def _parse_sums(path: Path) -> dict[str, str]:
    sums: dict[str, str] = {}
    try:
        lines = read_bytes(path).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: is no text: {error.reason}; write it again") from error
    for number, line in enumerate(lines, 1):
        match = _SUM_LINE.fullmatch(line)
        if match is None:
            raise CheckpointError(f"{path}: line {number} is no digest and name; write it again with sha256sum")
        if sums.setdefault(match["name"], match["sum"]) != match["sum"]:
            raise CheckpointError(f"{path}: line {number} gives {match['name']} another digest; write it again")
    return sums


def _check_unlisted(folder: Path, sums: Mapping[str, str], findings: Findings) -> None:
    others = [name for name in file_names(folder) if name not in sums and name != SUMS_NAME]
    weights = [name for name in others if name.endswith((".safetensors", ".gguf", ".onnx", ".bin", ".onnx.data"))]
    for name in weights:
        findings.add(str(folder / name), f"is not in {SUMS_NAME}", "it was not written with the others; remove it")
    rest = [name for name in others if name not in weights]
    if rest:
        findings.remark(f"{SUMS_NAME} does not speak of {listed(rest)}")
