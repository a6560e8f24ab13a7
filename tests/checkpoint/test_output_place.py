"""Where an output may go: what is refused before any work, what is never deleted, and what a killed run leaves."""

import errno
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cann_llm_quant.checkpoint.output_folder import OutputFolder
from cann_llm_quant.checkpoint.writer import CheckpointWriter, check_output
from cann_llm_quant.errors import CheckpointError, UsageError
from cann_llm_quant.export import inference_config, to_float

RUN: dict[str, Any] = {"source": "abc"}
MARKER = "inference_config.json"


def write(out: Path, run: dict[str, Any] = RUN, *, overwrite: bool = False) -> None:
    with CheckpointWriter.open(out, run=run, overwrite=overwrite) as writer:
        writer.write_unit("u", {"w": torch.arange(3.0)}, {})
        writer.finish({MARKER: b"{}"})


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"mine")
    return folder


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def refused(out: Path, match: str, *, sources: list[Path] | None = None, overwrite: bool = True) -> None:
    """Both doors refuse, and nothing has changed."""
    before = tree(out.parent) if out.parent.name else []
    with pytest.raises(UsageError, match=match) as caught:
        check_output(out, overwrite=overwrite, sources=sources or [])
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=match):
        CheckpointWriter.open(out, run=RUN, overwrite=overwrite, sources=sources or [])
    if out.parent.name and os.access(out.parent, os.W_OK) and out.parent != Path("/"):
        assert tree(out.parent) == before


def test_the_markers_are_what_the_exports_write(tmp_path: Path) -> None:
    for name in (inference_config.FILE_NAME, to_float.FILE_NAME):
        check_output(fill(tmp_path / name, "model.safetensors", name), overwrite=True)


def test_a_usable_place_is_left_as_it_was(tmp_path: Path) -> None:
    check_output(tmp_path / "new" / "deep" / "out", overwrite=False, sources=[fill(tmp_path / "model", "config.json")])
    assert tree(tmp_path) == ["model", "model/config.json"]
    (tmp_path / "empty").mkdir()
    check_output(tmp_path / "empty", overwrite=True)
    with pytest.raises(UsageError, match="exists already"):
        check_output(tmp_path / "empty", overwrite=False)


@pytest.mark.parametrize("names", [["config.json", "model.safetensors"], ["thesis.txt"], ["config.json", "a/b"]])
def test_overwrite_never_replaces_what_this_tool_did_not_write(tmp_path: Path, names: list[str]) -> None:
    refused(fill(tmp_path / "out", *names), "no output of this tool")


def test_overwrite_never_replaces_a_file(tmp_path: Path) -> None:
    refused(fill(tmp_path, "out") / "out", "no output of this tool")


def test_a_source_is_never_replaced(tmp_path: Path) -> None:
    """Even where the folder is one of ours: OUT is, holds or lies in the source, directly or over links."""
    packed = fill(tmp_path / "packed", MARKER, "model.safetensors", "inner/config.json")
    refused(packed, "holds the source .*packed,", sources=[packed])
    refused(packed, "holds the source .*inner,", sources=[packed / "inner"])
    refused(packed, "holds the source .*model.safetensors,", sources=[packed / "model.safetensors"])
    refused(packed / "inner" / "q", "lies inside the source", sources=[packed])
    link = tmp_path / "link"
    link.symlink_to(packed, target_is_directory=True)
    refused(packed, "holds the source .*link,", sources=[link])
    refused(link / "q", "lies inside the source", sources=[packed])
    cache = tmp_path / "snapshot"
    cache.mkdir()
    (cache / "model.safetensors").symlink_to(packed / "model.safetensors")
    refused(packed, "holds the source .*snapshot,", sources=[cache])
    check_output(packed, overwrite=True, sources=[tmp_path / "packed-2", Path("hub/id")])


def test_a_source_in_the_working_folder_is_never_cleared(tmp_path: Path) -> None:
    write(tmp_path / "out")
    source = fill(tmp_path / "out.partial", "config.json")
    refused(tmp_path / "out", r"out\.partial is or holds the source", sources=[source])


def test_root_links_and_mount_points_are_refused(tmp_path: Path) -> None:
    refused(Path("/"), "root of the file system")
    refused(Path("/proc"), "mount point.*below it")
    home = fill(tmp_path / "home", MARKER)
    (tmp_path / "link").symlink_to(home, target_is_directory=True)
    refused(tmp_path / "link", f"is a link.*pass {home} itself")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for overwrite in (False, True):
        refused(tmp_path / "dangling", "leads nowhere", overwrite=overwrite)
    assert tree(home) == [MARKER]


def test_places_that_cannot_be_written_are_refused_before_work(tmp_path: Path) -> None:
    fill(tmp_path, "file")
    refused(tmp_path / "file" / "out", "file is no folder")
    refused(tmp_path / "file" / "a" / "out", "file is no folder")
    refused(Path("/proc/x/y"), "cannot write /proc/x/y ")
    refused(tmp_path / ("n" * 250), "too long")


def test_a_read_only_disk_is_named_by_what_the_user_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(tmp_path / "out.partial.done"))

    monkeypatch.setattr(os, "mkdir", read_only)
    with pytest.raises(UsageError, match=rf"cannot write {tmp_path / 'out'} \(Read-only file system\)") as caught:
        CheckpointWriter.open(tmp_path / "out", run=RUN)
    assert caught.value.exit_code == 2
    assert "partial" not in str(caught.value)


def test_neighbours_that_are_not_ours_are_never_deleted(tmp_path: Path) -> None:
    for suffix in (".partial", ".partial.done"):
        neighbour = fill(tmp_path / suffix / f"out{suffix}", "thesis.txt")
        refused(tmp_path / suffix / "out", r"has no run\.json")
        (neighbour / "run.json").write_bytes(b'{"run": 1}')
        refused(tmp_path / suffix / "out", r"run\.json cannot be read")
    fill(tmp_path, "out.partial.done")
    refused(tmp_path / "out", "is no folder, but its name is needed")


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the package catches it."""


def killed_while_deleting(out: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> bool:
    """Write OUT, dying before the `after`-th deletion inside OUT.partial.done; whether it came to that."""
    left = after

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(path: Any, *args: Any, **options: Any) -> Any:
            nonlocal left
            if out.with_name("out.partial.done").exists():
                left -= 1
                if left < 0:
                    raise Killed
            return call(path, *args, **options)

        return run

    with monkeypatch.context() as patch:
        for name in ("unlink", "rmdir"):
            patch.setattr(os, name, counted(getattr(os, name)))
        try:
            write(out)
        except Killed:
            return True
    return False


def test_a_run_killed_while_it_cleaned_up_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    while True:
        out = tmp_path / str(len(messages)) / "out"
        if not killed_while_deleting(out, monkeypatch, len(messages)):
            break
        check_output(out, overwrite=False)
        with pytest.raises(UsageError) as caught:
            write(out)
        messages.append(str(caught.value))
        assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert len(messages) >= 7
    assert all("complete already, written by an earlier run of this same command" in text for text in messages[:-1])
    # Only an empty folder was left, which says nothing of its run.
    assert "exists already" in messages[-1]


def test_what_a_killed_run_left_does_not_hold_up_other_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"source": "x"}
    for name in ("refused", "replaced", "moved"):
        out = tmp_path / name / "out"
        assert killed_while_deleting(out, monkeypatch, 2)
        if name == "refused":
            with pytest.raises(UsageError, match="exists already"):
                write(out, other)
        elif name == "replaced":
            write(out, other, overwrite=True)
        else:
            out.rename(out.with_name("kept"))
            write(out)
        assert sorted(path.name for path in out.parent.iterdir()) == (["kept", "out"] if name == "moved" else ["out"])


def test_a_folder_being_cleaned_by_another_process_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert killed_while_deleting(out, monkeypatch, 0)
    with (tmp_path / "out.partial.done" / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = tree(tmp_path)
        with pytest.raises(UsageError, match="another process"):
            write(out, overwrite=True)
        assert tree(tmp_path) == before


def test_what_appears_at_out_during_the_run_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with CheckpointWriter.open(out, run=RUN, overwrite=True) as writer:
        writer.write_unit("u", {"w": torch.zeros(3)}, {})
        fill(out, "thesis.txt")
        with pytest.raises(UsageError, match="no output of this tool"):
            writer.finish({MARKER: b"{}"})
    assert tree(out) == ["thesis.txt"]


def test_names_that_a_c_locale_cannot_decode_are_stored_and_resumed_in_any_locale(tmp_path: Path) -> None:
    """In a C locale Python hands over every non-ASCII byte of a name as a lone surrogate."""
    name = "资料.jsonl"
    undecoded = name.encode().decode("ascii", "surrogateescape")
    with CheckpointWriter.open(tmp_path / "out", run={"data": undecoded}) as writer:
        writer.write_unit("u", {"w": torch.zeros(1)}, {"data": undecoded})
    stored = json.loads((tmp_path / "out.partial" / "run.json").read_text(encoding="utf-8"))
    assert stored["run"] == {"data": name}
    with CheckpointWriter.open(tmp_path / "out", run={"data": name}) as writer:
        assert writer.completed == {"u": {"data": name}}
        writer.write_unit("v", {"x": torch.zeros(1)}, {"latin": "caf\udce9"})
        writer.write_unit("w", {"y": torch.zeros(1)}, {"alone": "\ud800"})
    with CheckpointWriter.open(tmp_path / "out", run={"data": name}) as writer:
        assert list(writer.completed.values())[1:] == [{"latin": "caf�"}, {"alone": "?"}]


def test_a_refused_run_that_nothing_continues_leaves_only_an_out_that_was_moved_aside(tmp_path: Path) -> None:
    def refuse(*, aside: bool) -> None:
        with OutputFolder.open(tmp_path / "out", run={"a": 1}, overwrite=False, sources=[]) as folder:
            (folder.result / "large").write_bytes(b"x")
            if aside:  # by a run that was killed before it had put its result in the place
                (tmp_path / "out.partial" / "replaced").mkdir()
            raise CheckpointError("no number")

    with pytest.raises(CheckpointError, match="no number"):
        refuse(aside=False)
    assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="no number"):
        refuse(aside=True)
    assert (tmp_path / "out.partial" / "replaced").is_dir()
