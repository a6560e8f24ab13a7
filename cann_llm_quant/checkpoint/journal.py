"""Files that survive a kill, and the journal of units that are whole on disk.

A file becomes visible only by renaming a synced temporary, and the directory is synced after that, so that a
name always means whole contents. The journal is `journal.jsonl`: one JSON object a line,

    {"unit": name, "file": name in units/, "bytes": size, "sha256": hex, "record": what the caller wants to
    remember}

synced after each. Units depend on the ones before them, so whatever cannot be trusted ends the list.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cann_llm_quant.errors import CannQuantError

CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Entry:
    """One unit: its file under `units/`, how to recognise it, and the caller's record."""

    unit: str
    file: str
    bytes: int
    sha256: str
    record: dict[str, Any]


@contextmanager
def disk_errors(folder: Path, *, resumes: bool = True) -> Iterator[None]:
    """Turn the system's refusal to write under `folder` (full, read-only) into a user's error.

    `resumes` says whether the same command goes on with what was written or starts anew.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise CannQuantError(
            f"cannot write {error.filename or folder}: {reason}; free space or fix the folder, then run "
            f"the same command again, it {'resumes' if resumes else 'starts anew'}"
        ) from error


def encode_json(value: object, indent: int | None = None) -> bytes:
    """JSON of any text, as `utf8` has it."""
    return utf8(json.dumps(value, ensure_ascii=False, indent=indent))


def utf8(text: str) -> bytes:
    """Any text; what Python could not decode in a file's name reads as its bytes do in UTF-8.

    Such bytes come as lone surrogates (PEP 383): every letter of `资料` in a C locale. The result is the same in all.
    """
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace").encode("utf-8")
    except UnicodeEncodeError:  # a surrogate that comes from no file name
        return text.encode("utf-8", "replace")


def sync_folder(folder: Path) -> None:
    """Make renames and deletions inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that the name never holds part of it."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Remove a file or a whole folder; nothing happens when it is not there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def append_entry(journal: Path, entry: Entry, end: int) -> int:
    """Write one line at byte `end` and sync it; returns where the next one goes.

    Behind the last line that counts there may be another, torn or whole: of an attempt that the disk refused.
    """
    line = encode_json(asdict(entry)) + b"\n"
    with journal.open("r+b") as file:
        file.truncate(end)
        file.seek(end)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
    return end + len(line)


def read_entries(journal: Path) -> list[Entry]:
    """The lines that can be read, up to the first that is torn (a kill can leave one without its end)."""
    entries: list[Entry] = []
    if not journal.exists():
        return entries
    for line in journal.read_bytes().split(b"\n")[:-1]:
        try:
            entries.append(Entry(**json.loads(line.decode("utf-8"))))
        except (ValueError, TypeError):
            break
    return entries


def rewrite_entries(journal: Path, entries: Sequence[Entry]) -> None:
    """Replace the journal by `entries`."""
    write_file(journal, b"".join(encode_json(asdict(entry)) + b"\n" for entry in entries))


def is_whole(units: Path, entry: Entry) -> bool:
    """Whether the unit's file is there with the size and sha256 that were recorded."""
    path = units / entry.file
    return path.is_file() and path.stat().st_size == entry.bytes and file_sha256(path) == entry.sha256


def recover(journal: Path, units: Path) -> list[Entry]:
    """The units that can be trusted; the journal and the folder are cut back to them."""
    recorded = read_entries(journal)
    entries: list[Entry] = []
    for entry in recorded:
        if not is_whole(units, entry):
            break
        entries.append(entry)
    rewrite_entries(journal, entries)
    kept = {entry.file for entry in entries}
    for path in units.iterdir():
        if path.name not in kept:
            remove(path)
    sync_folder(units)
    return entries
