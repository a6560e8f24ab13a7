"""The one line of text that says how keys and values are stored, by layer; the section of a recipe around it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_llm_quant.errors import UsageError
from cann_llm_quant.kv_recipe import KvRecipe
from cann_llm_quant.kv_spec import parse_kv_spec
from cann_llm_quant.quant.kv import KvScheme, LayerKv
from cann_llm_quant.recipe import Recipe, validate_recipe

FP8, FP16 = KvScheme("fp8_e5m2"), KvScheme("fp16")


def test_ranges_of_layers_and_the_rest() -> None:
    layers = parse_kv_spec("first 30%: fp8_e5m2, last 30%: fp16", 10)
    assert [layer.k for layer in layers] == [FP8] * 3 + [None] * 4 + [FP16] * 3
    assert all(layer.k == layer.v for layer in layers)
    listed = parse_kv_spec("int8-head; 0,3,5-6: float; last 1: fp16", 8)
    assert [i for i, layer in enumerate(listed) if layer == LayerKv()] == [0, 3, 5, 6]
    assert listed[7].k == FP16
    assert listed[1].k == KvScheme("int8", strategy="head")


@pytest.mark.parametrize(
    ("share", "layers", "count"), [("30%", 30, 9), ("30%", 28, 8), ("25%", 2, 1), ("1%", 4, 1), ("3", 4, 3)]
)
def test_a_share_is_rounded_to_whole_layers_and_never_empty(share: str, layers: int, count: int) -> None:
    found = parse_kv_spec(f"last {share}: fp16", layers)
    assert [layer.k is not None for layer in found] == [False] * (layers - count) + [True] * count


def test_of_two_rules_for_a_layer_the_last_wins_and_a_rule_beats_the_default_wherever_it_stands() -> None:
    assert parse_kv_spec("0-1: fp16, 1: float, fp8_e5m2", 3) == (
        LayerKv(FP16, FP16),
        LayerKv(),
        LayerKv(FP8, FP8),
    )


def test_what_short_names_mean() -> None:
    (int8,), (int4,), (fp8,) = (parse_kv_spec(name, 1) for name in ("int8", "int4", "FP8"))
    assert int8 == LayerKv(KvScheme("int8", True, "channel", None, True), KvScheme("int8", True, "token", None, True))
    assert int4 == LayerKv(KvScheme("int4", False, "channel", None, True), KvScheme("int4", False, "token", None, True))
    assert fp8 == LayerKv(KvScheme("fp8_e4m3"), KvScheme("fp8_e4m3"))
    (mixed,) = parse_kv_spec("k=int8-asym-head v=int4-g32", 1)
    assert mixed == LayerKv(KvScheme("int8", False, "head"), KvScheme("int4", True, "group", 32, True))


@settings(deadline=None, max_examples=60)
@given(
    dtype=st.sampled_from(["int8", "int4", "fp8_e4m3", "fp8_e5m2"]),
    strategy=st.sampled_from(["tensor", "head", "channel", "token", "group"]),
    symmetric=st.booleans(),
    dynamic=st.booleans(),
)
def test_a_scheme_reads_back_from_its_label(dtype: str, strategy: str, symmetric: bool, dynamic: bool) -> None:
    symmetric |= dtype.startswith("fp8")
    dynamic |= strategy in ("token", "group")
    scheme = KvScheme(dtype, symmetric, strategy, 16 if strategy == "group" else None, dynamic)
    assert parse_kv_spec(f"k={scheme.label()} v=float", 1) == (LayerKv(scheme, None),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int9", "'int9' is no KV cache format; choose from int8"),
        ("int8-row", "'row' is no option"),
        ("int8-head-channel", "head and channel exclude each other"),
        ("int8-token-static", "leave out static"),
        ("fp8_e4m3-asym", "no zero points"),
        ("fp16-head", "leave out head"),
        ("int8, int4", "two formats for all layers"),
        ("k=int8", "does not give both K and V"),
        ("middle: int8", "'middle' names no layers"),
        ("last 5: int8", "asks for 5 layers of a model that has 4"),
        ("first 0: int8", "asks for 0 layers"),
        ("first 120%: int8", "is no number of layers"),
        ("2-4: int8", "layers 2-4 are not in a model of 4, whose last is 3"),
        ("3-2: int8", "layers 3-2"),
        (" ", "is missing"),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words.replace("(", r"\(")):
        parse_kv_spec(text, 4)


def test_the_section_of_a_recipe_refuses_what_would_do_nothing() -> None:
    recipe = validate_recipe({"kv_cache": {"scheme": ["int8", "first 2: fp16"], "sensitive": "numbers, names"}}, "r")
    assert recipe.kv_cache is not None
    assert recipe.kv_cache.scheme == "int8, first 2: fp16"
    assert recipe.kv_cache.sensitive == ("numbers", "names")
    for document, words in (
        ({"scheme": "int4", "headroom": 1.1}, "are for stored scales"),
        ({"scheme": "fp8", "scale": 1.0, "percentile": 99}, "leaves nothing to headroom"),
        ({"scheme": "int8", "smooth": True}, "for channels of K that share a scale"),
        ({"scheme": "float", "sink_tokens": 4}, "'float' keeps every page in float; leave out sink_tokens"),
        ({"scheme": "first 2: float; float", "sensitive": ["numbers"]}, "keeps every page in float"),
        ({"scheme": "int9"}, "field kv_cache.scheme: 'int9' is no KV cache format"),
        ({"page_size": 20}, "kv_cache.page_size"),
        ({"sensitive": ["dates"]}, "kv_cache.sensitive"),
    ):
        with pytest.raises(UsageError, match=words):
            validate_recipe({"kv_cache": document}, "r")


def test_tokens_stay_in_float_beside_any_format_that_is_not_it() -> None:
    for scheme in ("float", "fp16", "first 1: float, int8", "auto"):
        kept = 0 if scheme == "float" else 4
        assert KvRecipe(scheme=scheme, sink_tokens=kept).sink_tokens == kept


def test_text_is_read_for_stored_scales_alone() -> None:
    def reads(**section: object) -> bool:
        return Recipe(method="rtn", kv_cache=KvRecipe.model_validate(section)).needs_calibration

    assert reads(scheme="fp8_e4m3")
    assert reads(scheme="int4-head-dynamic", smooth=True)
    assert not reads(scheme="int4")
    assert not reads(scheme="fp8_e4m3", scale=1.0)
    assert not Recipe(method="rtn").needs_calibration


def test_the_method_none_is_for_the_cache_alone() -> None:
    assert validate_recipe({"method": "none", "kv_cache": {}}, "r").method == "none"
    for document, words in (
        ({}, "add --kv-cache"),
        ({"kv_cache": {}, "head": {"bits": 8, "group_size": -1}}, "leave out head"),
        ({"kv_cache": {}, "scheme": "W8A8"}, "leave out scheme.activations"),
    ):
        with pytest.raises(UsageError, match=words):
            validate_recipe({"method": "none", **document}, "r")
