"""Recipes: what is accepted, and where the message points when it is not."""

from pathlib import Path

import pytest

from cann_llm_quant.errors import UsageError
from cann_llm_quant.patterns import compile_pattern
from cann_llm_quant.recipe import Recipe, load_recipe, validate_recipe


def test_yaml_and_json_give_the_same_recipe(tmp_path: Path) -> None:
    yaml_file, json_file = tmp_path / "r.yaml", tmp_path / "r.json"
    yaml_file.write_text(
        "method: rtn\nscheme: {bits: 8, group_size: -1}\nrules: [{match: ['re:.*o_proj'], scheme: skip}]"
    )
    json_file.write_text(load_recipe(yaml_file).to_json())
    assert load_recipe(yaml_file) == load_recipe(json_file)
    assert load_recipe(yaml_file).scheme.group_size == -1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("methd: awq", ["methd", "Extra inputs"]),
        ("scheme: {bits: 7}", ["scheme.bits", "7"]),
        ("scheme: {group_size: 0}", ["scheme.group_size", "0 is not a group size", "-1"]),
        ("calibration: {samples: 0}", ["calibration.samples"]),
        ("- awq", ["must be a mapping"]),
        ("method: [", ["not valid YAML"]),
    ],
)
def test_c02_wrong_fields_are_named(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_recipe(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    for word in words:
        assert word in message


def test_missing_file_and_bad_encoding(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"method: \xff")
    with pytest.raises(UsageError, match="byte 8"):
        load_recipe(tmp_path / "latin.yaml")


def test_parts_of_a_method_come_in_any_order() -> None:
    assert validate_recipe({"method": "gptq+smoothquant+awq"}, "test").method == "smoothquant+awq+gptq"
    with pytest.raises(UsageError, match="method"):
        validate_recipe({"method": "gptq+rtn"}, "test")


def test_clip_default_follows_the_method() -> None:
    assert Recipe(method="awq").clipping
    assert not Recipe(method="rtn").clipping
    assert validate_recipe({"method": "rtn", "clip": True}, "test").clipping


def test_an_effort_that_nothing_spends_is_refused() -> None:
    with pytest.raises(UsageError, match="effort is for methods that calibrate, not for rtn"):
        validate_recipe({"method": "rtn", "effort": "best"}, "test")
    assert validate_recipe({"method": "awq", "effort": "best"}, "test").effort == "best"


def test_c54_patterns_match_whole_names_only() -> None:
    names = ["model.layers.0.mlp.gate_proj", "model.layers.0.mlpxgate", "lm_head"]
    assert [n for n in names if compile_pattern("re:mlp.gate")(n)] == []
    assert [n for n in names if compile_pattern("lm_head")(n)] == ["lm_head"]
    assert [n for n in names if compile_pattern("glob:*.gate_proj")(n)] == [names[0]]
    assert [n for n in names if compile_pattern(r"re:.*mlp\.gate.*")(n)] == [names[0]]
    assert [n for n in names if compile_pattern("*.gate_proj")(n)] == []
    with pytest.raises(UsageError, match="position 1"):
        compile_pattern("re:a(")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("embedding", {"bits": 4, "group_size": -1}, "one scale a row"),
        ("embedding", {"bits": 8, "group_size": 32}, "one scale a row"),
        ("head", {"type": "fp8", "group_size": "tensor"}, "stored as integers"),
        ("head", {"bits": 8, "activations": {"type": "int8"}}, "stays in float"),
    ],
)
def test_schemes_that_a_head_or_an_embedding_cannot_have_are_refused(
    field: str, value: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=rf"field {field}.*{message}"):
        validate_recipe({field: value}, "the recipe")


def test_an_alpha_is_for_smoothquant_alone() -> None:
    assert validate_recipe({"method": "smoothquant", "smooth_alpha": 0.5}, "r").smooth_alpha == 0.5
    for method, alpha in (("awq", 0.5), ("smoothquant+awq", 0.5), ("smoothquant", 1.5)):
        with pytest.raises(UsageError, match="smooth_alpha"):
            validate_recipe({"method": method, "smooth_alpha": alpha}, "r")
