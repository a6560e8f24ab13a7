"""Hub datasets offline, from the two caches a machine may hold; a socket that is touched fails the test."""

import shutil
import socket
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerBase

from cann_llm_quant.corpus import CorpusSource, load_text, load_windows, parse_source
from cann_llm_quant.errors import CorpusError

COMMIT = "a" * 40
ROWS = 3000


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        pytest.fail("the network was tried")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Empty file and processed caches."""
    files, processed = tmp_path / "hub", tmp_path / "datasets"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(files))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", processed)
    return files, processed


def write_snapshot(files: Path, name: str) -> Path:
    """A dataset as huggingface_hub stores what it downloaded."""
    root = files / ("datasets--" + name.replace("/", "--"))
    folder = root / "snapshots" / COMMIT
    (folder / "data").mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    table = pyarrow.table({"text": [f"row {i} of the cached set" for i in range(ROWS)]})
    pyarrow.parquet.write_table(table, folder / "data" / "train-00000-of-00001.parquet", row_group_size=100)
    pyarrow.parquet.write_table(table.slice(0, 3), folder / "data" / "test-00000-of-00001.parquet")
    return folder


def test_c47_the_file_cache_serves_without_network(caches: tuple[Path, Path], plain: PreTrainedTokenizerBase) -> None:
    write_snapshot(caches[0], "acme/tiny")
    source = CorpusSource("acme/tiny")
    first = load_windows([source], plain, samples=16, length=24, seed=5)
    again = load_windows([source], plain, samples=16, length=24, seed=5)
    other = load_windows([source], plain, samples=16, length=24, seed=6)
    assert first.report == again.report
    assert first.report.sha256 != other.report.sha256
    assert first.report.sources[0].rows_read <= 64, "streaming stops when the windows are full"
    assert load_text(source).text == "\n\n".join(f"row {i} of the cached set" for i in range(3))


def test_c47_the_processed_cache_serves_without_network(
    caches: tuple[Path, Path], plain: PreTrainedTokenizerBase
) -> None:
    folder = write_snapshot(caches[0], "acme/tiny")
    datasets.load_dataset(str(folder), cache_dir=str(caches[1]))
    (made,) = caches[1].glob(COMMIT)
    made.rename(caches[1] / "acme___tiny")
    for arrow in (caches[1] / "acme___tiny").rglob("*.arrow"):
        arrow.rename(arrow.with_name(arrow.name.replace(COMMIT, "tiny")))
    shutil.rmtree(caches[0])
    windows = load_windows([CorpusSource("acme/tiny")], plain, samples=4, length=24, seed=5)
    assert "of the cached set" in plain.decode(windows.ids[0].tolist())


def test_c47_a_dataset_in_no_cache_says_where_it_looked(
    caches: tuple[Path, Path], plain: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(CorpusError) as caught:
        load_windows([CorpusSource("wikitext")], plain, samples=4, length=24, seed=5)
    message = str(caught.value)
    assert message.count("\n") == 0
    for part in ("Salesforce/wikitext", "wikitext-2-raw-v1", str(caches[0]), str(caches[1]), "local .txt"):
        assert part in message


@pytest.mark.parametrize("options", ["split=nope", "subset=nope", "column=nope"])
def test_a_part_that_is_not_there_is_named(
    caches: tuple[Path, Path], plain: PreTrainedTokenizerBase, options: str
) -> None:
    write_snapshot(caches[0], "acme/tiny")
    with pytest.raises(CorpusError, match=r"nope.*(train|default|text)"):
        load_windows([parse_source(f"acme/tiny::{options}")], plain, samples=4, length=24, seed=5)
