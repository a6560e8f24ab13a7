"""Local files to text or rows, always UTF-8, a byte order mark and gzip accepted; errors name file and place.

.txt .md     one running text, newlines as they are
.jsonl       one JSON object a line (blank lines are skipped)
.json        a list of objects, {"data": [objects]}, or JSON lines under the wrong name
.csv         a header line and rows
.parquet     rows
"""

import codecs
import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]

from cann_llm_quant.corpus.sources import ending
from cann_llm_quant.errors import CorpusError

LONGEST_CSV_FIELD = 2**30
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Row:
    """One row of data and where it stands, for messages."""

    place: str
    values: Mapping[str, object]


def read_text(path: Path) -> str:
    """The whole text of a file without its byte order mark."""
    with open_binary(path) as file:
        return decode(file.read(), path, 0)


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a data file, one after another."""
    readers = {".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    return readers[ending(path)](path)


@contextmanager
def open_binary(path: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, decompressed if its name ends in .gz; failures while it is read are CorpusErrors."""
    try:
        with gzip.open(path, "rb") if path.name.lower().endswith(".gz") else open(path, "rb") as file:
            yield cast(IO[bytes], file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CorpusError(f"{path} is not a whole gzip file: {error}") from error
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error.strerror or error}") from error


def decode(data: bytes, path: Path, offset: int) -> str:
    """UTF-8 bytes that begin at byte `offset` of the file, as text; CorpusError with the offset of a wrong byte."""
    if offset == 0:
        if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise CorpusError(f"{path} is UTF-16: convert it to UTF-8")
        if data.startswith(codecs.BOM_UTF8):
            data, offset = data[3:], 3
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{path} is not UTF-8: byte {data[error.start]:#04x} at offset {offset + error.start}; convert it to UTF-8"
        ) from error


def _json_lines(path: Path) -> Iterator[Row]:
    offset = 0
    with open_binary(path) as file:
        for number, line in enumerate(file, 1):
            text = decode(line, path, offset).strip()
            offset += len(line)
            if text:
                yield _json_row(text, f"{path}:{number}")


def _json_row(text: str, place: str) -> Row:
    try:
        row = _object(json.loads(text), place)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{place} is not JSON: {error}") from error
    _require_characters(text, place)
    return row


def _json(path: Path) -> Iterator[Row]:
    text = read_text(path)
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # a second value after the first: JSON lines
            yield from _json_lines(path)
            return
        raise CorpusError(f"{path}:{error.lineno} is not JSON: {error.msg} (column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{path} is not JSON: {error}") from error
    _require_characters(text, str(path))
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        content = content["data"]
    rows = content if isinstance(content, list) else [content]
    for number, value in enumerate(rows, 1):
        yield _object(value, f"{path} row {number}")


def _object(value: object, place: str) -> Row:
    if not isinstance(value, dict):
        raise CorpusError(f'{place} is {type(value).__name__}, not an object with columns such as "text"')
    return Row(place, value)


def _require_characters(text: str, place: str) -> None:
    """JSON can spell half of a surrogate pair, which is no character: neither a tokenizer nor UTF-8 takes it."""
    if SURROGATE.search(text) is None:
        return
    try:
        json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end].encode("unicode_escape").decode("ascii")
        raise CorpusError(
            f"{place} holds {half}, half of a surrogate pair and no character: correct the text"
        ) from error


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(LONGEST_CSV_FIELD)  # the module's 128 KiB is shorter than an article

    def lines() -> Iterator[str]:
        offset = 0
        with open_binary(path) as file:
            for line in file:
                yield decode(line, path, offset)
                offset += len(line)

    reader = csv.DictReader(lines(), strict=True)
    try:
        for values in reader:
            place = f"{path}:{reader.line_num}"
            if None in values:
                raise CorpusError(f"{place} has more fields than the header's {len(reader.fieldnames or [])}")
            yield Row(place, values)
    except csv.Error as error:
        raise CorpusError(f"{path}: the row after line {reader.line_num} is not CSV: {error}") from error


def _parquet(path: Path) -> Iterator[Row]:
    number = 0
    try:
        with open_binary(path) as file, pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=256):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(f"{path} row {number}", values)
    except (pyarrow.ArrowException, OSError) as error:
        raise CorpusError(f"{path} is not a readable parquet file: {error}") from error
