"""Who may write OUT, and whether an OUT.partial is continued, cleared or refused.

OUT.partial/run.json says to which run it belongs. A folder without one is not ours and is never touched; a
run that differs in anything that decides the output is never continued.
"""

import fcntl
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from cann_llm_quant.checkpoint.journal import remove, sync_folder, write_file
from cann_llm_quant.checkpoint.merge import Plan
from cann_llm_quant.errors import ResumeError, UsageError

_SKELETON = {"lock", "run.json.tmp"}
_ABSENT = object()


def partial_path(out: Path) -> Path:
    """Where the unfinished output lies."""
    return out.with_name(out.name + ".partial")


def done_path(out: Path) -> Path:
    """What OUT.partial is renamed to before it is deleted."""
    return out.with_name(out.name + ".partial.done")


def check_target(out: Path, partial: Path, overwrite: bool) -> None:
    """Refuse before anything is touched: a folder that is not ours, an output that must not be replaced."""
    ours = (partial / "run.json").is_file()
    if partial.exists() and not ours and not {path.name for path in partial.iterdir()} <= _SKELETON:
        raise UsageError(f"{partial} has no run.json, so it is no unfinished output: move it away or choose another -o")
    if out.exists() and not ours and not overwrite:
        raise UsageError(f"{out} exists already: choose another -o, or pass --overwrite to replace it")
    if overwrite and out.exists() and not _is_checkpoint(out):
        raise UsageError(f"{out} is no checkpoint folder, so --overwrite will not replace it: choose another -o")


def _is_checkpoint(path: Path) -> bool:
    if not path.is_dir():
        return False
    names = [item.name for item in path.iterdir()]
    return not names or "config.json" in names or any(name.endswith(".safetensors") for name in names)


def lock_folder(partial: Path) -> BinaryIO:
    """Create the folder if need be and lock it for this process, until the returned file is closed."""
    partial.mkdir(parents=True, exist_ok=True)
    path = partial / "lock"
    handle = path.open("ab")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The previous holder may have renamed the folder between our open and our lock.
        if not path.exists() or not os.path.samestat(os.fstat(handle.fileno()), path.stat()):
            raise BlockingIOError
    except BlockingIOError:
        handle.close()
        raise UsageError(f"{partial} is being written by another process: wait for it or choose another -o") from None
    return handle


def settle(out: Path, partial: Path, identity: dict[str, Any], overwrite: bool) -> Plan | None:
    """Make OUT.partial belong to `identity`; returns the plan when its `finish` had begun."""
    stored = _read_identity(partial)
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
    if out.exists() and not published and not overwrite:
        raise UsageError(f"{out} exists already: choose another -o, or pass --overwrite to replace it")
    if stored is None:
        write_file(partial / "run.json", json.dumps(identity, ensure_ascii=False, indent=1).encode("utf-8"))
        sync_folder(partial.parent)
    return plan


def _read_identity(partial: Path) -> dict[str, Any] | None:
    path = partial / "run.json"
    if not path.exists():
        return None
    try:
        stored = json.loads(path.read_bytes().decode("utf-8"))
    except ValueError:
        stored = None
    if not isinstance(stored, dict) or set(stored) != {"max_shard_bytes", "run"}:
        raise UsageError(f"{path} cannot be read, so {partial} is no unfinished output: move it away")
    return stored


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
    if value is _ABSENT:
        return "(absent)"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
