"""Presets and bit targets: what becomes of every linear, and whether the files keep the promise."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import our_logits, save_text, save_tiny
from transformers import AutoModelForCausalLM

from cann_llm_quant.assignment import assign
from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.cli.app import invoke
from cann_llm_quant.errors import UsageError
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.pipeline import RunOptions, quantize_model
from cann_llm_quant.pipeline.mixing import resolve_mix
from cann_llm_quant.pipeline.presets import preset_rules
from cann_llm_quant.pipeline.sensitivity import SensitivityRequest, measure_sensitivity
from cann_llm_quant.pipeline.sensitivity_file import Sensitivity, load_sensitivity, save_sensitivity
from cann_llm_quant.recipe import Calibration, Recipe, Rule, WeightScheme

CANDIDATES = ("W4g32", "W3g32", "W8", "float")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return save_text(tmp_path / "text.txt")


def measure(model: Path, text: Path, file: Path, candidates: tuple[str, ...] = CANDIDATES) -> Sensitivity:
    request = SensitivityRequest(
        Calibration(data=(str(text),), samples=4, length=32), candidates, "rounding", measured=4
    )
    with open_checkpoint(str(model)) as source:
        save_sensitivity(measure_sensitivity(source, "tiny", request, RunOptions()), file)
    return load_sensitivity(file)


def resolve(model: Path, file: Path | None, **recipe: Any) -> tuple[Recipe, Arch, list[str]]:
    said: list[str] = []
    with open_checkpoint(str(model)) as source:
        options = RunOptions(sensitivity=file)
        made = resolve_mix(
            source, "tiny", Recipe.model_validate(recipe), options, lambda event: said.append(event.message or "")
        )
        return made, arch_from_checkpoint(source), said


def stored_bits(folder: Path, arch: Arch) -> float:
    """Bits per weight of every linear of the layers as the file really holds it."""
    tensors = load_file(folder / "model.safetensors")
    modules = [spec.module for layer in arch.layers for spec in layer.linears if spec.quantizable]
    bits = sum(
        8 * tensor.nbytes
        for name, tensor in tensors.items()
        if name.rpartition(".")[0] in modules and not name.endswith(("weight_shape", "bias"))
    )
    return bits / sum(spec.out_features * spec.in_features for layer in arch.layers for spec in layer.linears)


@pytest.mark.parametrize("target", [3.6, 4.5, 7.0, 12.0])
def test_the_stored_file_keeps_the_target_and_beats_the_uniform_scheme(
    tmp_path: Path, text: Path, target: float
) -> None:
    model, file = save_tiny(tmp_path / "model"), tmp_path / "s.json"
    found = measure(model, text, file)
    recipe, arch, said = resolve(model, file, method="rtn", target_bits=target)
    assert recipe.target_bits is None
    quantize_model(str(model), tmp_path / "out", recipe, options=RunOptions())
    real = stored_bits(tmp_path / "out", arch)
    assert target - 0.6 < real <= target
    assert f"mix of {real:.3f} bits per weight" in said[0]
    ids = torch.randint(3, 128, (1, 20), generator=torch.Generator().manual_seed(3))
    assert bool(torch.isfinite(our_logits(tmp_path / "out", ids)).all())
    if target == 4.5:
        # W4g32 stores exactly 4.5 bits, so the allocation may not be worse than taking it everywhere.
        damage = sum(unit.choices["W4g32"].damage for unit in found.units)
        assert "where W4g32 for all gives" in said[2]
        assert float(said[2].split()[2]) <= damage


def test_transformers_loads_a_mix_of_five_widths_with_the_same_logits(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", num_hidden_layers=5)
    rules = tuple(
        Rule(match=(f"glob:model.layers.{i}.*",), scheme=WeightScheme(bits=bits, group_size=32))
        for i, bits in enumerate((3, 4, 5, 6, 8))
    )
    quantize_model(str(model), tmp_path / "out", Recipe(method="rtn", rules=rules), options=RunOptions())
    ids = torch.randint(3, 128, (1, 20), generator=torch.Generator().manual_seed(3))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(ids).logits
    assert float((our_logits(tmp_path / "out", ids) - expected).abs().max()) < 2e-4 * float(expected.abs().max())


def test_units_stay_whole_and_the_recipe_repeats_without_measuring(tmp_path: Path, text: Path) -> None:
    model, file = save_tiny(tmp_path / "model"), tmp_path / "s.json"
    found = measure(model, text, file)
    recipe, arch, _ = resolve(model, file, method="rtn", target_bits=5.0)
    assignment = assign(arch, recipe)
    assert not any("fused" in warning for warning in assignment.warnings)
    for unit in found.units:
        assert len({assignment.schemes.get(module) for module in unit.modules}) == 1, unit.name
    quantize_model(str(model), tmp_path / "out", recipe, options=RunOptions())
    again = Recipe.model_validate_json((tmp_path / "out" / "recipe.json").read_text(encoding="utf-8"))
    assert again == recipe
    with open_checkpoint(str(model)) as source:
        assert resolve_mix(source, "tiny", again, RunOptions(), lambda event: None) is again


def test_rules_take_linears_out_of_play_or_fix_their_bits(tmp_path: Path, text: Path) -> None:
    model, file = save_tiny(tmp_path / "model"), tmp_path / "s.json"
    measure(model, text, file)
    rules = (
        Rule(match=("re:.*down_proj",), scheme="skip"),
        Rule(match=("re:.*layers.0.mlp.(gate|up)_proj",), scheme=WeightScheme(bits=8, group_size=-1)),
    )
    recipe, arch, _ = resolve(model, file, method="rtn", target_bits=5.0, rules=rules, candidates=("W3g32", "W4g32"))
    schemes = assign(arch, recipe).schemes
    assert not any("down_proj" in module for module in schemes)
    assert {schemes[f"model.layers.0.mlp.{r}_proj"].dtype for r in ("gate", "up")} == {"int8"}
    sizes = {spec.module: (spec.out_features, spec.in_features) for layer in arch.layers for spec in layer.linears}
    bits = sum(scheme.bits_per_weight(*sizes[m]) * sizes[m][0] * sizes[m][1] for m, scheme in schemes.items())
    assert bits <= 5.0 * sum(sizes[m][0] * sizes[m][1] for m in schemes)
    assert {scheme.dtype for m, scheme in schemes.items() if "attn" in m} <= {"int3", "int4"}


def test_formats_of_inputs_stay_in_a_mix_and_under_a_preset(tmp_path: Path, text: Path) -> None:
    model, file = save_tiny(tmp_path / "model"), tmp_path / "s.json"
    measure(model, text, file)
    for asked in ({"target_bits": 5.0}, {"preset": "edges-int8"}, {"preset": "attention-fp16-ffn-int8"}):
        recipe, arch, _ = resolve(model, file, method="rtn", scheme="W4A8", **asked)
        assignment = assign(arch, recipe)
        assert set(assignment.activations) == set(assignment.schemes) != set(), asked
    with pytest.raises(UsageError, match="--target-bits chooses among integer schemes, not nvfp4"):
        resolve(model, file, method="rtn", scheme="NVFP4", target_bits=5.0)


def test_the_rest_of_a_unit_that_rules_skip_in_part_counts(tmp_path: Path, text: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model, file = save_tiny(tmp_path / "model", "mixtral", **sizes), tmp_path / "s.json"
    measure(model, text, file)
    rules = (Rule(match=("re:.*experts.0.*",), scheme="skip"),)
    recipe, arch, _ = resolve(
        model, file, method="rtn", scheme={"bits": 8, "group_size": -1}, target_bits=7.8, rules=rules
    )
    schemes = assign(arch, recipe).schemes
    shapes = {spec.module: (spec.out_features, spec.in_features) for layer in arch.layers for spec in layer.linears}
    bits = sum(scheme.bits_per_weight(*shapes[m], 16) * shapes[m][0] * shapes[m][1] for m, scheme in schemes.items())
    assert {schemes[m].dtype for m in schemes if "experts.1" in m} == {"int8"}
    assert bits <= 7.8 * sum(shapes[m][0] * shapes[m][1] for m in schemes)


def test_a_changed_or_shortened_file_is_refused_and_another_solver_warned_of(tmp_path: Path, text: Path) -> None:
    model, file = save_tiny(tmp_path / "model"), tmp_path / "s.json"
    whole = measure(model, text, file).document()
    first, *others = whole["units"]
    choices = first["choices"]
    broken: list[tuple[list[Any], str]] = [
        (others, "holds other units than the model has"),
        ([first, *whole["units"]], "holds other units"),
        ([first | {"name": "layers.9.qkv"}, *others], "holds other units"),
        ([first | {"modules": ["re:.*"]}, *others], "holds a unit layers.0.qkv that is not the model's"),
        ([first | {"weights": 10**30}, *others], "that is not the model's"),
        ([first | {"choices": {}}, *others], "holds schemes of layers.0.qkv that do not exist"),
        ([first | {"choices": {"W9": choices["W8"]}}, *others], "do not exist"),
        ([first | {"choices": choices | {"W8": choices["W8"] | {"bits": 1}}}, *others], "do not take the bits"),
        ([first | {"float_bits": 1}, *others], "do not take the bits"),
    ]
    for units, message in broken:
        file.write_text(json.dumps(whole | {"units": units}), encoding="utf-8")
        with pytest.raises(UsageError, match=message):
            resolve(model, file, method="rtn", target_bits=5.0)
    file.write_text(json.dumps(whole), encoding="utf-8")
    _, _, said = resolve(model, file, method="gptq", target_bits=5.0)
    assert any("holds damages of rounding, but gptq works by feedback" in message for message in said)
    _, _, said = resolve(model, file, method="rtn", target_bits=5.0)
    assert not any("holds damages" in message for message in said)


def test_what_cannot_be_reached_or_read_is_one_sentence(tmp_path: Path, text: Path) -> None:
    model, file = save_tiny(tmp_path / "model"), tmp_path / "s.json"
    measure(model, text, file, ("W4g32", "W8"))
    with pytest.raises(UsageError, match=r"--target-bits 3 leaves 3\.000 bits .* smallest candidates store 4\.500"):
        resolve(model, file, target_bits=3)
    everything = (Rule(match=("glob:*_proj",), scheme=WeightScheme(bits=8)),)
    with pytest.raises(UsageError, match="nothing to choose"):
        resolve(model, file, target_bits=8, rules=everything)
    with pytest.raises(UsageError, match=r"candidate W3g32 was not measured for layers\.0\.qkv"):
        resolve(model, file, target_bits=5, candidates=("W4g32", "W3g32"))
    other = save_tiny(tmp_path / "other", seed=9)
    with pytest.raises(UsageError, match=r"measured on another model \(tiny\)"):
        resolve(other, file, target_bits=5)


def test_attention_stays_float_and_mlps_get_int8(tmp_path: Path) -> None:
    for family, config in (
        ("llama", {}),
        ("qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    ):
        model = save_tiny(tmp_path / family, family, **config)
        recipe, arch, _ = resolve(model, None, method="rtn", preset="attention-fp16-ffn-int8")
        schemes = assign(arch, recipe).schemes
        assert recipe.preset is None
        for layer in arch.layers:
            for spec in layer.linears:
                quantized = spec.quantizable and spec.role not in ("q", "k", "v", "o")
                assert (spec.module in schemes) == quantized, spec.module
        assert {(scheme.dtype, scheme.strategy) for scheme in schemes.values()} == {("int8", "channel")}


def test_the_first_and_last_eighth_of_layers_get_more_bits(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", num_hidden_layers=10)
    recipe, arch, _ = resolve(model, None, method="rtn", preset="edges-int8")
    schemes = assign(arch, recipe).schemes
    wide = {module for module, scheme in schemes.items() if scheme.dtype == "int8"}
    expected = {
        f"model.layers.{i}.{name}_proj"
        for i in (0, 1, 8, 9)
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.down")
    }
    assert wide == expected
    assert {schemes[m].dtype for m in schemes if m not in wide} == {"int4"}
    # A rule of the user's own comes later and wins.
    mine = (Rule(match=("re:.*layers.9.mlp.down_proj",), scheme="skip"),)
    recipe, _, _ = resolve(model, None, method="rtn", preset="edges-int8", rules=mine)
    assert "model.layers.9.mlp.down_proj" not in assign(arch, recipe).schemes
    assert preset_rules(arch, "edges-int8")[0] == recipe.rules[0]


def test_the_command_measures_allocates_and_writes_a_folder_that_evaluates(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = save_tiny(tmp_path / "model"), tmp_path / "out"
    words = ["quantize", str(model), "-o", str(out), "--method", "rtn", "--target-bits", "4.6", "--json"]
    text_words = ["--data", str(text), "--samples", "4", "--seq-len", "32", "--candidates", "W4g32,W3g32,W8"]
    assert invoke([*words, *text_words]) == 0
    streams = capsys.readouterr()
    assert "mix of 4." in streams.err
    assert json.loads(streams.out)["bits_per_weight"] <= 4.6
    recipe = json.loads((out / "recipe.json").read_text(encoding="utf-8"))
    assert recipe["target_bits"] is None
    assert len(recipe["rules"]) >= 2
    measured = ["perplexity", str(out), "--reference", str(model), "--data", str(text), "--window", "32", "--json"]
    assert invoke([*measured, "--max-windows", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["divergence"]["kl"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--candidates", "W4g64"], "add --target-bits"),
        (["--target-bits", "4", "--candidates", "int4"], "--candidates: 'int4' is no scheme"),
        (["--target-bits", "-1"], "target_bits"),
        (["--target-bits", "4", "--sensitivity", "absent.json"], "absent.json cannot be read"),
    ],
)
def test_bad_requests_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    model = save_tiny(tmp_path / "model")
    assert invoke(["quantize", str(model), "-o", str(tmp_path / "out"), "--method", "rtn", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert not (tmp_path / "out").exists()
