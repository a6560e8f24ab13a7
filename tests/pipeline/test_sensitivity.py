"""Damage estimates against true divergences, computed by transformers; the document; the command."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import save_text, save_tiny
from torch import Tensor
from transformers import AutoModelForCausalLM

from cann_llm_quant.calibrate.backward import LinearFisher
from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.cli.app import invoke
from cann_llm_quant.errors import UsageError
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.pipeline import RunOptions
from cann_llm_quant.pipeline.agreement import corrections, log_correlation, rank_correlation, units_to_measure
from cann_llm_quant.pipeline.calibration_text import calibration_windows
from cann_llm_quant.pipeline.damage import expected_divergence, solve, unit_damages
from cann_llm_quant.pipeline.sensitivity import SensitivityRequest, measure_sensitivity
from cann_llm_quant.pipeline.sensitivity_file import Sensitivity, load_sensitivity, save_sensitivity
from cann_llm_quant.pipeline.units import Unit, choices_of, units_of
from cann_llm_quant.quant.scheme import Scheme
from cann_llm_quant.quant.shrinkage import shrink_hessian
from cann_llm_quant.recipe import Calibration

MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def measured(model: Path, text: Path, *, options: RunOptions | None = None, **request: Any) -> Sensitivity:
    asked = SensitivityRequest(Calibration(data=(str(text),), samples=4, length=32), **request)
    with open_checkpoint(str(model)) as source:
        return measure_sensitivity(source, "tiny", asked, options or RunOptions())


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return save_text(tmp_path / "text.txt")


def test_units_follow_sites_and_experts_of_a_layer_are_one(tmp_path: Path) -> None:
    dense = save_tiny(tmp_path / "dense")
    with open_checkpoint(str(dense)) as source:
        units = units_of(arch_from_checkpoint(source))
    assert [unit.name for unit in units[:4]] == ["layers.0.qkv", "layers.0.o", "layers.0.gate_up", "layers.0.down"]
    assert units[0].modules == tuple(f"model.layers.0.self_attn.{r}_proj" for r in "qkv")
    assert units[0].weights == 64 * 64 + 2 * 32 * 64
    mixture = save_tiny(tmp_path / "moe", "qwen2_moe", shared_expert_intermediate_size=48, **MOE)
    with open_checkpoint(str(mixture)) as source:
        kinds = {unit.kind: unit for unit in units_of(arch_from_checkpoint(source)) if unit.layer == 1}
    assert set(kinds) == {"qkv", "o", "experts", "shared.gate_up", "shared.down"}
    assert len(kinds["experts"].linears) == 3 * 4


def test_candidates_shrink_to_what_fits_and_equal_ones_are_one(tmp_path: Path) -> None:
    with open_checkpoint(str(save_tiny(tmp_path / "model"))) as source:
        units = {unit.name: unit for unit in units_of(arch_from_checkpoint(source))}
    down, o = units["layers.0.down"], units["layers.0.o"]  # 96 and 64 columns
    assert list(choices_of(down, ["W4g64", "W4g32", "W8", "W3g128a", "float"])) == ["W4g32", "W8", "W3g32a", "float"]
    assert list(choices_of(o, ["W4g128", "W4g64"])) == ["W4g64"]
    # 64 columns: codes, and one 16-bit scale (and 3-bit zero point) per 64, hand-calculated.
    choices = choices_of(o, ["W4g64", "W3g64a", "float"])
    bits = [choice.stored_bits(o, torch.bfloat16) for choice in choices.values()]
    assert bits == [64 * 64 * 4 + 64 * 16, 64 * 64 * 3 + 64 * 19, 64 * 64 * 16]
    assert choices["W4g64"].stored_bits(o, torch.float32) == 64 * 64 * 4 + 64 * 32


def test_expected_divergence_equals_its_sum_over_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    delta, x, g = (torch.randn(*shape, generator=generator) for shape in ((5, 7), (30, 7), (30, 5)))
    weights = g.square().sum(1)
    weighted, squares = (x * weights[:, None]).T @ x, g.square().sum(0)
    twin = 0.0
    for r in range(5):
        change = sum(float(weights[t]) * float(delta[r] @ x[t]) ** 2 for t in range(30))
        twin += 0.5 * float(squares[r]) * change / float(squares.sum())
    assert expected_divergence(delta, weighted, squares) == pytest.approx(twin, rel=1e-5)
    assert expected_divergence(delta, weighted, torch.zeros(5)) == 0.0


def test_a_seldom_used_expert_keeps_a_floor_of_damage(tmp_path: Path) -> None:
    # One token: error feedback can hide all error from it, and without the floor the damage would be nothing.
    with open_checkpoint(str(save_tiny(tmp_path / "model"))) as source:
        unit = next(unit for unit in units_of(arch_from_checkpoint(source)) if unit.kind == "o")
    generator = torch.Generator().manual_seed(0)
    w, x = torch.randn(64, 64, generator=generator), torch.randn(1, 64, generator=generator)
    fisher = LinearFisher(x.T @ x, x.T @ x, torch.ones(64), tokens=1)
    choice = next(iter(choices_of(unit, ["W3g64"]).values()))
    damage = unit_damages(
        unit, [choice], {f"{unit.modules[0]}.weight": w}, {"o": fisher}, "feedback", torch.bfloat16, 1
    )
    rounded = solve(w, Scheme("int3", True, "group", 64), torch.bfloat16, x[0].square(), None) - w
    plain = expected_divergence(rounded, x.T @ x, torch.ones(64))
    assert damage["W3g64"] > plain
    unreached = unit_damages(unit, [choice], {}, {}, "feedback", torch.bfloat16, 1)
    assert unreached == {"W3g64": 0.0}


def log_p(model: torch.nn.Module, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(ids).logits.double().log_softmax(-1)


@pytest.mark.parametrize("index", [0, 1])
def test_measured_divergence_is_that_of_transformers_with_these_weights(tmp_path: Path, text: Path, index: int) -> None:
    model = save_tiny(tmp_path / "model", "qwen2", dtype=torch.float32)
    found = measured(model, text, candidates=("W3g32",), solver="rounding", measured=100, measured_windows=3)
    unit = next(unit for unit in found.units if unit.name == f"layers.{index}.gate_up")
    with open_checkpoint(str(model)) as source:
        wanted = Calibration(data=(str(text),), samples=4, length=32)
        arch = arch_from_checkpoint(source)
        ids, _ = calibration_windows(source, arch, wanted, allow_fewer=False, tell=lambda event: None)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    seen: list[Tensor] = []
    mlp = theirs.model.layers[index].mlp
    handle = mlp.gate_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, 1)))
    reference = log_p(theirs, ids)
    handle.remove()
    x = torch.cat(seen)
    importance = shrink_hessian(x.T @ x, len(x)).diagonal()
    for linear in (mlp.gate_proj, mlp.up_proj):
        scheme = Scheme("int3", True, "group", 32)
        linear.weight.data = solve(linear.weight.data, scheme, torch.float32, importance, None)
    candidate = log_p(theirs, ids)
    kl = (reference.exp() * (reference - candidate)).sum(-1)[:3].mean()
    assert unit.choices["W3g32"].measured == pytest.approx(float(kl), rel=2e-3)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_estimates_are_near_the_truth_on_every_unit(tmp_path: Path, text: Path, family: str) -> None:
    config = MOE if family == "qwen3_moe" else {}
    model = save_tiny(tmp_path / "model", family, dtype=torch.float32, **config)
    found = measured(model, text, candidates=("W4g32", "W8"), measured=100, measured_windows=4)
    assert found.agreement.measured == len(found.units)
    for unit in found.units:
        choice = unit.choices["W4g32"]
        assert choice.measured is not None
        assert choice.damage == choice.measured
        assert 0.4 < choice.estimate / choice.measured < 2.5, unit.name
        assert 0 < unit.choices["W8"].damage < 0.05 * choice.damage
    assert found.agreement.log_correlation is not None
    assert found.agreement.log_correlation > 0.9


def test_estimates_are_corrected_by_their_own_measurement_or_their_kind(tmp_path: Path, text: Path) -> None:
    found = measured(save_tiny(tmp_path / "model"), text, candidates=("W4g32", "W3g32"), measured=4)
    kinds = {unit.kind for unit in found.units}
    assert set(found.agreement.corrections) == kinds
    for unit in found.units:
        coarse = unit.choices["W3g32"]
        assert coarse.measured is None
        first = unit.choices["W4g32"]
        own = first.measured and first.measured / first.estimate
        factor = own or found.agreement.corrections[unit.kind]
        assert coarse.damage == pytest.approx(coarse.estimate * factor, rel=1e-4)
    for layer in found.layers:
        units = [unit for unit in found.units if unit.layer == layer.index]
        assert layer.damage == pytest.approx(sum(unit.choices["W4g32"].damage for unit in units), rel=1e-4)


def test_the_same_seed_and_any_budget_give_the_same_document(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model")
    first = measured(model, text, candidates=("W4g32",), measured=4)
    spooled = measured(model, text, candidates=("W4g32",), measured=4, options=RunOptions(activation_budget=0))
    assert first == spooled
    save_sensitivity(first, tmp_path / "s.json")
    assert load_sensitivity(tmp_path / "s.json").document() == first.document()


def test_every_kind_is_measured_from_its_worst_unit_on() -> None:
    units = [Unit(f"layers.{i}.{kind}", i, kind, ()) for i in range(10) for kind in ("qkv", "down")]
    estimates = {unit.name: float(unit.layer + (unit.kind == "down")) + 1 for unit in units}
    assert {u.name for u in units_to_measure(units, estimates, 2)} == {"layers.9.qkv", "layers.9.down"}
    four = [u.layer for u in units_to_measure(units, estimates, 4)]
    assert sorted(four) == [4, 4, 9, 9]
    three = [u.name for u in units_to_measure(units, estimates, 3)]
    assert sorted(three) == ["layers.4.down", "layers.9.down", "layers.9.qkv"]  # down has the worst unit
    assert [u.name for u in units_to_measure(units, estimates, 1)] == ["layers.9.down"]
    assert units_to_measure(units, estimates, 0) == []
    assert len(units_to_measure(units, estimates, 1000)) == 20
    assert units_to_measure(units, dict.fromkeys(estimates, 0.0), 8) == []


def test_float_neither_ranks_nor_is_measured(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model")
    found = measured(model, text, candidates=("float", "W3g32"), measured=3)
    assert found.agreement.measured == 3
    assert all(list(unit.choices) == ["W3g32", "float"] for unit in found.units)
    with pytest.raises(UsageError, match="float alone loses nothing"):
        measured(model, text, candidates=("float",))


def test_top_counts_units_and_layers(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny(tmp_path / "model")
    words = ["--data", str(text), "--samples", "2", "--seq-len", "32", "--schemes", "W4g32", "--measure", "0"]
    for top, lines in (("0", 0), ("1", 1)):
        assert invoke(["sensitivity", str(model), *words, "--top", top]) == 0
        out = capsys.readouterr().out
        assert out.count("layers.") == lines
        assert out.count("cosine") == lines


def test_correlations_by_hand() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 30, 20, 40]) == pytest.approx(0.8)  # 1 - 6 * 2 / (4 * 15)
    assert rank_correlation([1, 1, 2], [5, 5, 9]) == pytest.approx(1.0)
    assert rank_correlation([1, 2], [1, 2]) is None
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None
    assert log_correlation([1, 10, 100], [2, 20, 200]) == pytest.approx(1.0)
    assert log_correlation([1, 10, 0], [2, 20, 5]) is None
    assert log_correlation([], []) is None
    assert corrections(["a", "a", "a", "b", "c"], [1, 1, 1, 2, 0], [2, 9, 3, 1, 3]) == {"a": 3.0, "b": 0.5}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(1e-6, 10), min_size=3, max_size=12, unique=True), st.floats(0.1, 10), st.floats(0.3, 3))
def test_any_rising_law_has_full_rank_correlation(values: list[float], factor: float, power: float) -> None:
    others = [factor * value**power for value in values]
    if len(set(others)) == len(others):
        assert rank_correlation(values, others) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "other/2"}, "field schema"),
        ({"units": [{"name": 1}]}, "field units.0.name"),
        ({"surprise": 1}, "field surprise"),
    ],
)
def test_a_file_that_is_none_is_refused_by_field(
    tmp_path: Path, text: Path, change: dict[str, Any], message: str
) -> None:
    found = measured(save_tiny(tmp_path / "model"), text, candidates=("W4g32",), measured=0)
    path = tmp_path / "s.json"
    path.write_text(json.dumps(found.document() | change), encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        load_sensitivity(path)
    path.write_bytes(b"\xff{")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_sensitivity(path)
    with pytest.raises(UsageError, match="cannot be read"):
        load_sensitivity(tmp_path / "absent.json")


def test_the_command_prints_the_ranking_and_writes_the_file(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = save_tiny(tmp_path / "model"), tmp_path / "s.json"
    words = ["sensitivity", str(model), "--data", str(text), "--samples", "4", "--seq-len", "32", "--measure", "4"]
    assert invoke([*words, "--schemes", "W4g32,W8", "--top", "3", "-o", str(file)]) == 0
    out = capsys.readouterr().out
    found = load_sensitivity(file)
    ranked = sorted(found.units, key=lambda unit: -next(iter(unit.choices.values())).damage)
    lines = [line for line in out.splitlines() if "layers." in line]
    assert [line.split()[0] for line in lines] == [unit.name for unit in ranked[:3]]
    assert "4 units measured: rank correlation" in out
    assert invoke([*words, "--schemes", "W4g32,W8", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["status"] == "ok"
    assert document["fingerprint"] == found.fingerprint
    assert all(math.isfinite(layer["cosine"]) for layer in document["layers"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--schemes", "W7g64"], "'W7g64' is no scheme"),
        (["--schemes", ","], "--schemes names no scheme"),
        (["-o", "/nowhere/s.json"], "the folder /nowhere does not exist"),
    ],
)
def test_bad_requests_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert invoke(["sensitivity", str(tmp_path), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.shared
def test_estimates_rank_the_units_of_a_trained_model(shared: Path) -> None:
    model, data = shared / "data/models/stories260k", shared / "data/text/tinystories_sample.txt"
    request = SensitivityRequest(
        Calibration(data=(str(data),), samples=4, length=256), ("W4g64",), measured=20, measured_windows=4
    )
    with open_checkpoint(str(model)) as source:
        found = measure_sensitivity(source, "stories260k", request, RunOptions())
    assert found.agreement.measured == 20
    assert found.agreement.rank_correlation is not None
    assert found.agreement.rank_correlation > 0.9
    assert found.agreement.log_correlation is not None
    assert found.agreement.log_correlation > 0.97
