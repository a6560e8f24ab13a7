"""Windows: which tokens are scored, how often, with which context, and what BOS does to them."""

import hashlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from cann_llm_quant.errors import CorpusError, InputError, UsageError
from cann_llm_quant.evaluate.windows import cut_windows, own_bos


def word_tokenizer(*, bos: str | None, adds: bool) -> PreTrainedTokenizerFast:
    inner = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2, "a": 3}, unk_token="<unk>"))
    if adds:
        inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=bos, eos_token="</s>")


def scored_stream_indices(windows) -> list[int]:
    count, length = windows.ids.shape
    return [
        windows.stream_index(i, position) for i in range(count) for position in range(windows.first_scored(i), length)
    ]


def test_disjoint_windows_drop_the_tail_and_skip_each_first_token() -> None:
    windows = cut_windows(list(range(100, 110)), window=4)
    assert windows.ids.tolist() == [[100, 101, 102, 103], [104, 105, 106, 107]]
    assert windows.overlap == (0, 0)
    assert windows.dropped_tokens == 2
    assert scored_stream_indices(windows) == [1, 2, 3, 5, 6, 7]
    assert windows.bos == "none"


def test_stride_scores_new_tokens_only() -> None:
    windows = cut_windows(list(range(10)), window=4, stride=2)
    assert windows.ids.tolist() == [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7], [6, 7, 8, 9]]
    assert scored_stream_indices(windows) == list(range(1, 10))


def test_c73_bos_takes_the_first_position_of_every_window() -> None:
    windows = cut_windows([10, 11, 12, 13, 14, 15, 16], window=4, bos_id=1, bos="each-window")
    assert windows.ids.tolist() == [[1, 10, 11, 12], [1, 13, 14, 15]]
    assert windows.dropped_tokens == 1
    assert scored_stream_indices(windows) == list(range(6))


@pytest.mark.parametrize("bos", ["auto", "each-window"])
def test_c73_bos_is_never_doubled(bos) -> None:
    windows = cut_windows([1, 10, 11, 12, 1, 13, 14, 15, 16, 17, 18], window=4, bos_id=1, bos=bos)
    assert windows.ids.tolist() == [[1, 10, 11, 12], [1, 13, 14, 15], [1, 16, 17, 18]]


def test_c73_a_window_without_a_new_token_is_left_out() -> None:
    """The first window begins with the stream's own BOS; one token later, BOS takes that token's place."""
    windows = cut_windows([1, *range(3, 40)], window=8, stride=1, bos_id=1, bos="each-window")
    assert windows.ids[:3].tolist() == [
        [1, 3, 4, 5, 6, 7, 8, 9],
        [1, 4, 5, 6, 7, 8, 9, 10],
        [1, 5, 6, 7, 8, 9, 10, 11],
    ]
    assert windows.overlap == (0, *[7] * 30)
    assert windows.starts == (0, *range(1, 31))
    assert scored_stream_indices(windows) == list(range(1, 38))
    limited = cut_windows([1, *range(3, 40)], window=8, stride=1, bos_id=1, bos="each-window", max_windows=2)
    assert limited.ids.tolist() == windows.ids[:2].tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([1, 5, 6, 7]), min_size=9, max_size=40), st.integers(2, 8), st.integers(1, 8))
def test_c73_with_bos_inside_the_stream_every_window_brings_a_token(ids, window, stride) -> None:
    windows = cut_windows(ids, window=window, stride=min(stride, window), bos_id=1, bos="each-window")
    scored = scored_stream_indices(windows)
    assert all(windows.first_scored(i) < window for i in range(len(windows.ids)))
    assert all(overlap < window for overlap in windows.overlap)
    assert scored == sorted(set(scored))
    assert {i for i in range(len(ids) - windows.dropped_tokens) if ids[i] != 1} <= set(scored)


def test_c73_auto_follows_the_tokenizer() -> None:
    assert own_bos(word_tokenizer(bos="<s>", adds=True)) == 0
    assert own_bos(word_tokenizer(bos="<s>", adds=False)) is None
    assert own_bos(word_tokenizer(bos=None, adds=False)) is None
    assert own_bos(word_tokenizer(bos="<s>", adds=False), "each-window") == 0
    assert own_bos(word_tokenizer(bos="<s>", adds=True), "none") is None
    with pytest.raises(InputError, match="BOS"):
        own_bos(word_tokenizer(bos=None, adds=False), "each-window")
    assert cut_windows(range(8), window=4, bos_id=None, bos="auto").bos == "none"
    assert cut_windows(range(8), window=4, bos_id=9, bos="auto").bos == "each-window"
    assert cut_windows(range(8), window=4, bos_id=9, bos="none").ids[0, 0] == 0


@settings(max_examples=80, deadline=None)
@given(
    tokens=st.integers(2, 90),
    window=st.integers(2, 20),
    stride=st.integers(1, 20),
    bos=st.booleans(),
    limit=st.none() | st.integers(1, 4),
)
def test_every_covered_token_is_scored_once(tokens, window, stride, bos, limit) -> None:
    stride = min(stride, window)
    try:
        windows = cut_windows(
            range(tokens), window=window, stride=stride, bos_id=999 if bos else None, max_windows=limit
        )
    except CorpusError:
        assert tokens < window - bos
        return
    scored = scored_stream_indices(windows)
    assert len(scored) == len(set(scored))
    covered = tokens - windows.dropped_tokens
    unscored = 0 if bos else sum(overlap == 0 for overlap in windows.overlap)
    assert len(scored) == covered - unscored
    for i, row in enumerate(windows.ids.tolist()):
        text = row[1:] if bos else row
        first = windows.stream_index(i, int(bos))
        assert text == list(range(first, first + len(text)))
        assert (row[0] == 999) == bos


def test_hashes_and_counts() -> None:
    windows = cut_windows([3, 4, 5, 6, 7], window=2, text="héllo")
    assert windows.text_sha256 == hashlib.sha256("héllo".encode()).hexdigest()
    assert windows.text_bytes == 6
    assert windows.tokens_sha256 == hashlib.sha256(struct.pack("<4q", 3, 4, 5, 6)).hexdigest()
    assert windows.stream_tokens == 5


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": 1}, UsageError, "--window 1"),
        ({"window": 4, "stride": 5}, UsageError, "--stride 5"),
        ({"window": 4, "stride": 0}, UsageError, "--stride 0"),
        ({"window": 4, "max_windows": 0}, UsageError, "--max-windows 0"),
        ({"window": 4, "bos": "each-window"}, UsageError, "BOS"),
        ({"window": 400}, CorpusError, "10 tokens"),
    ],
)
def test_refusals(options, error, message) -> None:
    with pytest.raises(error, match=message):
        cut_windows(range(10), **options)
