"""Runs that calibrate the KV cache: scales against the K and V that transformers itself puts into its cache."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_text, save_tiny
from torch import Tensor
from transformers import AutoModelForCausalLM

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.checkpoint.companion_tokenizer import tokenizer_of
from cann_llm_quant.corpus import load_windows, parse_source
from cann_llm_quant.errors import CannQuantError, CheckpointError, UsageError
from cann_llm_quant.export.inference_config import load_inference_config
from cann_llm_quant.export.kv_cache import kv_plan
from cann_llm_quant.export.native_reader import open_native
from cann_llm_quant.export.to_float import export_to_float
from cann_llm_quant.pipeline import QuantizeReport, RunOptions, quantize_model
from cann_llm_quant.pipeline.request import Event
from cann_llm_quant.quant.kv import KvPlan, KvScheme, LayerKv, decode, encode
from cann_llm_quant.recipe import Calibration, Recipe, validate_recipe

SAMPLES, LENGTH = 4, 32


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text(tmp_path_factory.mktemp("text") / "text.txt")


def recipe(text: Path, kv_cache: object, method: str = "none", **more: object) -> Recipe:
    section = {"scheme": kv_cache} if isinstance(kv_cache, str) else kv_cache
    document = {"method": method, "kv_cache": section, **more}
    calibration = Calibration(data=(str(text),), samples=SAMPLES, length=LENGTH)
    return validate_recipe(document | {"calibration": calibration.model_dump()}, "the test")


def run(model: Path, out: Path, wanted: Recipe) -> QuantizeReport:
    return quantize_model(str(model), out, wanted, options=RunOptions())


def plan_of(folder: Path) -> KvPlan:
    with open_native(folder) as checkpoint:
        return kv_plan(checkpoint)


def windows(model: Path, text: Path) -> Tensor:
    """The calibration's token ids."""
    with open_checkpoint(str(model), accept_quantized=True) as checkpoint:
        found = load_windows(
            [parse_source(str(text))],
            tokenizer_of(checkpoint),
            samples=SAMPLES,
            length=LENGTH,
            seed=0,
            allow_fewer=False,
        )
    return found.ids


def cached(model: Path, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """K and V [windows, heads, tokens, dim] that transformers caches in each layer, in float32."""
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        layers = theirs(ids, use_cache=True).past_key_values.layers
    return [(layer.keys, layer.values) for layer in layers]


def reach(side: str, values: Tensor) -> Tensor:
    """What static symmetric scales must hold of K or V [..., dim]: V itself, of K the norms of the pairs that turn."""
    if side == "v":
        return values.abs()
    first, second = values.chunk(2, -1)
    return (first.square() + second.square()).sqrt().repeat(*[1] * (values.dim() - 1), 2)


def scaled_keys(model: Path, factor: float) -> Path:
    """The model with its K projections times `factor`."""
    tensors = load_file(model / "model.safetensors")
    for name in tensors:
        if name.endswith("k_proj.weight"):
            tensors[name] = tensors[name] * factor
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("factor", [1.0, 40.0, 0.001])
def test_c63_fp8_scales_are_amax_over_448_over_the_whole_set(tmp_path: Path, text: Path, factor: float) -> None:
    model = scaled_keys(save_tiny(tmp_path / "model", dtype=torch.float32), factor)
    report = run(model, tmp_path / "out", recipe(text, "fp8_e4m3"))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for index, pair in enumerate(cached(model, windows(model, text))):
        for side, values in zip("kv", pair, strict=True):
            scale = stored[f"model.layers.{index}.self_attn.{side}_scale"]
            assert scale.shape == (1,)
            assert scale.item() == pytest.approx(float(reach(side, values).max()) / 448, rel=1e-4)
            scheme, page = KvScheme("fp8_e4m3"), values[0]
            back = decode(encode(page, scheme, scale.view(1, 1, 1)), scheme, scale.view(1, 1, 1))
            # the measured error of e4m3 at a good scale; 0.56 at scale 1.0 for the smallest keys
            assert float((back - page).norm() / page.norm()) < 0.03
    assert report.kv_cache is not None
    assert [layer.k.clipped for layer in report.kv_cache.report if layer.k] == [0.0, 0.0]
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert config["kv_cache_scheme"] | {"group_size": None} == {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor",
        "group_size": None,
        "dynamic": False,
    }


@pytest.mark.parametrize(
    ("family", "extra"), [("llama", {}), ("qwen2", {}), ("qwen3", {"head_dim": 16}), ("mixtral", {})]
)
def test_c65_scales_are_of_what_the_cache_receives_in_every_family(
    tmp_path: Path, text: Path, family: str, extra: dict[str, int]
) -> None:
    """K after norms and RoPE and V, whatever the projections are called or fused into; weights are left alone."""
    model = save_tiny(tmp_path / "model", family, dtype=torch.float32, **extra)
    report = run(model, tmp_path / "out", recipe(text, "k=int8-asym-channel v=int8-head"))
    assert (report.bits_per_weight, report.quantized_linears) == (None, 0)
    source, stored = load_file(model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == source.keys()
    assert all(torch.equal(stored[name], source[name]) for name in source)
    plan = plan_of(tmp_path / "out")
    for scales, (k, v) in zip(plan.scales, cached(model, windows(model, text)), strict=True):
        low, high = k.amin((0, 2)), k.amax((0, 2))
        torch.testing.assert_close(scales.k_scale[:, 0], (high - low) / 255, rtol=1e-3, atol=1e-9)
        middle = (-0.5 - (high + low) / 2 / scales.k_scale[:, 0]).round()
        assert float((scales.k_zero[:, 0] - middle).abs().max()) <= 1  # a tie may fall either way
        torch.testing.assert_close(scales.v_scale.flatten(), v.abs().amax((0, 2, 3)) / 127.5, rtol=1e-3, atol=1e-9)
    assert not [name for name in stored if name.endswith("_scale")]


def test_scales_belong_to_the_quantized_layers_and_data_free_methods_read_text_for_them(
    tmp_path: Path, text: Path
) -> None:
    model = save_tiny(tmp_path / "model", dtype=torch.float32, num_hidden_layers=3)
    scheme = {"bits": 3, "group_size": 16}
    report = run(model, tmp_path / "out", recipe(text, "int8-tensor", "rtn", scheme=scheme))
    assert report.calibration is not None
    # transformers on the dequantized weights: its caches are those of the quantized model
    export_to_float(tmp_path / "out", tmp_path / "float", dtype=torch.float32)
    assert not any("scale" in name for name in load_file(tmp_path / "float" / "model.safetensors"))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for index, (k, v) in enumerate(cached(tmp_path / "float", windows(model, text))):
        for side, values in (("k", k), ("v", v)):
            scale = stored[f"model.layers.{index}.self_attn.{side}_scale"].item()
            assert scale == pytest.approx(float(reach(side, values).max()) / 127.5, rel=1e-3)


@pytest.mark.parametrize("more", [{}, {"tuning_steps": 2}])
def test_error_feedback_measures_the_cache_of_the_layer_that_is_stored(
    tmp_path: Path, text: Path, more: dict[str, int]
) -> None:
    model = save_tiny(tmp_path / "model", dtype=torch.float32)
    run(model, tmp_path / "out", recipe(text, "int8-tensor", "gptq", scheme={"bits": 3, "group_size": 16}, **more))
    export_to_float(tmp_path / "out", tmp_path / "float", dtype=torch.float32)
    for scales, (k, v) in zip(
        plan_of(tmp_path / "out").scales, cached(tmp_path / "float", windows(model, text)), strict=True
    ):
        assert scales.k_scale.item() == pytest.approx(float(reach("k", k).max()) / 127.5, rel=1e-3)
        assert scales.v_scale.item() == pytest.approx(float(v.abs().max()) / 127.5, rel=1e-3)


def test_dynamic_schemes_read_no_text(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    report = quantize_model(
        str(model), tmp_path / "out", Recipe(method="none", kv_cache={"scheme": "int4"}), options=RunOptions()
    )  # type: ignore[arg-type]
    assert report.calibration is None
    assert plan_of(tmp_path / "out").layers[0] == LayerKv(
        KvScheme("int4", False, "channel", None, True), KvScheme("int4", False, "token", None, True)
    )


def test_c63_headroom_and_percentile_move_the_scales_and_the_clipped_share_is_reported(
    tmp_path: Path, text: Path
) -> None:
    model = save_tiny(tmp_path / "model", dtype=torch.float32)
    shares: dict[str, list[float]] = {}
    scales: dict[str, float] = {}
    for name, more in (("plain", {}), ("room", {"headroom": 1.5}), ("clipped", {"percentile": 95.0})):
        run(model, tmp_path / name, recipe(text, {"scheme": "fp8_e4m3", **more}))
        section = load_inference_config(tmp_path / name).kv_cache
        shares[name] = [layer.k.clipped for layer in section.report if layer.k is not None]
        scales[name] = plan_of(tmp_path / name).scales[0].k_scale.item()
    assert scales["room"] == pytest.approx(1.5 * scales["plain"])
    assert scales["clipped"] < scales["plain"]
    assert shares["plain"] == shares["room"] == [0.0, 0.0]
    k = cached(model, windows(model, text))[0][0]
    # fp8 saturates beyond the midpoint above 448
    true = float((k.abs() > 464 * scales["clipped"]).double().mean())
    assert shares["clipped"][0] == pytest.approx(true, abs=0.004)
    assert 0 < shares["clipped"][0] <= 0.05


def test_c63_a_placeholder_is_refused_unless_it_was_asked_for(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny(tmp_path / "model")
    run(model, tmp_path / "asked", recipe(text, {"scheme": "fp8_e4m3", "scale": 1.0}))
    assert [s.k_scale.item() for s in plan_of(tmp_path / "asked").scales] == [1.0, 1.0]
    shutil.copytree(tmp_path / "asked", tmp_path / "unasked")
    path = tmp_path / "unasked" / "inference_config.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document["kv_cache"]["given_scale"] = None
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"all KV scales are 1\.0"):
        plan_of(tmp_path / "unasked")
    monkeypatch.setattr(
        "cann_llm_quant.pipeline.kv_cache.kv_scale", lambda low, high, scheme: (torch.ones(1, 1, 1), None)
    )
    with pytest.raises(CannQuantError, match=r"all measured KV scales are 1\.0"):
        run(model, tmp_path / "ones", recipe(text, "fp8_e4m3"))
    assert not (tmp_path / "ones").exists()


def test_c63_a_layer_that_was_never_measured_has_no_scale(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny(tmp_path / "model")
    monkeypatch.setattr("cann_llm_quant.pipeline.layer_run._onward", lambda *_: iter(()))
    with pytest.raises(CannQuantError, match="layer 0, k: no cached value was measured"):
        run(model, tmp_path / "out", recipe(text, "fp8_e4m3"))


def test_c64_one_offset_channel_ruins_a_tensor_s_scale_and_no_channel_s(tmp_path: Path, text: Path) -> None:
    """The last pair of a head turns by less than a thousandth of a radian a token, so its offset stays an offset."""
    model = save_tiny(
        tmp_path / "model", "qwen2", dtype=torch.float32, rope_parameters={"rope_type": "default", "rope_theta": 1e8}
    )
    tensors = load_file(model / "model.safetensors")
    for name in tensors:
        if name.endswith("k_proj.bias"):
            tensors[name] *= 0.1
            tensors[name][7] = 40.0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    errors: dict[str, float] = {}
    for spec in ("int8-tensor", "int8-head", "int8-channel", "int8-asym-channel"):
        run(model, tmp_path / spec, recipe(text, spec))
        plan = plan_of(tmp_path / spec)
        scheme, scales = plan.layers[0].k, plan.scales[0]
        assert scheme is not None
        page = cached(model, windows(model, text))[0][0][0]
        back = decode(encode(page, scheme, scales.k_scale, scales.k_zero), scheme, scales.k_scale, scales.k_zero)
        others = [c for c in range(16) if c not in (7, 15)]
        errors[spec] = float((back - page)[0, :, others].norm() / page[0, :, others].norm())
    assert errors["int8-tensor"] > 5 * errors["int8-channel"]
    assert errors["int8-channel"] < 0.01
    assert errors["int8-asym-channel"] < 0.01
    section = load_inference_config(tmp_path / "int8-channel").kv_cache
    assert section.convention == "q = round(x/s) + z, x = (q - z) * s"


def test_c65_a_group_that_does_not_divide_the_heads_is_refused_with_those_that_do(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model", head_dim=24)
    with pytest.raises(UsageError, match="16 does not divide head_dim 24; choose from 2, 3, 4, 6, 8, 12, 24"):
        run(model, tmp_path / "out", recipe(text, "k=int8-channel v=int8-g16"))
    run(model, tmp_path / "out", recipe(text, "k=int8-channel v=int8-g12"))
    assert plan_of(tmp_path / "out").scales[0].k_scale.shape == (2, 1, 24)


def test_policies_by_layer_and_token_come_back_as_a_plan(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model", num_hidden_layers=4)
    section = {
        "scheme": "first 25%: fp8_e5m2, last 1: fp16, 1: k=int8-channel v=int4-token",
        "sink_tokens": 4,
        "recent_tokens": 64,
        "sensitive": ["numbers"],
        "page_size": 16,
    }
    run(model, tmp_path / "out", recipe(text, section))
    plan = plan_of(tmp_path / "out")
    fp8, fp16 = KvScheme("fp8_e5m2"), KvScheme("fp16")
    mixed = LayerKv(KvScheme("int8", strategy="channel"), KvScheme("int4", strategy="token", dynamic=True))
    assert plan.layers == (LayerKv(fp8, fp8), mixed, LayerKv(), LayerKv(fp16, fp16))
    assert [s.k_scale is not None for s in plan.scales] == [True, True, False, False]
    assert (plan.sink_tokens, plan.recent_tokens) == (4, 64)
    assert plan.sensitive == frozenset(range(3, 128))  # every word of the tiny vocabulary has a digit
    assert load_inference_config(tmp_path / "out").kv_cache.page_size == 16
    with pytest.raises(UsageError, match="no token in names"):
        run(model, tmp_path / "other", recipe(text, section | {"sensitive": ["names"]}))


def uneven_keys(model: Path) -> Path:
    """One pair of channels of K 32 times as large as it was."""
    tensors = load_file(model / "model.safetensors")
    for name in tensors:
        if name.endswith("k_norm.weight") or ("k_norm" not in " ".join(tensors) and "k_proj" in name):
            tensors[name][[2, 10]] *= 32
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize(("family", "extra"), [("llama", {}), ("qwen2", {}), ("qwen3", {"head_dim": 16})])
def test_smoothing_keys_leaves_every_logit_as_it_was(
    tmp_path: Path, text: Path, family: str, extra: dict[str, int]
) -> None:
    model = uneven_keys(save_tiny(tmp_path / "model", family, **extra))
    report = run(model, tmp_path / "out", recipe(text, {"scheme": "int8-tensor", "smooth": True}))
    ids = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        before, after = (
            AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32)(ids).logits for f in (model, tmp_path / "out")
        )
    assert torch.equal(before, after)
    assert report.warnings == []

    ids = windows(model, text)
    plain, smooth = (cached(folder, ids)[0][0].abs().amax((0, 2)) for folder in (model, tmp_path / "out"))
    assert float(smooth.max() / smooth.median()) < 0.25 * float(plain.max() / plain.median())
    scale = float(reach("k", cached(tmp_path / "out", ids)[0][0]).max()) / 127.5
    assert plan_of(tmp_path / "out").scales[0].k_scale.item() == pytest.approx(scale, rel=1e-3)
    spread = load_inference_config(tmp_path / "out").kv_cache.report[0].smoothed
    assert spread is not None
    assert spread >= 2


def test_smoothed_keys_are_what_the_weights_are_solved_for(tmp_path: Path, text: Path) -> None:
    model = uneven_keys(save_tiny(tmp_path / "model", "qwen2", dtype=torch.float32))
    for method in ("rtn", "awq+gptq"):
        section = {"scheme": "int8-tensor", "smooth": True}
        run(model, tmp_path / method, recipe(text, section, method, scheme={"bits": 8, "group_size": 16}))
        export_to_float(tmp_path / method, tmp_path / f"{method}-float", dtype=torch.float32)
        ids = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(5))
        with torch.inference_mode():
            ours, theirs = (
                AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32)(ids).logits
                for f in (tmp_path / f"{method}-float", model)
            )
        assert float((ours - theirs).norm() / theirs.norm()) < 0.02


def test_a_broken_run_ends_bit_identical(tmp_path: Path, text: Path) -> None:
    model = uneven_keys(save_tiny(tmp_path / "model"))
    for method in ("none", "gptq"):
        wanted = recipe(text, {"scheme": "int8-head", "smooth": True}, method)

        def stop(event: Event) -> None:
            if event.layer == "layer 2/2":
                raise KeyboardInterrupt

        run(model, tmp_path / f"whole-{method}", wanted)
        with pytest.raises(KeyboardInterrupt):
            quantize_model(str(model), tmp_path / f"broken-{method}", wanted, options=RunOptions(), progress=stop)
        assert run(model, tmp_path / f"broken-{method}", wanted).resumed_layers == 1
        whole, broken = tmp_path / f"whole-{method}", tmp_path / f"broken-{method}"
        files = sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file())
        assert Path("kv_cache/scales.safetensors") in files
        assert all((whole / name).read_bytes() == (broken / name).read_bytes() for name in files)


def test_scales_that_the_source_brings_are_dropped_and_said(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model", dtype=torch.float32)
    tensors = load_file(model / "model.safetensors") | {"model.layers.0.self_attn.k_scale": torch.ones(1)}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    report = run(model, tmp_path / "out", recipe(text, "fp8_e4m3"))
    assert report.dropped_tensors == {
        "model.layers.0.self_attn.k_scale": "KV scale of the source; --kv-cache measures new ones"
    }
    assert load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.self_attn.k_scale"].item() != 1
