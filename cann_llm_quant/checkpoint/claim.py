"""Who writes OUT, and whether an OUT.partial is continued, cleared or refused.

OUT.partial/run.json says to which run it belongs; a run that differs in anything that decides the output is never
continued. The same file is the last to go when OUT.partial.done is deleted, so that what a kill leaves of it is known
as ours.
"""

import fcntl
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from cann_llm_quant.checkpoint.journal import encode_json, remove, sync_folder, write_file
from cann_llm_quant.checkpoint.merge import Plan
from cann_llm_quant.checkpoint.output_place import done_path, partial_path, read_identity, refuse_existing
from cann_llm_quant.errors import ResumeError, UsageError
from cann_llm_quant.shown import shown_name

_ABSENT = object()


def lock_folder(partial: Path) -> BinaryIO:
    """Create the folder if need be and lock it for this process, until the returned file is closed."""
    partial.mkdir(parents=True, exist_ok=True)
    return _lock(partial / "lock")


def _lock(path: Path) -> BinaryIO:
    handle = path.open("ab")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The previous holder may have renamed the folder between our open and our lock.
        if not path.exists() or not os.path.samestat(os.fstat(handle.fileno()), path.stat()):
            raise BlockingIOError
    except BlockingIOError:
        handle.close()
        folder = path.parent
        raise UsageError(f"{folder} is being written by another process: wait for it or choose another -o") from None
    return handle


def retire(out: Path, lock: BinaryIO) -> None:
    """End OUT.partial: renamed first, so that a kill while it is deleted leaves nothing to go on with."""
    done = done_path(out)
    os.replace(partial_path(out), done)
    sync_folder(out.parent)
    discard(done, lock)


def discard(done: Path, lock: BinaryIO | None) -> None:
    """Delete OUT.partial.done, releasing its lock: what tells whose it is goes last."""
    for path in sorted(done.iterdir()):
        if path.name not in {"lock", "run.json"}:
            remove(path)
    if lock is not None:
        lock.close()
    remove(done / "lock")
    remove(done / "run.json")
    done.rmdir()


def clear_leftover(out: Path, identity: dict[str, Any], overwrite: bool) -> None:
    """Delete the OUT.partial.done of a run that was killed while it did so; OUT was whole by then.

    Raises UsageError when that OUT is there and not to be replaced, saying so if it is this very run's.
    """
    done = done_path(out)
    if not done.is_dir():
        return
    stored = read_identity(done)
    discard(done, _lock(done / "lock") if (done / "lock").exists() else None)
    sync_folder(out.parent)
    if not os.path.lexists(out) or overwrite:
        return
    if stored != identity:
        refuse_existing(out)
    raise UsageError(
        f"{out} is complete already, written by an earlier run of this same command: use it, or pass --overwrite to "
        "make it again"
    )


def settle(out: Path, partial: Path, identity: dict[str, Any], overwrite: bool) -> Plan | None:
    """Make OUT.partial belong to `identity`; returns the plan when its `finish` had begun."""
    stored = read_identity(partial)
    plan_file = partial / "plan.json"
    if stored is not None and stored != identity:
        if not overwrite:
            raise ResumeError(
                f"{partial} belongs to another run ({'; '.join(differences(stored, identity))}): "
                f"delete {partial} or pass --overwrite"
            )
        _clear(out, partial)
        stored = None
    plan = Plan.from_json(plan_file.read_bytes()) if plan_file.exists() else None
    published = plan is not None and not (partial / "result").exists()
    if published and not out.exists():
        raise ResumeError(f"{out} was whole but is gone, and its units with it: delete {partial} to start again")
    if os.path.lexists(out) and not published and not overwrite:
        refuse_existing(out)
    if stored is None:
        write_file(partial / "run.json", encode_json(identity, indent=1))
        sync_folder(partial.parent)
    return plan


def _clear(out: Path, partial: Path) -> None:
    """Delete another run's work: first what decides how it would be continued; run.json stays."""
    replaced = partial / "replaced"
    if replaced.exists() and not out.exists():
        os.replace(replaced, out)
    for name in ("plan.json", "journal.jsonl"):
        remove(partial / name)
    sync_folder(partial)
    for path in sorted(partial.iterdir()):
        if path.name not in {"lock", "run.json"}:
            remove(path)


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """`path: old → new` for every differing leaf of two JSON values; dotted paths, without `run.`."""
    if isinstance(old, dict) and isinstance(new, dict):
        found: list[str] = []
        for key in sorted({*old, *new}):
            inner = key if not path or path == "run" else f"{path}.{key}"
            found += differences(old.get(key, _ABSENT), new.get(key, _ABSENT), inner)
        return found
    return [] if old == new else [f"{path}: {_shown(old)} → {_shown(new)}"]


def _shown(value: Any) -> str:
    return "(absent)" if value is _ABSENT else shown_name(json.dumps(value, ensure_ascii=False), 60)
