"""End tokens and stop texts."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.runner.stop import StopTexts, end_ids


def run(stops, pieces, include=False) -> tuple[str, bool]:
    texts = StopTexts(stops, include)
    shown = ""
    for piece in pieces:
        shown += texts.push(piece)
        if texts.stopped:
            return shown, True
    return shown + texts.finish(), False


def literal_twin(stops, text, include) -> tuple[str, bool]:
    """Reads one character more at a time: the first prefix of the text that ends with a stop text decides."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(map(len, ending))
            return (text[:end] if include else text[: end - longest]), True
    return text, False


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("abc", max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=6),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
@example(text="aab", cuts=[2], stops=["ab"], include=False)
@example(text="abcd", cuts=[1, 2], stops=["bcd", "c"], include=False)
def test_c71_the_outcome_does_not_depend_on_the_pieces(text, cuts, stops, include) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert run(stops, pieces, include) == literal_twin(stops, text, include)


def test_c71_one_stop_is_the_beginning_of_another() -> None:
    assert run(["ab", "abc"], ["x", "a", "b", "c"]) == ("x", True)
    assert run(["ab", "abc"], ["xabc"]) == ("x", True)
    assert run(["ab", "abc"], ["xabc"], include=True) == ("xab", True)


def test_c71_a_withheld_tail_is_flushed() -> None:
    assert run(["<end>"], ["so <e", "n"]) == ("so <en", False)


def test_text_is_withheld_only_while_it_could_be_a_stop() -> None:
    texts = StopTexts(["###"])
    assert [texts.push(piece) for piece in ("a#", "#", "b", "#")] == ["a", "", "##b", ""]
    assert texts.finish() == "#"


def test_c69_end_ids_are_the_union_of_all_files() -> None:
    assert end_ids({"eos_token_id": 5}, {"eos_token_id": [2, 5, 7]}, 2) == {2, 5, 7}
    assert end_ids({}, {"eos_token_id": 7}, None) == {7}
    assert end_ids({"eos_token_id": None}, {}, None) == frozenset()


@pytest.mark.parametrize("value", ["</s>", [1, "2"], True, 2.0, {"id": 2}])
def test_malformed_end_ids_are_refused(value) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        end_ids({}, {"eos_token_id": value}, None)
