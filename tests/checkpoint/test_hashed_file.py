"""Bytes that three threads share come out in order, with the sum that hashlib gives; a full disk is told."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_llm_quant.checkpoint.hashed_file import HashedFile


@settings(max_examples=40, deadline=None)
@given(parts=st.lists(st.binary(max_size=3000), max_size=12))
def test_content_and_sum(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("hashed") / "file"
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
