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


def test_a_full_disk_is_an_error_of_the_one_who_writes() -> None:
    with pytest.raises(OSError, match="No space left"), HashedFile(Path("/dev/full")) as file:
        for _ in range(10):
            file.write(bytes(100_000))
        file.finish()


def test_an_error_of_the_writer_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), HashedFile(tmp_path / "file") as file:
        file.write(bytes(1 << 20))
        raise ZeroDivisionError
