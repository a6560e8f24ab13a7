"""Sensitivity of the KV cache against whole runs of the engine's cache; the choice; what is refused; the commands."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import save_text, save_tiny
from torch import Tensor

from cann_llm_quant.calibrate.streamed_logits import StreamedLogits
from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.cli.main import main
from cann_llm_quant.errors import NumericError, UsageError
from cann_llm_quant.export.kv_cache import kv_plan
from cann_llm_quant.export.native_reader import open_native
from cann_llm_quant.kv_recipe import KvRecipe
from cann_llm_quant.kv_spec import parse_kv_spec
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.pipeline import QuantizeReport, RunOptions, quantize_model
from cann_llm_quant.pipeline.kv_candidates import candidates_of, layer_ranges, spec_text
from cann_llm_quant.pipeline.kv_choice import KvMix, choose, uniform_mixes
from cann_llm_quant.pipeline.kv_damage import JUDGED_EVERY
from cann_llm_quant.pipeline.kv_sensitivity import (
    KvSensitivityRequest,
    measure_joint,
    measure_kv_sensitivity,
    open_work,
    split_windows,
)
from cann_llm_quant.pipeline.kv_sensitivity_file import KvSensitivity, SideEntry
from cann_llm_quant.pipeline.request import Event
from cann_llm_quant.quant.kv import KvPlan, KvScales, KvScheme, LayerKv
from cann_llm_quant.recipe import Calibration, Recipe, validate_recipe
from cann_llm_quant.runner.cached_windows import CachedWindows

SAMPLES, LENGTH, PAGE = 6, 64, 16
K4, V4 = "int4-asym-channel-dynamic", "int4-asym-token-dynamic"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), "qwen2", dtype=torch.float32)


def request(text: Path, candidates: tuple[str, ...] | None = None, *, measured: int = 1, **rules: Any) -> Any:
    calibration = Calibration(data=(str(text),), samples=SAMPLES, length=LENGTH)
    cache = KvRecipe.model_validate({"scheme": "auto", "page_size": PAGE} | rules)
    return KvSensitivityRequest(calibration, cache, candidates, measured)


def measure(model: Path, asked: KvSensitivityRequest, tell: Any = lambda event: None) -> KvSensitivity:
    with open_checkpoint(str(model)) as source:
        return measure_kv_sensitivity(source, "tiny", asked, RunOptions(), tell)


def whole_run(model: Path, text: Path, plan: KvPlan | None, asked: KvSensitivityRequest) -> Tensor:
    """Log-probabilities of the judged windows, from a run of the whole model through one cache."""
    with open_checkpoint(str(model)) as source:
        judged = open_work(source, asked, RunOptions(), lambda event: None).work.judged
        logits = StreamedLogits(
            source,
            arch_from_checkpoint(source),
            device=torch.device("cpu"),
            dtype=torch.float32,
            budget=1 << 30,
            attend=None if plan is None else lambda ids: CachedWindows(plan, ids, page_size=PAGE),
        )
        return torch.stack(list(logits(judged))).double().log_softmax(-1)


def divergence(reference: Tensor, candidate: Tensor) -> float:
    kl = (reference.exp() * (reference - candidate)).sum(-1)
    return float(kl[:, JUDGED_EVERY - 1 :: JUDGED_EVERY].mean())


@pytest.mark.parametrize(("layer", "side"), [(0, "k"), (0, "v"), (1, "k"), (1, "v")])
def test_measured_kl_is_that_of_a_whole_run_with_this_one_side_quantized(
    model: Path, text: Path, layer: int, side: str
) -> None:
    asked = request(text, sink_tokens=4, recent_tokens=PAGE)
    found = next(e for e in measure(model, asked).sides if (e.layer, e.side) == (layer, side))
    scheme = parse_kv_spec("int4", 1)[0]
    one = LayerKv(k=scheme.k) if side == "k" else LayerKv(v=scheme.v)
    layers = tuple(one if index == layer else LayerKv() for index in range(2))
    plan = KvPlan(layers, (KvScales(), KvScales()), sink_tokens=4, recent_tokens=PAGE)
    kl = divergence(whole_run(model, text, None, asked), whole_run(model, text, plan, asked))
    assert found.formats[K4 if side == "k" else V4].measured == pytest.approx(kl, rel=2e-3, abs=5e-9)  # float32 logits


def test_static_scales_reach_what_the_other_windows_held_and_no_more(model: Path, text: Path) -> None:
    asked = request(text, ("int8-channel",))
    seen: list[tuple[Tensor, Tensor]] = []

    class Keep:
        def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
            from cann_llm_quant.models.attention import CausalAttend

            seen.append((layer, k[0], v[0]))  # type: ignore[arg-type]
            return CausalAttend()(layer, q, k, v, scale=scale, window=window)

    with open_checkpoint(str(model)) as source:
        work = open_work(source, asked, RunOptions(), lambda event: None).work
        arch = arch_from_checkpoint(source)
        cpu = torch.device("cpu")
        run = StreamedLogits(source, arch, device=cpu, dtype=torch.float32, budget=1 << 30, attend=lambda ids: Keep())
        list(run(work.scaled))
    assert len(work.scaled) == SAMPLES - 3
    assert not any(bool((row == work.judged).all(1).any()) for row in work.scaled)
    scheme, scales = KvScheme("int8", True, "channel"), []
    for layer in range(2):
        parts = []
        for side in (1, 2):
            x = torch.cat([entry[side] for entry in seen if entry[0] == layer], 1)  # type: ignore[misc]
            if side == 1:  # what RoPE may turn a pair into
                first, second = x.chunk(2, -1)
                x = (first.square() + second.square()).sqrt().repeat(1, 1, 2)
            parts.append(x.abs().amax(1, keepdim=True) / 127.5)
        scales.append(KvScales(parts[0], None, parts[1], None))
    reference = whole_run(model, text, None, asked)
    for entry in measure(model, asked).sides:
        one = LayerKv(k=scheme) if entry.side == "k" else LayerKv(v=scheme)
        layers = tuple(one if index == entry.layer else LayerKv() for index in range(2))
        kl = divergence(reference, whole_run(model, text, KvPlan(layers, tuple(scales)), asked))
        assert entry.formats["int8-channel"].measured == pytest.approx(kl, rel=2e-2, abs=2e-8)  # float32 logits


def test_unmeasured_formats_follow_from_the_measured_one_and_are_near_the_truth(model: Path, text: Path) -> None:
    names = ("int4", "int8", "fp8_e4m3-token", "int4-g8-asym")
    few, all_of_them = measure(model, request(text, names)), measure(model, request(text, names, measured=4))
    for estimated, true in zip(few.sides, all_of_them.sides, strict=True):
        first, *others = estimated.formats.items()
        assert first[1].damage == first[1].measured == true.formats[first[0]].measured
        for label, one in others:
            assert one.measured is None
            assert one.damage == pytest.approx(first[1].damage * one.error / first[1].error, rel=1e-4)
            measured = true.formats[label].measured
            assert measured is not None
            assert 0.4 < one.damage / measured < 2.5, (estimated.layer, estimated.side, label)


def test_all_formats_together_are_one_run_of_the_whole_cache(model: Path, text: Path) -> None:
    asked = request(text)
    layers = parse_kv_spec("0: k=int4 v=float, 1: int4", 2)
    with open_checkpoint(str(model)) as source:
        work = open_work(source, asked, RunOptions(), lambda event: None).work
        joint, nothing, alike = measure_joint(work, [layers, [LayerKv()] * 2, parse_kv_spec("int8", 2)])
        assert measure_joint(work, [[LayerKv()] * 2]) == [0.0]
    reference = whole_run(model, text, None, asked)
    for found, chosen in ((joint, layers), (alike, parse_kv_spec("int8", 2))):
        kl = divergence(reference, whole_run(model, text, KvPlan(chosen, (KvScales(), KvScales())), asked))
        assert found == pytest.approx(kl, rel=2e-3, abs=5e-9)
    assert nothing == 0.0


def side_entry(layer: int, side: str, damages: dict[str, tuple[float, float]]) -> SideEntry:
    """Stored bits and damage of each label, invented."""
    formats = {
        label: {"bits": bits, "error": 0, "measured": None, "damage": damage}
        for label, (bits, damage) in damages.items()
    }
    return SideEntry.model_validate({"layer": layer, "side": side, "formats": formats})


def test_formats_for_all_layers_alike_are_those_with_a_name_and_the_best_pair() -> None:
    offered = (
        {"a": (4.0, 9.0), "b": (8.0, 3.0), "c": (8.0, 1.0)},
        {"a": (4.0, 5.0), "b": (12.0, 0.5), "c": (8.0, 2.0)},
    )
    sides = [side_entry(layer, side, offered[side == "v"]) for layer in range(2) for side in ("k", "v")]
    mix = KvMix(tuple(entry.formats for entry in sides), ("b", "c", "c", "a"))
    named = [("a", "a"), ("b", "b"), ("c", "c"), ("c", "a")]
    # 8 bits: of (b, b) 10, of (c, b) 10; the best pair that keeps them is (c, c), with 2 (1 + 2)
    assert [one.chosen[:2] for one in uniform_mixes(mix, named, 8.0)] == [("a", "a"), ("c", "a"), ("c", "c")]
    assert [one.chosen[:2] for one in uniform_mixes(mix, named[:1], 10.0)] == [("a", "a"), ("c", "b")]
    assert uniform_mixes(KvMix(mix.offered, ("c", "c") * 2), [("c", "c")], 8.0) == []
    assert uniform_mixes(mix, named, 3.0) == []


@pytest.mark.parametrize("lies", [False, True])
def test_a_mix_that_measures_worse_than_the_same_for_all_is_not_taken(
    model: Path, tmp_path: Path, text: Path, lies: bool
) -> None:
    """A measurement that says of int4 what is true of fp8 leads to a mix of int4; the whole cache tells otherwise."""
    file = tmp_path / "kv.json"
    names = ("int4-channel-dynamic", "fp8_e4m3", "int8-channel")
    found = measure(model, request(text, names))
    if lies:
        sides = []
        for entry in found.sides:
            formats = dict(entry.formats)
            for label, damage in zip(formats, (0.0, 1.0, 1.0), strict=True):
                formats[label] = formats[label].model_copy(update={"damage": damage})
            sides.append(entry.model_copy(update={"formats": formats}))
        found = found.model_copy(update={"sides": tuple(sides)})
    file.write_text(json.dumps(found.document()), encoding="utf-8")
    section = {"scheme": "auto", "bits": 8, "candidates": list(names)}
    choice = run(model, tmp_path / "out", text, section, kv_sensitivity=file).kv_choice
    assert choice is not None
    mixed = choice.compared[0]
    assert {one.spec for one in choice.compared} >= {"int4-channel-dynamic", "fp8_e4m3-tensor", "int8-channel"}
    assert all(one.bits <= 8 for one in choice.compared)
    assert choice.measured_kl == min(one.measured_kl for one in choice.compared)
    if lies:
        assert (mixed.spec, choice.spec) == ("int4-channel-dynamic", "int8-channel")
    with open_native(tmp_path / "out") as checkpoint:
        assert spec_text(kv_plan(checkpoint).layers) == choice.spec


def test_progress_ends_where_it_said_it_would_and_repeats(model: Path, text: Path) -> None:
    events: list[Event] = []
    first = measure(model, request(text, ("int4", "int8")), events.append)
    steps = [(event.done, event.total) for event in events if event.total]
    assert [done for done, _ in steps] == sorted({done for done, _ in steps})
    assert steps[-1][0] == steps[-1][1]
    assert len({total for _, total in steps}) == 1
    assert measure(model, request(text, ("int4", "int8"))) == first


def test_states_that_go_to_files_change_nothing(model: Path, text: Path) -> None:
    asked = request(text, ("int8-channel", "int4"))
    with open_checkpoint(str(model)) as source:
        spooled = measure_kv_sensitivity(source, "tiny", asked, RunOptions(activation_budget=0))
    assert spooled == measure(model, asked)


def with_outlier_values(model: Path, layer: int) -> Path:
    """One channel of V far larger than the others in one layer, which a scale for all of a token cannot hold; the
    output projection does not read it much.
    """
    tensors = load_file(model / "model.safetensors")
    prefix = f"model.layers.{layer}.self_attn"
    tensors[f"{prefix}.v_proj.weight"][3] *= 2000
    tensors[f"{prefix}.o_proj.weight"][:, 3] /= 2000
    tensors[f"{prefix}.o_proj.weight"][:, 16 + 3] /= 2000
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


def run(model: Path, out: Path, text: Path, section: dict[str, Any], **options: Any) -> QuantizeReport:
    calibration = Calibration(data=(str(text),), samples=SAMPLES, length=LENGTH).model_dump()
    document = {"method": "none", "kv_cache": {"page_size": PAGE} | section, "calibration": calibration}
    return quantize_model(str(model), out, validate_recipe(document, "the test"), options=RunOptions(**options))


@pytest.mark.parametrize("layer", [0, 2])
def test_a_layer_with_outliers_gets_more_bits_within_the_budget(tmp_path: Path, text: Path, layer: int) -> None:
    model = with_outlier_values(save_tiny(tmp_path / "model", dtype=torch.float32, num_hidden_layers=3), layer)
    report = run(
        model, tmp_path / "out", text, {"scheme": "auto", "bits": 8, "candidates": ["int4-token", "int8-token", "fp16"]}
    )
    choice = report.kv_choice
    assert choice is not None
    with open_native(tmp_path / "out") as checkpoint:
        plan = kv_plan(checkpoint)
    bits = [16 if one is None else one.bits for one in (kv.v for kv in plan.layers)]
    assert bits[layer] == 16
    assert max(b for index, b in enumerate(bits) if index != layer) < 16
    assert plan.bits_per_value(PAGE, 2, 16) == pytest.approx(choice.bits)
    assert choice.bits <= 8
    stored = json.loads((tmp_path / "out" / "recipe.json").read_text(encoding="utf-8"))["kv_cache"]
    assert (stored["scheme"], stored["bits"], stored["candidates"]) == (choice.spec, None, None)
    assert (
        json.loads((tmp_path / "out" / "kv_cache" / "choice.json").read_text(encoding="utf-8"))["spec"] == choice.spec
    )
    again = Recipe.model_validate(json.loads((tmp_path / "out" / "recipe.json").read_text(encoding="utf-8")))
    quantize_model(str(model), tmp_path / "again", again, options=RunOptions())
    with open_native(tmp_path / "again") as checkpoint:
        assert kv_plan(checkpoint).layers == plan.layers


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_choice_is_the_best_that_keeps_the_budget(data: st.DataObject) -> None:
    model = _ARCH_FOLDER[0]
    with open_checkpoint(str(model)) as source:
        arch = arch_from_checkpoint(source)
    wanted = KvRecipe(scheme="auto", page_size=PAGE)
    offered = candidates_of(("int4", "int8", "int8-channel", "fp16"), arch)
    damage = st.floats(0, 1, allow_nan=False)
    sides = tuple(
        SideEntry.model_validate(
            {
                "layer": layer,
                "side": side,
                "formats": {
                    label: {"bits": 1, "error": 0, "measured": None, "damage": data.draw(damage)}
                    for label in offered[side]
                },
            }
        )
        for layer in range(2)
        for side in ("k", "v")
    )
    sizes = {
        "fp16": 16.0,
        "int8-channel": 8.0,
        "int8-channel-dynamic": 9.0,
        "int8-token-dynamic": 9.0,
        K4: 6.0,
        V4: 6.0,
    }  # by hand: 16 channels
    bits = data.draw(st.sampled_from([6.0, 7.0, 7.25, 8.0, 9.5, 16.0]))
    mix = choose(KvSensitivity.model_construct(sides=sides), arch, wanted, offered, bits)
    options = [[(sizes[label], one.damage) for label, one in entry.formats.items()] for entry in sides]
    best = min(
        sum(d for _, d in mixture)
        for mixture in itertools.product(*options)
        if sum(b for b, _ in mixture) <= bits * len(options)
    )
    assert sum(sizes[label] for label in mix.chosen) <= bits * len(options)
    assert mix.damage == pytest.approx(best)


_ARCH_FOLDER: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def _arch_folder(model: Path) -> None:
    _ARCH_FOLDER[:] = [model]


@given(
    st.lists(
        st.sampled_from(["int8", "int4", "k=fp8_e4m3 v=int4-g8-asym", "fp16", "k=float v=int8-head"]),
        min_size=1,
        max_size=9,
    )
)
def test_the_spec_reads_back_as_the_same_layers(names: list[str]) -> None:
    layers = tuple(parse_kv_spec(name, 1)[0] for name in names)
    assert parse_kv_spec(spec_text(layers), len(layers)) == layers


def test_layers_are_written_in_ranges_and_windows_are_split_evenly() -> None:
    assert layer_ranges([0, 3, 8, 9, 10, 11]) == "0,3,8-11"
    scaled, judged = split_windows(torch.arange(20)[:, None], 4)
    assert judged.flatten().tolist() == [2, 7, 12, 17]
    assert sorted([*scaled.flatten().tolist(), *judged.flatten().tolist()]) == list(range(20))


def test_a_file_replaces_the_measurement_and_must_fit(model: Path, tmp_path: Path, text: Path) -> None:
    file = tmp_path / "kv.json"
    flags = ["--data", str(text), "--samples", str(SAMPLES), "--seq-len", str(LENGTH), "--kv-page-size", str(PAGE)]
    assert main(["sensitivity", str(model), "--kv-cache", "-o", str(file), *flags]) == 0
    section = {"scheme": "auto", "bits": 8}
    measured = run(model, tmp_path / "a", text, section).kv_choice
    read = run(model, tmp_path / "b", text, section, kv_sensitivity=file).kv_choice
    assert measured is not None
    assert read is not None
    assert (measured.spec, measured.measured_kl) == (read.spec, read.measured_kl)
    for change, words in (
        ({"sink_tokens": 4}, "was measured with sink_tokens 0, the recipe has 4"),
        ({"candidates": ["int4-tensor", "fp16"]}, "has no int4-tensor for k"),
    ):
        with pytest.raises(UsageError, match=words):
            run(model, tmp_path / "c", text, section | change, kv_sensitivity=file)
    other = save_tiny(tmp_path / "other", seed=5)
    with pytest.raises(UsageError, match="another model"):
        run(other, tmp_path / "c", text, section, kv_sensitivity=file)
    file.write_text(file.read_text(encoding="utf-8").replace('"error"', '"mistake"'), encoding="utf-8")
    with pytest.raises(UsageError, match=r"error: Field required; measure again .* --kv-cache"):
        run(model, tmp_path / "c", text, section, kv_sensitivity=file)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"scheme": "auto", "bits": 4}, "--kv-bits 4 is less than .* smaller --kv-candidates"),
        ({"scheme": "auto", "bits": 8, "candidates": ["int9"]}, "'int9' is no KV cache format"),
        ({"scheme": "auto", "bits": 8, "candidates": ["first 1: int8"]}, "is no format for every layer"),
        ({"scheme": "auto", "bits": 8, "candidates": ["int4-g5"]}, "does not divide head_dim 16"),
        ({"scheme": "int8", "bits": 8}, "are of the scheme auto"),
        ({"scheme": "auto 50%", "bits": 8}, "is no KV cache format"),
        ({"scheme": "int4", "candidates": ["int8"]}, "are of the scheme auto"),
        ({"scheme": "auto", "bits": 8, "page_size": 128}, "--seq-len 256 or more"),
        ({"scheme": "auto", "bits": 8, "recent_tokens": 40}, "--seq-len 80 or more"),
    ],
)
def test_what_cannot_be_is_refused_with_the_option_to_change(
    model: Path, tmp_path: Path, text: Path, section: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        run(model, tmp_path / "out", text, section)


def test_values_that_a_format_cannot_hold_name_layer_side_and_format(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model", dtype=torch.float32)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"] *= 1e6
    tensors["model.layers.1.self_attn.o_proj.weight"] /= 1e6
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NumericError, match="layer 1, v: fp16 gives NaN or infinity; leave it out"):
        measure(model, request(text, ("int8", "fp16")))


def test_the_commands_say_what_was_measured_and_chosen(
    model: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data", str(text), "--samples", str(SAMPLES), "--seq-len", str(LENGTH), "--kv-page-size", str(PAGE)]
    assert main(["sensitivity", str(model), "--kv-cache", "--top", "2", *flags]) == 0
    shown = capsys.readouterr().out
    assert "3 windows of 64 tokens judged, static scales from 3 others" in " ".join(shown.split())
    assert shown.count(K4) + shown.count(V4) == 2
    out = str(tmp_path / "out")
    auto = ["--method", "none", "--kv-cache", "auto", "--kv-bits", "8"]
    assert main(["quantize", str(model), "-o", out, *auto, *flags]) == 0
    streams = capsys.readouterr()
    assert "predicted KL" in " ".join(streams.out.split())
    assert "measured KL of one format for all within the budget: " in streams.err
    assert main(["quantize", str(model), "-o", out, "--kv-bits", "8"]) == 2
    assert main(["quantize", str(model), "-o", out, "--kv-cache", "int8", "--kv-sensitivity", "x"]) == 2
    assert main(["sensitivity", str(model), "--kv-sink-tokens", "4"]) == 2
    assert "add --kv-cache" in capsys.readouterr().err
