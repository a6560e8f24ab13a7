import pytest

from cann_llm_quant.shown import LIMIT, shown, shown_name


@pytest.mark.parametrize("value", ["", "llama", "it's", 4096, -1.5, None, True, [1, "a"], {"b": [2]}, (3,)])
def test_a_short_value_is_what_python_writes(value: object) -> None:
    assert shown(value) == repr(value)


def test_a_long_text_ends_and_says_how_long_it_was() -> None:
    assert shown("x" * 100_000) == f"'{'x' * 80}'… (100000 characters)"
    assert shown("abcdef", limit=3) == "'abc'… (6 characters)"


@pytest.mark.parametrize(
    "value",
    [["x" * 100_000] * 3, {"k" * 100_000: "v" * 100_000}, list(range(100_000)), 10**4000, [[[[[["deep"] * 50]]]]] * 50],
)
def test_a_long_value_of_another_type_ends(value: object) -> None:
    assert len(shown(value)) <= LIMIT + 1


@pytest.mark.parametrize("text", ["a\nb", "a\r\nb", "\x1b[31mred", "\x9b2J", "\u2028", "\u202etxt", "\0", "\udcff"])
def test_nothing_in_it_breaks_the_line_or_reaches_a_terminal(text: str) -> None:
    for value in (text, [text], {text: text}):
        assert shown(value).isprintable()


def test_a_name_stands_as_it_is_unless_it_would_harm_the_message() -> None:
    assert shown_name("model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert shown_name("a\nb") == r"'a\nb'"
    assert shown_name("x" * 201) == f"'{'x' * 200}'… (201 characters)"
