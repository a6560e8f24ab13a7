"""Windows against literal bookkeeping: every text token is a number of its own, so that reuse and order are visible."""

import gzip
import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from cann_llm_quant.corpus import CorpusSource, Windows, documents, load_windows, parse_source
from cann_llm_quant.corpus.windows import Cut, _packed, _starts, pieces, shares
from cann_llm_quant.errors import CorpusError, UsageError
from cann_llm_quant.tokenizer import encode

BOS = -1

LENGTHS = st.lists(st.integers(0, 60), max_size=12)


def numbered(lengths: list[int]) -> list[list[int]]:
    """Documents of these lengths whose tokens count up through all of them."""
    documents, first = [], 0
    for length in lengths:
        documents.append(list(range(first, first + length)))
        first += length
    return documents


def write_rows(path: Path, texts: list[str]) -> CorpusSource:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return CorpusSource(str(path))


@given(LENGTHS, st.integers(2, 20), st.integers(1, 10), st.booleans(), st.booleans(), st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_packed_windows_have_exactly_n_tokens_and_share_none(
    lengths: list[int], length: int, samples: int, bos: bool, join: bool, seed: int
) -> None:
    cut = Cut(length, BOS if bos else None)
    parts = list(pieces(iter(numbered(lengths)), length, samples, seed))
    windows = _packed(iter(parts), cut, samples, join=join)
    assert all(len(window) == length for window in windows)
    assert all((window[0] == BOS) == bos for window in windows)
    used = [token for window in windows for token in window if token != BOS]
    assert len(used) == len(set(used))
    assert set(used) <= set(range(sum(lengths)))
    if len(windows) < samples and join:
        assert sum(map(len, parts)) - len(used) < length, "a window more could have been cut"


@given(LENGTHS, st.integers(2, 20), st.integers(1, 10), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_c43_long_documents_are_cut_up_and_crowd_none_out(
    lengths: list[int], length: int, samples: int, seed: int
) -> None:
    whole = numbered(lengths)
    found = list(pieces(iter(whole), length, samples, seed))
    for document, piece in zip(whole, found, strict=False):
        assert len(piece) == min(length, len(document))
        assert set(piece) <= set(document)
    tokens = [token for piece in found for token in piece]
    assert len(tokens) == len(set(tokens))
    assert len(tokens) >= min(sum(lengths), 2 * samples * length), "leftovers are kept as far as they can be needed"


@given(st.integers(0, 500), st.integers(2, 20), st.integers(1, 30), st.sampled_from([None, 0, 1]))
@settings(max_examples=200, deadline=None)
def test_starts_in_a_text_do_not_overlap_and_spread_reaches_both_ends(
    tokens: int, length: int, samples: int, seed: int | None
) -> None:
    starts = _starts(tokens, length, samples, seed)
    assert len(starts) == min(samples, tokens // length)
    assert all(after - before >= length for before, after in itertools.pairwise(starts))
    assert all(0 <= start <= tokens - length for start in starts)
    if seed is None and len(starts) > 1:
        assert (starts[0], starts[-1]) == (0, tokens - length)
        gaps = [after - before for before, after in itertools.pairwise(starts)]
        assert max(gaps) - min(gaps) <= 1


@given(st.integers(1, 500), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_shares_follow_the_weights(samples: int, weights: list[float]) -> None:
    found = shares(samples, weights)
    assert sum(found) == samples
    for share, weight in zip(found, weights, strict=True):
        assert abs(share - samples * weight / sum(weights)) < 1 + 1e-9


def test_shares_of_equal_remainders_go_to_the_first() -> None:
    assert shares(5, [1, 1, 1]) == [2, 2, 1]
    assert shares(64, [3, 1]) == [48, 16]


@pytest.mark.parametrize("bos", [False, True])
def test_a_text_gives_windows_spread_evenly(tmp_path: Path, plain: PreTrainedTokenizerBase, bos: bool) -> None:
    text = " ".join(f"word{i}" for i in range(900))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    ids = plain.encode(text, add_special_tokens=False)
    windows = load_windows([CorpusSource(str(tmp_path / "a.txt"))], plain, samples=7, length=32, seed=0, bos=bos)
    expected = []
    for i in range(7):
        start = i * (len(ids) - 32) // 6
        expected.append([0, *ids[start : start + 31]] if bos else ids[start : start + 32])
    assert windows.ids.tolist() == expected
    assert windows.report.bos == bos
    assert windows.report.sources[0].order == "spread"
    assert windows.report.sources[0].tokens_encoded == len(ids)


def test_c73_a_window_that_begins_with_the_texts_own_bos_gets_no_second(
    tmp_path: Path, prefixed: PreTrainedTokenizerBase
) -> None:
    (tmp_path / "a.txt").write_text("<s>" + "quick brown fox " * 40, encoding="utf-8")
    windows = load_windows([CorpusSource(str(tmp_path / "a.txt"))], prefixed, samples=3, length=16, seed=0)
    assert windows.report.bos, "auto follows the tokenizer's own rule"
    assert (windows.ids[:, 0] == 0).all()
    assert (windows.ids[:, 1:] != 0).all()


def same(first: Windows, second: Windows) -> bool:
    return torch.equal(first.ids, second.ids) and first.report == second.report


def test_rows_are_shuffled_by_the_seed_and_by_nothing_else(tmp_path: Path, plain: PreTrainedTokenizerBase) -> None:
    source = write_rows(tmp_path / "a.jsonl", [f"row {i} " * 10 for i in range(60)])
    first, again, other = (load_windows([source], plain, samples=5, length=24, seed=seed) for seed in (1, 1, 2))
    assert same(first, again)
    assert first.report.sha256 != other.report.sha256
    assert first.report.sources[0].rows_read < 60, "no more rows are used than needed"
    in_order = load_windows([source], plain, samples=5, length=24, seed=1, order="spread")
    assert plain.decode(in_order.ids[0].tolist()).startswith("row 0 row 0")


def test_a_text_in_shuffled_order_takes_grid_places(tmp_path: Path, plain: PreTrainedTokenizerBase) -> None:
    text = " ".join(f"w{i}" for i in range(500))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    ids = plain.encode(text, add_special_tokens=False)
    grid = {tuple(ids[start : start + 16]) for start in range(0, len(ids) - 15, 16)}
    windows = load_windows(
        [CorpusSource(str(tmp_path / "a.txt"))], plain, samples=9, length=16, seed=4, order="shuffle"
    )
    assert len({tuple(row) for row in windows.ids.tolist()} & grid) == 9


def test_documents_are_joined_by_a_blank_line(tmp_path: Path, plain: PreTrainedTokenizerBase) -> None:
    source = write_rows(tmp_path / "a.jsonl", ["fox"] * 40)
    windows = load_windows([source], plain, samples=2, length=20, seed=0)
    assert plain.decode(windows.ids.flatten().tolist()).startswith("fox\n\nfox\n\nfox\n\n")


def test_c43_documents_kept_apart(tmp_path: Path, plain: PreTrainedTokenizerBase) -> None:
    source = write_rows(tmp_path / "a.jsonl", ["short", "a" * 5, "xyzw " * 100, "fox " * 200, " "])
    windows = load_windows([source], plain, samples=6, length=30, seed=0, join_documents=False)
    for row in windows.ids.tolist():
        text = plain.decode(row)
        assert not ("fox" in text and "xyzw" in text)
    report = windows.report.sources[0]
    assert (report.rows_read, report.rows_used, report.rows_empty, report.rows_too_short) == (5, 2, 1, 2)


def test_c43_a_shortfall_says_its_numbers_or_is_allowed(tmp_path: Path, plain: PreTrainedTokenizerBase) -> None:
    source = write_rows(tmp_path / "a.jsonl", ["five words in this row"] * 12)
    with pytest.raises(CorpusError, match=r"gives \d windows of 64 tokens, 128 are asked \(12 rows read, 12 used"):
        load_windows([source], plain, samples=128, length=64, seed=0)
    windows = load_windows([source], plain, samples=128, length=64, seed=0, allow_fewer=True)
    tokens = sum(len(encode(plain, text, bos=False)) for text in ["five words in this row"] * 12)
    separators = 11 * len(encode(plain, "\n\n", bos=False))
    assert windows.report.samples == (tokens + separators) // 64
    assert (windows.report.sources[0].windows_asked, windows.report.sources[0].windows) == (128, len(windows.ids))


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n{"text": null}\n', '{"text": "  "}\n'])
def test_c43_nothing_at_all_is_refused_whatever_is_allowed(
    tmp_path: Path, plain: PreTrainedTokenizerBase, content: str
) -> None:
    (tmp_path / "a.jsonl").write_text(content, encoding="utf-8")
    (tmp_path / "a.txt").write_text("  \n", encoding="utf-8")
    for name in ("a.jsonl", "a.txt"):
        with pytest.raises(CorpusError, match="gives 0 windows"):
            load_windows([CorpusSource(str(tmp_path / name))], plain, samples=1, length=4, seed=0, allow_fewer=True)


def test_c44_lengths_are_tokens_and_not_characters(tmp_path: Path, plain: PreTrainedTokenizerBase) -> None:
    source = write_rows(tmp_path / "a.jsonl", ["weights " * 4000])
    assert load_windows([source], plain, samples=1, length=256, seed=0).ids.shape == (1, 256)


def test_several_sources_share_by_weight(tmp_path: Path, plain: PreTrainedTokenizerBase) -> None:
    foxes = write_rows(tmp_path / "a.jsonl", ["fox " * 50] * 9)
    (tmp_path / "b.txt").write_text("dog " * 900, encoding="utf-8")
    dogs = parse_source(f"{tmp_path / 'b.txt'}::weight=3")
    windows = load_windows([foxes, dogs], plain, samples=8, length=16, seed=0)
    texts = [plain.decode(row) for row in windows.ids.tolist()]
    assert ["dog" in text for text in texts] == [False] * 2 + [True] * 6
    assert [report.windows for report in windows.report.sources] == [2, 6]


def test_a_source_without_a_single_window_is_refused(tmp_path: Path, plain: PreTrainedTokenizerBase) -> None:
    (tmp_path / "a.txt").write_text("fox " * 900, encoding="utf-8")
    foxes, crumbs = (CorpusSource(str(tmp_path / "a.txt"), weight) for weight in (1.0, 0.01))
    with pytest.raises(UsageError, match="too little weight for one of 8 samples"):
        load_windows([foxes, crumbs], plain, samples=8, length=16, seed=0)


@pytest.mark.parametrize(("samples", "length"), [(0, 8), (1, 1), (-1, 8)])
def test_impossible_requests(tmp_path: Path, plain: PreTrainedTokenizerBase, samples: int, length: int) -> None:
    with pytest.raises(UsageError):
        load_windows([CorpusSource("a.txt")], plain, samples=samples, length=length, seed=0)


@pytest.mark.parametrize("order", ["spread", "shuffle"])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_long_text_is_read_in_spans(
    tmp_path: Path,
    plain: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    order: documents.Order,
    compressed: bool,
) -> None:
    """Spans lie at byte offsets, here within words of 2, 3 and 4 bytes a character; none is encoded twice."""
    monkeypatch.setattr(documents, "WHOLE_TEXT_BYTES", 4096)
    text = " ".join(f"é{i}模型𝒳" for i in range(4000))
    path = tmp_path / ("a.txt.gz" if compressed else "a.txt")
    data = text.encode("utf-8")
    path.write_bytes(gzip.compress(data) if compressed else data)
    seen: list[str] = []

    def counted(tokenizer: PreTrainedTokenizerBase, text: str, *, bos: bool) -> list[int]:
        seen.append(text)
        return encode(tokenizer, text, bos=bos)

    monkeypatch.setattr("cann_llm_quant.corpus.windows.encode", counted)
    windows = load_windows([CorpusSource(str(path))], plain, samples=5, length=32, seed=3, order=order)
    assert windows.ids.shape == (5, 32)
    assert len(seen) == 5
    assert sum(map(len, seen)) < len(text) / 4
    places = [text.index(piece) for piece in seen]
    assert places == sorted(places)
    words = set(text.split())
    assert all(set(piece.split()[1:-1]) <= words for piece in seen)
