"""The writer against safetensors as the real reader, and against SIGKILL at every system call that changes a file."""

import functools
import json
import os
import signal
import subprocess
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from cann_llm_quant.checkpoint.writer import CheckpointWriter, WrittenCheckpoint
from cann_llm_quant.errors import CannQuantError, CheckpointError, ResumeError, UsageError

RUN: dict[str, Any] = {"source": "abc", "recipe": {"bits": 4, "rules": [1, 2]}}
FILES = {"config.json": b'{"a": 1}', "inference_config.json": b"{}", "tokenizer.json": "é".encode()}


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill loses nothing that was handed to the system; only a power cut needs the syncs, and they are slow."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def make_units(count: int = 3) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    units = {}
    for i in range(count):
        units[f"layer {i}"] = {
            f"model.layers.{i}.down.weight": torch.randn(24, 40, generator=generator),
            f"model.layers.{i}.norm.weight": torch.randn(7, generator=generator).to(torch.bfloat16),
            f"model.layers.{i}.shape": torch.tensor([24, 40]),
            f"model.layers.{i}.codes": torch.randint(-8, 8, (5, 3), generator=generator, dtype=torch.int8),
        }
    return units


def write_all(
    out: Path, units: dict[str, dict[str, Tensor]], *, limit: int = 5_000, overwrite: bool = False
) -> WrittenCheckpoint:
    """What a pipeline does: open, skip what is done, write the rest, finish."""
    with CheckpointWriter.open(out, run=RUN, max_shard_bytes=limit, overwrite=overwrite) as writer:
        for index, (unit, tensors) in enumerate(units.items()):
            if unit not in writer.completed:
                writer.write_unit(unit, tensors, {"index": index})
        return writer.finish(FILES)


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def load_all(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and a[name].shape == b[name].shape and torch.equal(a[name], b[name])
        for name in a
    )


def merged(units: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for tensors in units.values() for name, tensor in tensors.items()}


def test_one_file_when_it_fits(tmp_path: Path) -> None:
    units = make_units()
    written = write_all(tmp_path / "out", units, limit=10**9)
    assert written.weight_files == ("model.safetensors",)
    assert written.tensors == 12
    assert written.total_bytes == sum(t.numel() * t.element_size() for t in merged(units).values())
    assert sorted(digests(tmp_path / "out")) == sorted({*FILES, "SHA256SUMS", "model.safetensors"})
    assert same(load_all(tmp_path / "out"), merged(units))
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("limit", [10**9, 60_000])
def test_the_sums_are_those_of_sha256sum(tmp_path: Path, limit: int) -> None:
    """Of every file but the list itself, whether a unit became a file as it was or was copied into one."""
    write_all(tmp_path / "out", make_units(), limit=limit)
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path / "out", check=True)
    listed = [line.split("  ", 1)[1] for line in (tmp_path / "out" / "SHA256SUMS").read_text().splitlines()]
    assert sorted(listed) == sorted(set(digests(tmp_path / "out")) - {"SHA256SUMS"})


def test_units_of_a_large_model_become_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    units = {str(i): {f"w{i}": torch.full((64, 64), float(i))} for i in range(3)}
    monkeypatch.setattr("cann_llm_quant.checkpoint.writer.MERGED_BYTES", 3 * 64 * 64 * 4 - 1)
    with CheckpointWriter.open(tmp_path / "out", run=RUN) as writer:
        for name, tensors in units.items():
            writer.write_unit(name, tensors, {})
        inodes = {path.stat().st_ino for path in (tmp_path / "out.partial" / "units").iterdir()}
        written = writer.finish({}, stem="quant", file_per_unit=True)
    assert written.weight_files == tuple(f"quant-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
    assert {(tmp_path / "out" / name).stat().st_ino for name in written.weight_files} == inodes  # never copied
    index = json.loads((tmp_path / "out" / "quant.safetensors.index.json").read_text())
    assert index["weight_map"] == {f"w{i}": written.weight_files[i] for i in range(3)}
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path / "out", check=True)


def test_c27_index_matches_the_reopened_shards(tmp_path: Path) -> None:
    units = {str(i): {f"w{i}": torch.full((104, 64), float(i))} for i in range(4)}
    written = write_all(tmp_path / "out", units, limit=40_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == 4 * 104 * 64 * 4 == written.total_bytes
    seen: dict[str, str] = {}
    for name in written.weight_files:
        assert (tmp_path / "out" / name).stat().st_size <= 40_000
        with safe_open(tmp_path / "out" / name, "pt") as file:
            seen |= dict.fromkeys(file.keys(), name)
    assert seen == index["weight_map"]
    assert written.weight_files[0] == "model-00001-of-00004.safetensors"


def test_c42_meta_and_unstorable_tensors_are_refused_by_name(tmp_path: Path) -> None:
    with CheckpointWriter.open(tmp_path / "out", run=RUN) as writer:
        with pytest.raises(CheckpointError, match=r"'ghost'.*meta"):
            writer.write_unit("u", {"ghost": torch.empty(2, device="meta")}, {})
        with pytest.raises(CheckpointError, match=r"'z'.*complex64"):
            writer.write_unit("u", {"z": torch.zeros(2, dtype=torch.complex64)}, {})
        writer.write_unit("u", {"w": torch.zeros(2)}, {})
        with pytest.raises(CheckpointError, match=r"'w'.*'u'"):
            writer.write_unit("v", {"w": torch.zeros(2)}, {})
        with pytest.raises(CheckpointError, match="already written"):
            writer.write_unit("u", {"x": torch.zeros(2)}, {})
        assert list(writer.completed) == ["u"]


def test_c26_views_ties_and_odd_shapes_are_written_independently(tmp_path: Path) -> None:
    fused = torch.arange(48.0).view(12, 4)
    tensors = {
        "v": fused[8:],
        "transposed": fused.t(),
        "strided": fused[::2, ::3],
        "tied": fused,
        "tied again": fused,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3, dtype=torch.float16),
        "expanded": torch.ones(1, 1).expand(3, 5),
        "bool": torch.tensor([True, False]),
        "fp8": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
        "nan": torch.tensor([float("nan"), float("inf")]),
    }
    with CheckpointWriter.open(tmp_path / "out", run=RUN) as writer:
        writer.write_unit("u", tensors, {})
        again = writer.read_unit("u")
        writer.finish({})
    loaded = load_all(tmp_path / "out")
    assert again.keys() == loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].shape == tensor.shape
        for copy in (loaded[name], again[name]):
            assert copy.dtype == tensor.dtype
            as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (copy, tensor)]
            assert torch.equal(*as_bytes)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(0, 400), min_size=0, max_size=4), min_size=1, max_size=5).filter(
        lambda sizes: any(sizes)
    ),
    limit=st.integers(300, 4_000),
)
def test_shards_obey_the_limit_and_hold_everything(
    sizes: list[list[int]], limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    dtypes = [torch.int8, torch.float32, torch.bfloat16, torch.float64]
    units = {
        f"u{i}": {f"t{i}.{j}": torch.arange(n, dtype=dtypes[(i + j) % 4]) for j, n in enumerate(lengths)}
        for i, lengths in enumerate(sizes)
    }
    out = tmp_path_factory.mktemp("shards") / "out"
    written = write_all(out, units, limit=limit)
    assert same(load_all(out), merged(units))
    for name in written.weight_files:
        alone = len(load_file(out / name)) == 1
        assert alone or (out / name).stat().st_size <= limit
    # Order of the mapping and the moment of a restart do not show in the bytes.
    shuffled = {unit: dict(reversed(tensors.items())) for unit, tensors in units.items()}
    write_all(out.with_name("again"), shuffled, limit=limit)
    assert digests(out) == digests(out.with_name("again"))


def test_a_unit_that_fills_a_shard_is_renamed(tmp_path: Path) -> None:
    units = {str(i): {f"w{i}": torch.full((100,), float(i))} for i in range(3)}
    with CheckpointWriter.open(tmp_path / "out", run=RUN, max_shard_bytes=600) as writer:
        for unit, tensors in units.items():
            writer.write_unit(unit, tensors, {})
        inodes = [p.stat().st_ino for p in sorted((tmp_path / "out.partial" / "units").iterdir())]
        writer.finish({})
    assert [p.stat().st_ino for p in sorted((tmp_path / "out").glob("*.safetensors"))] == inodes


class Killed(BaseException):
    """Stands for SIGKILL inside this process: nothing in the package catches it."""


CHANGES = ("fsync", "replace", "unlink", "mkdir", "rmdir")


def die_before(patch: pytest.MonkeyPatch, at: int, die: Callable[[], None]) -> None:
    """Let the `at`-th call that changes the file system, and all after it, die instead."""
    left = at

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal left
            if left <= 0:
                die()
            left -= 1
            return call(*args, **options)

        return run

    for name in CHANGES:
        patch.setattr(os, name, counted(getattr(os, name)))


def killed(at: int, work: Callable[[], Any]) -> bool:
    """Run `work`, killed before its `at`-th change; whether the kill came in time.

    Every eighth time a forked process gets a real SIGKILL; the others are an exception, since forking torch
    is slow.
    """

    def raise_killed() -> None:
        raise Killed

    if at % 8 != 5:
        with pytest.MonkeyPatch.context() as patch:
            die_before(patch, at, raise_killed)
            try:
                work()
            except Killed:
                return True
            return False
    child = os.fork()
    if child == 0:
        die_before(pytest.MonkeyPatch(), at, lambda: os.kill(os.getpid(), signal.SIGKILL))
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), "the run failed for another reason than the kill"
    return status == signal.SIGKILL


def test_every_name_is_synced_before_and_after_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    replace = os.replace

    def logged_replace(source: Path, target: Path) -> None:
        calls.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("sync"))
    monkeypatch.setattr(os, "replace", logged_replace)
    with CheckpointWriter.open(tmp_path / "out", run=RUN) as writer:
        calls.clear()
        writer.write_unit("u", {"w": torch.zeros(3)}, {})
    # file, its name, the folder, the journal, the journal's folder
    assert calls == ["sync", "replace", "sync", "sync", "sync"]


@pytest.mark.parametrize("limit", [900, 5_000, 10**6], ids=["split", "renamed", "one"])
def test_c55_c28_killed_anywhere_the_next_run_ends_byte_identical(tmp_path: Path, limit: int) -> None:
    units = make_units(2)
    write_all(tmp_path / "unbroken", units, limit=limit)
    expected = digests(tmp_path / "unbroken")
    at = 0
    while True:
        out = tmp_path / str(at) / "out"
        partial = out.with_name("out.partial")
        write = functools.partial(write_all, out, units, limit=limit)
        if not killed(at, write):
            break
        # Killed again a little into some of the resumed runs, then left in peace.
        if partial.exists() and at % 3 == 0:
            killed(at % 7, write)
        if not out.exists() or partial.exists():
            write()
        assert digests(out) == expected, f"killed before change {at}"
        assert not partial.exists()
        at += 1
    assert at > 30


def test_killed_while_replacing_an_old_output(tmp_path: Path) -> None:
    units = make_units(1)
    write_all(tmp_path / "unbroken", units)
    expected = digests(tmp_path / "unbroken")
    at = 0
    while True:
        out = tmp_path / str(at) / "out"
        out.mkdir(parents=True)
        (out / "inference_config.json").write_bytes(b"old")
        if not killed(at, functools.partial(write_all, out, units, overwrite=True)):
            break
        if out.exists():
            assert digests(out) in ({"inference_config.json": sha256(b"old").hexdigest()}, expected)
        if out.with_name("out.partial").exists() or digests(out) != expected:
            write_all(out, units, overwrite=True)
        assert digests(out) == expected
        assert not out.with_name("out.partial").exists()
        at += 1


def test_resume_keeps_whole_units_and_records(tmp_path: Path) -> None:
    units = make_units()
    with CheckpointWriter.open(tmp_path / "out", run=RUN) as writer:
        for unit, tensors in list(units.items())[:2]:
            writer.write_unit(unit, tensors, {"error": 0.25, "name": unit})
        (writer.scratch / "spool").write_bytes(b"x")
    with CheckpointWriter.open(tmp_path / "out", run=RUN) as writer:
        assert writer.completed == {u: {"error": 0.25, "name": u} for u in ("layer 0", "layer 1")}
        assert same(writer.read_unit("layer 1"), units["layer 1"])
        assert (writer.scratch / "spool").exists()
        with pytest.raises(CheckpointError, match="layer 2"):
            writer.read_unit("layer 2")


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "torn line", "garbage line"])
def test_a_damaged_unit_is_dropped_with_all_after_it(tmp_path: Path, damage: str) -> None:
    units = make_units(4)
    write_all(tmp_path / "unbroken", units)
    with CheckpointWriter.open(tmp_path / "out", run=RUN, max_shard_bytes=5_000) as writer:
        for unit, tensors in units.items():
            writer.write_unit(unit, tensors, {"index": 0})
    partial = tmp_path / "out.partial"
    victim = partial / "units" / "00002.safetensors"
    data = bytearray(victim.read_bytes())
    journal = partial / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    if damage == "flip":
        data[-1] ^= 1
        victim.write_bytes(data)
    elif damage == "truncate":
        victim.write_bytes(data[:-1])
    elif damage == "remove":
        victim.unlink()
    elif damage == "torn line":
        journal.write_bytes(b"".join(lines[:2]) + lines[2][:-1])
    else:
        journal.write_bytes(b"".join(lines[:2]) + b'{"unit": 3}\n' + lines[3])
    with CheckpointWriter.open(tmp_path / "out", run=RUN, max_shard_bytes=5_000) as writer:
        assert list(writer.completed) == ["layer 0", "layer 1"]
        assert len(list((partial / "units").iterdir())) == 2
    write_all(tmp_path / "out", units)
    assert digests(tmp_path / "out") == digests(tmp_path / "unbroken")


def test_c55_another_run_is_refused_naming_what_differs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with CheckpointWriter.open(out, run=RUN) as writer:
        writer.write_unit("u", {"w": torch.zeros(2)}, {})
    other = {"source": "abc", "recipe": {"bits": 8, "rules": [1, 3]}, "seed": 1}
    with pytest.raises(ResumeError) as caught:
        CheckpointWriter.open(out, run=other, max_shard_bytes=7)
    message = str(caught.value)
    for part in ("recipe.bits: 4 → 8", "recipe.rules: [1, 2] → [1, 3]", "seed: (absent) → 1"):
        assert part in message
    assert "max_shard_bytes: 5000000000 → 7" in message
    assert "source" not in message.replace("out.partial", "")
    assert "delete" in message
    assert "--overwrite" in message
    with CheckpointWriter.open(out, run=other, overwrite=True) as writer:
        assert writer.completed == {}
        assert list((tmp_path / "out.partial" / "units").iterdir()) == []


def test_foreign_and_existing_folders_are_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "a.partial"
    foreign.mkdir()
    (foreign / "thesis.txt").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"no run\.json"):
        CheckpointWriter.open(tmp_path / "a", run=RUN, overwrite=True)
    (foreign / "run.json").write_bytes(b"{}")
    with pytest.raises(UsageError, match="cannot be read"):
        CheckpointWriter.open(tmp_path / "a", run=RUN, overwrite=True)
    assert (foreign / "thesis.txt").read_bytes() == b"mine"
    home = tmp_path / "home"
    home.mkdir()
    with pytest.raises(UsageError, match="exists already"):
        CheckpointWriter.open(home, run=RUN)
    (home / "letter").write_bytes(b"")
    with pytest.raises(UsageError, match="no output of this tool"):
        CheckpointWriter.open(home, run=RUN, overwrite=True)
    assert not (tmp_path / "home.partial").exists()
    with pytest.raises(UsageError, match="shard size"):
        CheckpointWriter.open(tmp_path / "b", run=RUN, max_shard_bytes=0)


def test_overwrite_replaces_only_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_all(out, make_units(1))
    before = digests(out)
    with CheckpointWriter.open(out, run=RUN, overwrite=True) as writer:
        writer.write_unit("u", {"w": torch.zeros(3)}, {})
        assert digests(out) == before
        writer.finish({})
    assert sorted(digests(out)) == ["SHA256SUMS", "model.safetensors"]
    assert list(load_all(out)) == ["w"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_output_that_appears_during_the_run_is_not_replaced(tmp_path: Path) -> None:
    with CheckpointWriter.open(tmp_path / "out", run=RUN) as writer:
        writer.write_unit("u", {"w": torch.zeros(3)}, {})
        (tmp_path / "out").mkdir()
        with pytest.raises(UsageError, match="meanwhile"):
            writer.finish({})


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    with CheckpointWriter.open(tmp_path / "out", run=RUN):
        child = os.fork()
        if child == 0:
            try:
                CheckpointWriter.open(tmp_path / "out", run=RUN)
            except UsageError as error:
                os._exit(42 if "another process" in str(error) else 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    CheckpointWriter.open(tmp_path / "out", run=RUN).close()


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/../../x", "", ".", "a\\b", "model.safetensors", "model.safetensors.index.json"]
)
def test_companion_names_stay_inside(tmp_path: Path, name: str) -> None:
    with CheckpointWriter.open(tmp_path / "out", run=RUN) as writer:
        writer.write_unit("u", {"w": torch.zeros(3)}, {})
        with pytest.raises(UsageError, match="companion file name"):
            writer.finish({name: b""})
    assert not (tmp_path / "out").exists()


def test_companions_of_an_earlier_attempt_disappear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointWriter.open(tmp_path / "out", run=RUN) as writer:
        writer.write_unit("u", {"w": torch.zeros(3)}, {})
        monkeypatch.setattr(CheckpointWriter, "_publish", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            writer.finish({"old/a.txt": b"1", "kept/b.txt": b"2"}, {"by": "us"})
        monkeypatch.undo()
    with CheckpointWriter.open(tmp_path / "out", run=RUN) as writer:
        with pytest.raises(CheckpointError, match="already"):
            writer.write_unit("v", {"x": torch.zeros(1)}, {})
        with pytest.raises(ResumeError, match="metadata"):
            writer.finish({})
        writer.finish({"kept/b.txt": b"3"}, {"by": "us"})
    assert sorted(digests(tmp_path / "out")) == ["SHA256SUMS", "kept/b.txt", "model.safetensors"]
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "by": "us"}


def test_c57_path_with_spaces_and_other_scripts(tmp_path: Path) -> None:
    out = tmp_path / "模型 é" / "мой вывод"
    tensors = {"слой.вес": torch.arange(3.0)}
    with CheckpointWriter.open(out, run={"text": "文"}) as writer:
        writer.write_unit("层 0", tensors, {"名": "é"})
    with CheckpointWriter.open(out, run={"text": "文"}) as writer:
        assert writer.completed == {"层 0": {"名": "é"}}
        writer.finish({"読む.md": b"x"})
    assert same(load_all(out), tensors)


def test_nothing_to_publish_and_a_full_disk_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointWriter.open(tmp_path / "out", run=RUN) as writer:
        with pytest.raises(CheckpointError, match="no tensors"):
            writer.finish({})

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(CannQuantError, match=r"No space left.*resumes"):
            writer.write_unit("u", {"w": torch.zeros(3)}, {})
        monkeypatch.undo()
        assert writer.completed == {}
        writer.write_unit("u", {"w": torch.zeros(3)}, {})


@pytest.mark.parametrize("at", range(4))
def test_a_unit_that_the_disk_refused_and_took_later_is_in_the_journal_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The syncs are of the unit, its folder, the journal and the journal's folder; the line is there at the third."""
    left, journal = at, tmp_path / "out.partial" / "journal.jsonl"

    def full(descriptor: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")

    with CheckpointWriter.open(tmp_path / "out", run=RUN) as writer:
        writer.write_unit("first", {"a": torch.zeros(3)}, {})
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(CannQuantError, match="No space left"):
            writer.write_unit("u", {"w": torch.zeros(3)}, {"try": 1})
        monkeypatch.undo()
        with journal.open("ab") as file:
            file.write(b'{"unit": "tor')  # a write that the disk took a part of
        writer.write_unit("u", {"w": torch.ones(5)}, {"try": 2})
        writer.write_unit("last", {"z": torch.zeros(3)}, {})
    assert [json.loads(line)["unit"] for line in journal.read_bytes().splitlines()] == ["first", "u", "last"]
    with CheckpointWriter.open(tmp_path / "out", run=RUN) as writer:
        assert writer.completed == {"first": {}, "u": {"try": 2}, "last": {}}
        assert torch.equal(writer.read_unit("u")["w"], torch.ones(5))


def test_damage_during_merging_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    units = make_units()
    monkeypatch.setattr("cann_llm_quant.checkpoint.writer.write_shards", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_all(tmp_path / "out", units)
    monkeypatch.undo()
    (tmp_path / "out.partial" / "units" / "00001.safetensors").unlink()
    with pytest.raises(ResumeError, match=r"00001\.safetensors is damaged"):
        write_all(tmp_path / "out", units)


def test_peak_memory_is_two_tensors_more(tmp_path: Path) -> None:
    """C40: a unit of many transposed views is copied two tensors at a time, and merged without being loaded.

    The C library keeps some of what is freed, so the bound is a third of the unit.
    """
    base = torch.ones(256, 256, 1024)  # pages that exist already do not count again
    views = {f"w{i}": base[i].t() for i in range(256)}
    child = os.fork()
    if child == 0:
        import resource

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with CheckpointWriter.open(tmp_path / "out", run=RUN, max_shard_bytes=48_000_000) as writer:
            writer.write_unit("u", views, {})
            writer.finish({})
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os._exit(0 if grown < 88_000 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
