"""A source opened: its documents in the order asked for, or its whole text for evaluation.

Rows are shuffled through a buffer, so that neither a hub dataset nor a large file is read to its end for a few
samples; a file that fits the buffer is shuffled perfectly. A running text longer than WHOLE_TEXT_BYTES is not encoded
whole either: as many spans as windows are asked for are read from it, each long enough for one window.
"""

import hashlib
import io
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from cann_llm_quant.corpus.readers import Row, decode, open_binary, read_rows, read_text
from cann_llm_quant.corpus.rows import Documents, RowCounts
from cann_llm_quant.corpus.sources import CorpusSource, hub_source, is_text, local_files
from cann_llm_quant.errors import CorpusError

Order = Literal["spread", "shuffle"]
Kind = Literal["text", "spans", "rows"]

SEPARATOR = "\n\n"

WHOLE_TEXT_BYTES = 8 * 2**20
SPAN_BYTES_PER_TOKEN = 16
BUFFER_ROWS = 10_000
BUFFER_CHARACTERS = 2**26


@dataclass(frozen=True)
class Reading:
    """A source's documents, to be gone through once; `counts` grows meanwhile.

    `kind` "text": one document; "spans": pieces of one long text, a window each; "rows": many documents.
    """

    source: CorpusSource
    kind: Kind
    order: Order
    documents: Iterable[str]
    counts: RowCounts


@dataclass(frozen=True)
class TextResult:
    """A source's whole text, the SHA-256 of its UTF-8 bytes and the rows it came from (1 for a text file)."""

    text: str
    sha256: str
    rows: int


def open_source(
    source: CorpusSource,
    tokenizer: PreTrainedTokenizerBase,
    *,
    windows: int,
    length: int,
    seed: int,
    order: Order | None,
) -> Reading:
    """The documents of a source for `windows` windows of `length` tokens; CorpusError if there is no such source."""
    files = local_files(source)
    if files is not None and len(files) == 1 and is_text(files[0]):
        return _open_text(source, files[0], windows, length, seed, order or "spread")
    order = order or "shuffle"
    if files is not None:
        rows = _file_rows(files)
        if order == "shuffle":
            rows = shuffled(rows, seed)
    else:
        buffer = min(BUFFER_ROWS, max(256, 8 * windows))
        rows = _hub_rows(source, "train", seed if order == "shuffle" else None, buffer)
    documents = Documents(rows, source.column, tokenizer)
    return Reading(source, "rows", order, documents, documents.counts)


def load_text(
    source: CorpusSource,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_characters: int | None = None,
) -> TextResult:
    """The whole text of a source: a text file as it is, rows joined by blank lines, the hub's split "test" by default.

    Blank rows stay (the usual wikitext perplexity has them), null ones do not. Chats need the tokenizer's template.
    Reading stops past `max_characters`.
    """
    files = local_files(source)
    if files is not None and len(files) == 1 and is_text(files[0]):
        texts, rows = [read_text(files[0])], 1
    else:
        found = _file_rows(files) if files is not None else _hub_rows(source, "test", None, 1)
        documents = Documents(found, source.column, tokenizer, keep_empty=True)
        texts = _up_to(documents, max_characters)
        rows = len(texts)
    text = SEPARATOR.join(texts)[:max_characters]
    if not text.strip():
        raise CorpusError(f"{source.spec} holds no text")
    return TextResult(text, hashlib.sha256(text.encode("utf-8")).hexdigest(), rows)


def shuffled(rows: Iterable[Row], seed: int) -> Iterator[Row]:
    """The rows in a seeded order, through a buffer of bounded rows and characters."""
    generator = random.Random(seed)
    buffer: list[Row] = []
    characters = 0
    for row in rows:
        if len(buffer) < BUFFER_ROWS and characters < BUFFER_CHARACTERS:
            buffer.append(row)
            characters += sum(len(value) if isinstance(value, str) else 512 for value in row.values.values())
            continue
        place = generator.randrange(len(buffer))
        yield buffer[place]
        buffer[place] = row
    generator.shuffle(buffer)
    yield from buffer


def _up_to(documents: Iterable[str], characters: int | None) -> list[str]:
    texts: list[str] = []
    total = 0
    for text in documents:
        texts.append(text)
        total += len(text) + len(SEPARATOR)
        if characters is not None and total >= characters:
            break
    return texts


def _file_rows(files: Sequence[Path]) -> Iterator[Row]:
    for file in files:
        if is_text(file):
            yield Row(str(file), {"text": read_text(file)})
        else:
            yield from read_rows(file)


def _hub_rows(source: CorpusSource, split: str, seed: int | None, buffer: int) -> Iterator[Row]:
    source = hub_source(source)
    from cann_llm_quant.corpus.hub import hub_rows  # datasets takes seconds to import

    return hub_rows(source, source.split or split, seed=seed, buffer=buffer)


def _open_text(source: CorpusSource, path: Path, windows: int, length: int, seed: int, order: Order) -> Reading:
    counts = RowCounts(read=1, layout="running text")
    with open_binary(path) as file:
        whole = file.read() if path.suffix.lower() == ".gz" else None
    size = path.stat().st_size if whole is None else len(whole)
    span = length * SPAN_BYTES_PER_TOKEN
    if size <= max(WHOLE_TEXT_BYTES, windows * span):
        text = read_text(path) if whole is None else decode(whole, path, 0)
        if not text.strip():
            counts.empty, text = 1, ""
        return Reading(source, "text", order, [text] if text else [], counts)
    counts.read, counts.layout = windows, f"running text, spans of {span} bytes"
    offsets = _offsets(size, span, windows, seed if order == "shuffle" else None)
    return Reading(source, "spans", order, _spans(path, whole, offsets, span), counts)


def _offsets(size: int, span: int, count: int, seed: int | None) -> list[int]:
    """Byte offsets of spans that do not overlap: evenly spaced, or (with a seed) chosen from a grid."""
    if seed is None:
        return [i * (size - span) // max(1, count - 1) for i in range(count)]
    return [place * span for place in sorted(random.Random(seed).sample(range(size // span), count))]


def _spans(path: Path, whole: bytes | None, offsets: Sequence[int], span: int) -> Iterator[str]:
    """Texts of `span` bytes, less the cut word or character at either end."""
    with open_binary(path) as opened:
        file = opened if whole is None else io.BytesIO(whole)
        for offset in offsets:
            file.seek(offset, os.SEEK_SET)
            data = file.read(span)
            head = _character_start(data) if offset else 0
            tail = len(data) - _cut_character(data)
            text = decode(data[head:tail], path, offset + head)
            yield text.split(None, 1)[-1] if offset else text


def _character_start(data: bytes) -> int:
    """Continuation bytes (10xxxxxx) at the front, which belong to a character begun before."""
    return next((i for i, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), 0)


def _cut_character(data: bytes) -> int:
    """Bytes at the end that begin a character without finishing it."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            needed = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if needed > back else 0
    return 0
