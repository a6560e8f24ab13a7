"""Which linears have quantized inputs, of which scheme, and what is refused before any work."""

import pytest
from test_assignment import make_arch

from cann_llm_quant.assignment import activation_scheme, assign
from cann_llm_quant.errors import UsageError
from cann_llm_quant.quant.activations import needs_range
from cann_llm_quant.quant.scheme import ActivationScheme
from cann_llm_quant.recipe import ActivationFormat, Recipe, Rule, WeightScheme, validate_recipe

W8A8 = WeightScheme(bits=8, group_size=-1, activations=ActivationFormat())
Q, K, OUT = ("model.layers.0.self_attn." + name for name in ("q_proj", "k_proj", "o_proj"))
DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (ActivationFormat(), ActivationScheme("int8", True, True, "token")),
        (ActivationFormat(symmetric=False), ActivationScheme("int8", False, True, "token")),
        (ActivationFormat(dynamic=False), ActivationScheme("int8", True, False, "tensor")),
        (ActivationFormat(type="fp8", dynamic=False), ActivationScheme("fp8_e4m3", True, False, "tensor")),
        (ActivationFormat(type="mxfp8"), ActivationScheme("fp8_e4m3", True, True, "group", 32)),
        (ActivationFormat(type="mxfp4"), ActivationScheme("fp4_e2m1", True, True, "group", 32)),
        (ActivationFormat(type="nvfp4"), ActivationScheme("fp4_e2m1", True, True, "group", 16)),
    ],
)
def test_formats_of_recipes_are_these_schemes(wanted: ActivationFormat, expected: ActivationScheme) -> None:
    assert activation_scheme(wanted) == expected
    assert wanted.needs_range == needs_range(expected)


def test_fp8_inputs_of_tiled_weights_have_a_range_for_every_128_columns() -> None:
    fp8 = ActivationFormat(type="fp8")
    assert activation_scheme(fp8, tiled=True) == ActivationScheme("fp8_e4m3", True, True, "group", 128)


def test_every_quantized_linear_has_the_schemes_activations_and_no_other() -> None:
    recipe = Recipe(scheme=W8A8, rules=(Rule(match="re:.*down_proj", scheme="skip"),))
    assignment = assign(make_arch(), recipe)
    assert set(assignment.activations) == set(assignment.schemes)
    assert DOWN not in assignment.activations
    assert assignment.ranges == {}


def test_c23_a_fusion_group_shares_the_wider_activations() -> None:
    weights_only = W8A8.model_copy(update={"activations": None})
    recipe = Recipe(scheme=W8A8, rules=(Rule(match=K, scheme=weights_only),))
    assignment = assign(make_arch(), recipe)
    assert Q not in assignment.activations
    assert OUT in assignment.activations
    assert any("one scheme (int8, group size -1)" in warning for warning in assignment.warnings)


def test_stored_ranges_are_listed_with_how_they_are_measured() -> None:
    static = ActivationFormat(dynamic=False, range="percentile", percentile=99.5)
    rule = Rule(match="re:.*down_proj", scheme=W8A8.model_copy(update={"activations": static}))
    recipe = Recipe(method="rtn", scheme=W8A8, rules=(rule,))
    assert recipe.needs_ranges
    assert recipe.needs_calibration
    assignment = assign(make_arch(), recipe)
    assert assignment.ranges == {f"model.layers.{i}.mlp.down_proj": static for i in (0, 1)}
    assert assignment.activations[Q].dynamic


def test_a_recipe_without_stored_ranges_needs_no_text_for_rounding() -> None:
    assert not Recipe(method="rtn", scheme=W8A8).needs_calibration


def test_groups_that_do_not_divide_an_input_are_refused_by_name() -> None:
    recipe = Recipe(scheme=WeightScheme(bits=8, group_size=-1, activations=ActivationFormat(type="mxfp8")))
    with pytest.raises(UsageError, match=r"mlp.down_proj has 176 input features.* a multiple of 32"):
        assign(make_arch(), recipe)


@pytest.mark.parametrize(
    ("activations", "message"),
    [
        ({"type": "fp8", "symmetric": False}, "fp8 activations have no zero points"),
        ({"type": "mxfp4", "dynamic": False}, "mxfp4 activations take each group's scale"),
        ({"dynamic": False, "symmetric": False, "range": "entropy"}, "entropy ranges are of symmetric int"),
        ({"percentile": 40}, "scheme.activations.percentile"),
    ],
)
def test_impossible_formats_are_refused_when_the_recipe_is_read(activations: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        validate_recipe({"scheme": {"activations": activations}}, "recipe")


def test_tiled_fp8_on_a_narrow_model_is_not_advised_to_use_fp8() -> None:
    with pytest.raises(UsageError) as caught:
        assign(make_arch(), validate_recipe({"scheme": "FP8-block"}, "test"))
    message = str(caught.value)
    assert "64 input features, fp8 activations beside tiles of 128 x 128 need a multiple of 128" in message
    assert message.endswith("skip the linear or choose FP8, whose weights have one scale a row")
    assert assign(make_arch(), validate_recipe({"scheme": "FP8"}, "test")).activations
