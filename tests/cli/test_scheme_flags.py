"""`--scheme`, `--bits` and `--group-size` together; the names of schemes in recipes."""

import json
from pathlib import Path

import pytest
from tiny_models import save_tiny

from cann_llm_quant.assignment import assign
from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.cli.main import main
from cann_llm_quant.cli.recipe_flags import parse_group_size
from cann_llm_quant.errors import UsageError
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.recipe import NAMED_SCHEMES, Recipe, WeightScheme, validate_recipe


def shown(capsys: pytest.CaptureFixture[str], *flags: str) -> WeightScheme:
    assert main(["quantize", "M", "--show-recipe", *flags]) == 0
    return WeightScheme.model_validate(json.loads(capsys.readouterr().out)["scheme"])


def test_a_name_stands_for_weights_and_inputs_and_flags_override_it(capsys: pytest.CaptureFixture[str]) -> None:
    scheme = shown(capsys, "--scheme", "w8a8-static")
    assert (scheme.bits, scheme.group_size) == (8, -1)
    assert scheme.activations is not None
    assert (scheme.activations.type, scheme.activations.dynamic) == ("int8", False)
    assert shown(capsys, "--scheme", "W4A8", "--group-size", "64", "--asymmetric").group_size == 64
    assert shown(capsys, "--scheme", "FP8", "--group-size", "tensor").group_size == "tensor"
    assert shown(capsys, "--scheme", "W4A16", "--bits", "3").bits == 3
    assert shown(capsys, "--scheme", "FP8-block").group_size == "block"
    assert shown(capsys, "--group-size", "-1").group_size == -1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--scheme", "FP9"], "'FP9' is no scheme; choose from W8A16"),
        (["--scheme", "MXFP4", "--bits", "8"], "mxfp4 weights have 4 bits, not 8"),
        (["--scheme", "NVFP4", "--group-size", "64"], "nvfp4 weights have groups of 16"),
        (["--scheme", "FP8", "--asymmetric"], "fp8 weights have no zero points"),
        (["--group-size", "block"], "tiles of 128 x 128 are for fp8"),
        (["--group-size", "6x"], "'6x' is no number"),
        (["--target-bits", "4.25", "--bits", "3"], "--bits would be ignored: --target-bits gives each linear one of"),
        (["--target-bits", "4.25", "--group-size", "32"], "--group-size would be ignored"),
        (["--target-bits", "4.25", "--asymmetric"], "say bits, groups and zero points there, as in W4g64a"),
        (["--method", "rtn", "--effort", "balanced"], "--effort is for methods that calibrate, not for rtn"),
    ],
)
def test_what_contradicts_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert main(["quantize", "M", "--show-recipe", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert "got" not in error


def test_names_work_in_recipes_and_rules() -> None:
    document = {"scheme": "fp8", "rules": [{"match": "glob:*.o_proj", "scheme": "W4A16"}]}
    recipe = validate_recipe(document, "the file")
    assert (recipe.scheme.type, recipe.scheme.bits) == ("fp8", 8)
    assert recipe.rules[0].scheme == WeightScheme(bits=4)
    assert validate_recipe(json.loads(recipe.to_json()), "its own output") == recipe
    with pytest.raises(UsageError, match="'W9A9' is no scheme"):
        validate_recipe({"scheme": "W9A9"}, "the file")
    for name in NAMED_SCHEMES:
        assert WeightScheme.model_validate(name) == WeightScheme.model_validate(name.lower())


def test_group_sizes_on_the_command_line() -> None:
    assert [parse_group_size(text) for text in (None, "64", "-1", "auto")] == [None, 64, -1, "auto"]


@pytest.mark.parametrize("name", list(NAMED_SCHEMES))
def test_every_name_resolves_for_a_whole_model(name: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "m", num_hidden_layers=1, hidden_size=128, intermediate_size=256)
    with open_checkpoint(str(model)) as checkpoint:
        assignment = assign(arch_from_checkpoint(checkpoint), Recipe(scheme=WeightScheme.model_validate(name)))
    assert len(assignment.schemes) == 7
    assert len(assignment.activations) == (0 if name.endswith("A16") else 7)
    (label,) = {scheme.label() for scheme in assignment.schemes.values()}
    floats = {"FP8": "fp8_e4m3-channel", "FP8-STATIC": "fp8_e4m3-channel", "FP8-BLOCK": "fp8_e4m3-tile"}
    floats |= {"FP8A16": "fp8_e4m3-channel"}
    integers = "int8-sym-channel" if "W8" in name else f"int{name[1]}-sym-g128"
    expected = floats.get(name) or (integers if name.startswith("W") else name.removesuffix("A16").lower())
    assert label == expected


def test_block_formats_that_do_not_fit_say_what_they_need(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "m", num_hidden_layers=1, intermediate_size=72)
    with open_checkpoint(str(model)) as checkpoint:
        arch = arch_from_checkpoint(checkpoint)
    recipe = Recipe(scheme=WeightScheme.model_validate("MXFP4A16"))
    with pytest.raises(UsageError, match=r"down_proj has 72 input features, mxfp4's group of 32 does not divide"):
        assign(arch, recipe)
    skipping = assign(arch, recipe.model_copy(update={"on_misfit": "skip"}))
    assert [name for name in skipping.kept if "down" in name] == ["model.layers.0.mlp.down_proj"]
