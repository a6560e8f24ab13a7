"""Whether OUT can become an output at all: every refusal that needs to know nothing of the run, before any work.

Publishing renames a finished folder to OUT, so OUT must be a name in a folder that can be written, and nothing that
anybody may miss may lie there: only what this tool wrote (it leaves one of MARKERS in every output) is replaced.
"""

import errno
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cann_llm_quant.errors import UsageError

MARKERS = ("inference_config.json", "export.json", "float_export.json")
SKELETON = frozenset({"lock", "run.json.tmp"})

_UNUSABLE = {
    errno.EACCES,
    errno.ELOOP,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}


def partial_path(out: Path) -> Path:
    """Where the unfinished output lies."""
    return out.with_name(out.name + ".partial")


def done_path(out: Path) -> Path:
    """What OUT.partial is renamed to before it is deleted."""
    return out.with_name(out.name + ".partial.done")


@contextmanager
def place_errors(out: Path) -> Iterator[None]:
    """Turn the system's refusal of a place (forbidden, read-only, no folder) into a UsageError about `out`.

    What may pass, such as a full disk, goes through.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _UNUSABLE:
            raise
        raise UsageError(f"cannot write {out} ({error.strerror}): choose another -o") from error


def check_output(out: Path, *, overwrite: bool, sources: Sequence[Path] = ()) -> None:
    """Refuse an `out` that no run could write or that none may replace; nothing is changed.

    `sources` are the folders and files that the run reads. Raises UsageError when OUT is the root, a link or a mount
    point, when it is, contains or lies in a source, when its folder cannot be written, when OUT.partial or
    OUT.partial.done is not ours, and when OUT exists: without `overwrite` always, unless a killed run had just
    published it; with it, when it is no output of this tool.
    """
    out = Path(os.path.abspath(out))
    _check_name(out)
    with place_errors(out):
        for source in sources:
            _check_source(out, source)
        published = _check_leftovers(out)
        if os.path.lexists(out) and not overwrite and not published:
            refuse_existing(out)
        if overwrite:
            check_replaceable(out)
        _check_writable(out)


def _check_name(out: Path) -> None:
    if not out.name:
        raise UsageError(f"{out} is the root of the file system: choose a folder below it as -o")
    if out.is_symlink():
        target = os.path.realpath(out)
        advice = f"pass {target} itself" if os.path.exists(out) else "it leads nowhere, remove it or choose another -o"
        raise UsageError(f"{out} is a link, which a finished folder would replace: {advice}")
    if os.path.ismount(out):
        raise UsageError(f"{out} is a mount point, which cannot be replaced: choose a folder below it, as {out / 'q'}")


def _check_source(out: Path, source: Path) -> None:
    real = Path(os.path.realpath(source))
    read = [real]
    # A folder of links, as the hub's cache is, keeps its files elsewhere. Whether it can be read, its reader says.
    if real.is_dir() and os.access(real, os.R_OK | os.X_OK):
        read += [path for path in real.iterdir() if path.is_symlink()]
    for place in (out, partial_path(out), done_path(out)):
        if any(_lies_in(path, place) for path in read):
            raise UsageError(f"{place} is or holds the source {source}, which would be replaced: choose another -o")
    if _lies_in(out, real):
        raise UsageError(f"{out} lies inside the source {source}: choose an -o outside of it")


def _lies_in(inner: Path, outer: Path) -> bool:
    """Whether `inner` is `outer` or below it, as the file system sees it (links, folders mounted twice)."""
    real = Path(os.path.realpath(inner))
    return os.path.exists(outer) and any(
        os.path.samefile(path, outer) for path in (real, *real.parents) if os.path.exists(path)
    )


def _check_leftovers(out: Path) -> bool:
    """Refuse to touch neighbours that are not ours; whether a run was killed after it had published OUT."""
    partial, done = partial_path(out), done_path(out)
    for place in (partial, done):
        if os.path.lexists(place) and (place.is_symlink() or not place.is_dir()):
            raise UsageError(f"{place} is no folder, but its name is needed: move it away or choose another -o")
    begun, ended = read_identity(partial) is not None, read_identity(done) is not None
    for place, ours, allowed in ((partial, begun, SKELETON), (done, ended, frozenset())):
        if place.exists() and not ours and not {path.name for path in place.iterdir()} <= allowed:
            raise UsageError(
                f"{place} has no run.json, so it is no unfinished output: move it away or choose another -o"
            )
    merged = begun and (partial / "plan.json").exists() and not (partial / "result").exists()
    return merged or done.exists()


def read_identity(folder: Path) -> dict[str, Any] | None:
    """What `run.json` of an unfinished output says of its run, None where there is none.

    Raises UsageError for a `run.json` that this tool did not write.
    """
    path = folder / "run.json"
    if folder.is_symlink() or not path.is_file():
        return None
    try:
        stored = json.loads(path.read_bytes().decode("utf-8"))
    except ValueError:
        stored = None
    if not isinstance(stored, dict) or set(stored) != {"max_shard_bytes", "run"}:
        raise UsageError(f"{path} cannot be read, so {folder} is no unfinished output: move it away")
    return stored


def refuse_existing(out: Path) -> None:
    """Raise the UsageError for an OUT that is there."""
    raise UsageError(f"{out} exists already: choose another -o, or pass --overwrite to replace it")


def check_replaceable(out: Path) -> None:
    """Raise UsageError unless OUT is absent, an empty folder or an output of this tool."""
    if not os.path.lexists(out):
        return
    if out.is_dir() and not out.is_symlink():
        names = {path.name for path in out.iterdir()}
        if not names or any(name in names for name in MARKERS):
            return
    raise UsageError(
        f"{out} is no output of this tool, so --overwrite will not replace it: choose another -o or delete it yourself"
    )


def _check_writable(out: Path) -> None:
    """Try it: permission bits do not tell of read-only disks and of folders like /proc."""
    with suppress(FileNotFoundError, NotADirectoryError):
        done_path(out).lstat()  # the longest name that will be needed: it may be too long
    home = next(folder for folder in out.parents if os.path.lexists(folder))
    if not home.is_dir():
        raise UsageError(f"{home} is no folder, so {out} cannot be made: choose another -o")
    os.rmdir(tempfile.mkdtemp(prefix=".cann-llm-quant-", dir=home))
    partial = partial_path(out)
    if partial.exists() and not os.access(partial, os.W_OK | os.X_OK):
        raise UsageError(f"{partial} cannot be written: fix its permissions or choose another -o")
