"""Token windows of exactly N tokens from one or several sources, the same for the same seed.

Two orders. "spread": the sources' documents are joined and windows start at S evenly spaced places,

    start_i = floor(i * (tokens - N) / (S - 1)),  i = 0 .. S - 1

"shuffle": documents come in a seeded order and are packed one behind the other until S windows are full; of a running
text, which is one document, a seeded choice of the places 0, N, 2N, … is taken. Either way no token is in two windows.
A window starts with BOS where the tokenizer's rule (or `bos`) says so, and has it once.
"""

import hashlib
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cann_llm_quant.corpus.documents import SEPARATOR, Order, Reading, open_source
from cann_llm_quant.corpus.sources import CorpusSource
from cann_llm_quant.errors import CorpusError, UsageError
from cann_llm_quant.tokenizer import adds_bos, bos_id, encode


@dataclass(frozen=True)
class SourceReport:
    """What one source gave: rows by what became of them, tokens encoded, windows taken."""

    spec: str
    order: str
    layout: str
    rows_read: int
    rows_used: int
    rows_null: int
    rows_empty: int
    rows_too_short: int
    rows_malformed: int
    first_malformed: str | None
    tokens_encoded: int
    windows_asked: int
    windows: int


@dataclass(frozen=True)
class CorpusReport:
    """What a calibration or evaluation was fed; `sha256` is that of the ids as little-endian int64."""

    sources: tuple[SourceReport, ...]
    samples: int
    length: int
    tokens: int
    bos: bool
    joined: bool
    seed: int
    sha256: str


@dataclass(frozen=True)
class Windows:
    """Token ids, one window a row, and where they came from."""

    ids: Int64[Tensor, "samples length"]
    report: CorpusReport


@dataclass(frozen=True)
class Cut:
    """How windows are cut: their length in tokens and the BOS id before each, if any."""

    length: int
    bos: int | None

    def at(self, stream: Sequence[int], start: int) -> tuple[list[int], int]:
        """The window that begins at `start`, and where the next one may begin.

        The stream must hold `length` tokens from there. A BOS that the text brings along is the window's BOS.
        """
        if self.bos is None or stream[start] == self.bos:
            end = start + self.length
            return list(stream[start:end]), end
        end = start + self.length - 1
        return [self.bos, *stream[start:end]], end


def load_windows(
    sources: Sequence[CorpusSource],
    tokenizer: PreTrainedTokenizerBase,
    *,
    samples: int,
    length: int,
    seed: int,
    bos: bool | None = None,
    allow_fewer: bool = False,
    join_documents: bool = True,
    order: Order | None = None,
) -> Windows:
    """`samples` windows of `length` tokens, shared among the sources by weight, in the sources' order.

    `bos` None follows the tokenizer's own rule. `order` None spreads over a running text and shuffles rows.
    `join_documents` False keeps every window inside one document. Fewer windows than asked: CorpusError with the
    number available, or, with `allow_fewer`, what there is (never none).
    """
    if not sources or samples < 1 or length < 2:
        raise UsageError(f"calibration needs a source, 1 sample and 2 tokens at least; got {samples} of {length}")
    bos = adds_bos(tokenizer) if bos is None else bos
    cut = Cut(length, bos_id(tokenizer) if bos else None)
    windows: list[list[int]] = []
    reports = []
    for source, share in zip(sources, shares(samples, [source.weight for source in sources]), strict=True):
        if not share:
            raise UsageError(f"{source.spec} has too little weight for one of {samples} samples: raise either")
        reading = open_source(source, tokenizer, windows=share, length=length, seed=seed, order=order)
        taken, taken_report = _take(reading, tokenizer, cut, share, seed, join_documents)
        windows += taken
        reports.append(taken_report)
    _check_enough(reports, length, allow_fewer)
    ids = torch.tensor(windows, dtype=torch.int64)
    report = CorpusReport(
        tuple(reports), len(windows), length, ids.numel(), bos, join_documents, seed, token_sha256(ids)
    )
    return Windows(ids, report)


def shares(samples: int, weights: Sequence[float]) -> list[int]:
    """`samples` divided in proportion to the weights, by largest remainder (earlier first among equals)."""
    total = sum(weights)
    exact = [samples * weight / total for weight in weights]
    whole = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_remainder[: samples - sum(whole)]:
        whole[i] += 1
    return whole


def token_sha256(ids: Int64[Tensor, "samples length"]) -> str:
    """SHA-256 of the ids as little-endian int64, row by row."""
    return hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest()


def _take(
    reading: Reading, tokenizer: PreTrainedTokenizerBase, cut: Cut, samples: int, seed: int, join: bool
) -> tuple[list[list[int]], SourceReport]:
    """Up to `samples` windows of one source, and its report."""
    tally = _Tally()
    documents = _encoded(reading, tokenizer, tally)
    if reading.kind == "spans":
        windows = [cut.at(ids, 0)[0] for ids in _long_enough(documents, cut.length, tally)]
    elif reading.kind == "rows" and not join:
        long = _long_enough(documents, cut.length, tally)
        windows = _packed(pieces(long, cut.length, samples, seed), cut, samples, join=False)
    elif reading.kind == "rows" and reading.order == "shuffle":
        parts = _separated(pieces(documents, cut.length, samples, seed), reading, tokenizer)
        windows = _packed(parts, cut, samples, join=True)
    else:
        stream = array("q", (token for ids in _separated(documents, reading, tokenizer) for token in ids))
        starts = _starts(len(stream), cut.length, samples, seed if reading.order == "shuffle" else None)
        windows = [cut.at(stream, start)[0] for start in starts]
    counts = reading.counts
    return windows, SourceReport(
        spec=reading.source.spec,
        order=reading.order,
        layout=counts.layout or "no rows",
        rows_read=counts.read,
        rows_used=tally.documents - tally.too_short,
        rows_null=counts.null,
        rows_empty=counts.empty,
        rows_too_short=tally.too_short,
        rows_malformed=counts.malformed,
        first_malformed=counts.first_malformed,
        tokens_encoded=tally.tokens,
        windows_asked=samples,
        windows=len(windows),
    )


@dataclass
class _Tally:
    """Counts of what passed while windows were made."""

    documents: int = 0
    tokens: int = 0
    too_short: int = 0


def _encoded(reading: Reading, tokenizer: PreTrainedTokenizerBase, tally: _Tally) -> Iterator[list[int]]:
    for text in reading.documents:
        ids = encode(tokenizer, text, bos=False)
        tally.documents += 1
        tally.tokens += len(ids)
        yield ids


def _separated(parts: Iterable[list[int]], reading: Reading, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """The parts, from the second on behind a blank line; chats from a template end as the template ends them."""
    separator = encode(tokenizer, SEPARATOR, bos=False)
    for number, ids in enumerate(parts):
        yield ids if number == 0 or reading.counts.templated else separator + ids


def _long_enough(documents: Iterable[list[int]], length: int, tally: _Tally) -> Iterator[list[int]]:
    for ids in documents:
        if len(ids) >= length:
            yield ids
        else:
            tally.too_short += 1


def pieces(documents: Iterable[list[int]], length: int, samples: int, seed: int) -> Iterator[list[int]]:
    """The documents' tokens so that long documents do not crowd out the others.

    Of each document first one piece of at most `length` tokens, from a seeded place; what is left over (as much as
    `samples` windows can need) follows once the documents have run out.
    """
    generator = random.Random(seed)
    rest: list[list[int]] = []
    kept = 0
    for ids in documents:
        start = generator.randrange(len(ids) - length + 1) if len(ids) > length else 0
        yield ids[start : start + length]
        for left in (ids[:start], ids[start + length :]):
            if left and kept < 2 * samples * length:
                rest.append(left)
                kept += len(left)
    yield from rest


def _packed(parts: Iterable[list[int]], cut: Cut, samples: int, *, join: bool) -> list[list[int]]:
    """Windows one behind the other, across the parts if `join`; takes no more parts than they need."""
    windows: list[list[int]] = []
    stream = array("q")
    for ids in parts:
        stream.extend(ids)
        start = 0
        while len(windows) < samples and len(stream) - start >= cut.length:
            window, start = cut.at(stream, start)
            windows.append(window)
        if len(windows) == samples:
            break
        del stream[: start if join else None]
    return windows


def _starts(tokens: int, length: int, samples: int, seed: int | None) -> list[int]:
    """Starts of up to `samples` windows that do not overlap: evenly spaced, or (with a seed) chosen from a grid."""
    available = tokens // length
    samples = min(samples, available)
    if seed is not None:
        chosen = np.random.default_rng(seed).permutation(available)[:samples]
        return sorted(int(place) * length for place in chosen)
    return [i * (tokens - length) // max(1, samples - 1) for i in range(samples)]


def _check_enough(reports: Sequence[SourceReport], length: int, allow_fewer: bool) -> None:
    for report in reports:
        if report.windows == report.windows_asked or (allow_fewer and report.windows):
            continue
        reason = f"; first malformed row: {report.first_malformed}" if report.first_malformed else ""
        raise CorpusError(
            f"{report.spec} gives {report.windows} windows of {length} tokens, {report.windows_asked} are asked "
            f"({report.rows_read} rows read, {report.rows_used} used, {report.rows_null} null, "
            f"{report.rows_empty} empty, {report.rows_too_short} too short, {report.rows_malformed} malformed, "
            f"{report.tokens_encoded} tokens{reason}): give more text, or ask for fewer or shorter samples"
        )
