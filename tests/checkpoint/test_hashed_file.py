"""Bytes that three threads share come out in order, with the sum that hashlib gives; a full disk is told."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_llm_quant.checkpoint import hashed_file
from cann_llm_quant.checkpoint.hashed_file import HashedFile


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(st.binary(max_size=3000), max_size=12),
    piece=st.integers(1, 4000),
    waiting=st.integers(0, 4000),
    synced=st.integers(0, 4000),
)
def test_content_and_sum(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], piece: int, waiting: int, synced: int
) -> None:
    path = tmp_path_factory.mktemp("hashed") / "file"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashed_file, "_PIECE_BYTES", max(piece, max(map(len, parts), default=0) // 20))
        patch.setattr(hashed_file, "_AHEAD_BYTES", waiting)
        patch.setattr(hashed_file, "_SYNC_BYTES", synced)
        with HashedFile(path) as file:
            for part in parts:
                file.write(memoryview(part))
            digest = file.finish()
    whole = b"".join(parts)
    assert path.read_bytes() == whole
    assert (file.nbytes, digest) == (len(whole), hashlib.sha256(whole).hexdigest())


def write(path: Path, pieces: int, then: BaseException | None = None) -> None:
    with HashedFile(path) as file:
        for _ in range(pieces):
            file.write(bytes(100_000))
        if then is not None:
            raise then
        file.finish()


def test_a_full_disk_is_an_error_of_the_one_who_writes() -> None:
    with pytest.raises(OSError, match="No space left"):
        write(Path("/dev/full"), 10)


def test_an_error_of_the_writer_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        write(tmp_path / "file", 1, ZeroDivisionError())


@pytest.mark.parametrize("failing", range(3))
def test_a_disk_that_refuses_to_flush_is_told_by_whichever_call_met_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """The system says it once only: of three flushes, two on the way, none may fail unheard."""
    calls = iter(range(100))

    def fsync(_: int) -> None:
        if next(calls) == failing:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr(hashed_file, "_SYNC_BYTES", 150_000)
    with pytest.raises(OSError, match="Input/output"):
        write_slowly(tmp_path / "file", 5)


def write_slowly(path: Path, pieces: int) -> None:
    """Flushes come one after the other, after every second piece and at the end."""
    with HashedFile(path) as file:
        for _ in range(pieces):
            file.write(bytes(100_000))
            while file._pending:
                file._settle()
            if file._sync is not None:
                file._sync.exception()
        file.finish()
