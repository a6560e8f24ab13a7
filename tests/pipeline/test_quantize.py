"""The whole run on tiny checkpoints: what transformers reads back, what is accounted for, what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import our_logits, save_text, save_tiny
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.errors import NumericError, UsageError
from cann_llm_quant.export.inference_config import load_inference_config
from cann_llm_quant.export.native_reader import open_native
from cann_llm_quant.export.to_float import export_to_float
from cann_llm_quant.pipeline import QuantizeReport, RunOptions, quantize_model
from cann_llm_quant.recipe import Calibration, Recipe, Rule, WeightScheme


def quantize(
    model: Path, out: Path, text: Path, *, options: RunOptions | None = None, **recipe: object
) -> QuantizeReport:
    calibration = Calibration(data=(str(text),), samples=4, length=32)
    made = Recipe.model_validate({"calibration": calibration, **recipe})
    return quantize_model(str(model), out, made, options=options or RunOptions())


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return save_text(tmp_path / "text.txt")


@pytest.mark.parametrize("method", ["rtn", "awq"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_transformers_loads_the_output_with_the_same_logits(
    tmp_path: Path, text: Path, family: str, method: str
) -> None:
    model = save_tiny(tmp_path / "model", family, tie_word_embeddings=family == "qwen3")
    quantize(model, tmp_path / "out", text, method=method)
    ids = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(3))
    # What the format's own reader makes of the files, computed in float32.
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(ids).logits
    assert float((our_logits(tmp_path / "out", ids) - expected).abs().max()) < 2e-4 * float(expected.abs().max())


@pytest.mark.parametrize("bits", [4, 8])
def test_asymmetric_weights_equal_those_that_transformers_dequantizes(tmp_path: Path, text: Path, bits: int) -> None:
    model = save_tiny(tmp_path / "model")
    quantize(model, tmp_path / "out", text, scheme=WeightScheme(bits=bits, group_size=16, symmetric=False))
    # Without dequantize=True transformers 5.24 refuses every asymmetric compressed-tensors file.
    config = CompressedTensorsConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, quantization_config=config)
    state = theirs.state_dict()
    # They round each product to the scales' bf16, which is what dtype None asks of our reader.
    with open_native(tmp_path / "out", dtype=None) as checkpoint:
        for module in sorted(checkpoint.modules):
            assert torch.equal(checkpoint.load(f"{module}.weight").float(), state[f"{module}.weight"].float())


def test_awq_is_better_than_rounding_and_float_export_is_the_same_function(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model")
    report = quantize(model, tmp_path / "out", text)
    assert report.mean_error is not None
    assert report.mean_rtn_error is not None
    assert report.mean_error < 0.8 * report.mean_rtn_error
    export_to_float(tmp_path / "out", tmp_path / "float", dtype=torch.float32)
    ids = torch.randint(3, 128, (1, 20), generator=torch.Generator().manual_seed(3))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "float", dtype=torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(our_logits(tmp_path / "out", ids), plain(ids).logits, rtol=1e-4, atol=1e-4)


def test_no_linear_is_worse_than_plain_rounding(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model", "qwen2")
    quantize(model, tmp_path / "out", text)
    for module, entry in load_inference_config(tmp_path / "out").linears.items():
        assert entry.error is not None
        assert entry.rtn_error is not None
        assert entry.error <= entry.rtn_error * 1.0001, module


def test_c29_every_source_tensor_is_accounted_for(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model", tie_word_embeddings=True)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    tensors["model.mtp.proj.weight"] = torch.ones(4, 4)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    report = quantize(model, tmp_path / "out", text)
    assert report.source_tensors == len(tensors)
    assert report.source_tensors == report.quantized_linears + report.kept_tensors + len(report.dropped_tensors)
    assert set(report.dropped_tensors) == {"model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"}
    assert report.extra_tensors == ["model.mtp.proj.weight"]
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["model.mtp.proj.weight"], tensors["model.mtp.proj.weight"])
    assert "lm_head.weight" not in written


def test_c22_float_linears_are_listed_by_full_name(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model")
    rules = (Rule(match=(r"re:.*layers\.1\.mlp\.down_proj",), scheme="skip"),)
    quantize(model, tmp_path / "out", text, rules=rules)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head", "model.layers.1.mlp.down_proj"]
    source, written = (load_file(p / "model.safetensors") for p in (model, tmp_path / "out"))
    assert "model.layers.1.mlp.down_proj.weight" in written
    assert torch.equal(source["lm_head.weight"], written["lm_head.weight"])


def test_c11_biases_are_kept_and_moved_only_with_their_rows(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model", "qwen2")
    quantize(model, tmp_path / "plain", text, method="rtn")
    source, written = (load_file(p / "model.safetensors") for p in (model, tmp_path / "plain"))
    biases = [name for name in source if name.endswith(".bias")]
    assert len(biases) == 6
    assert all(torch.equal(source[name], written[name]) for name in biases)


def test_c51_routers_are_bit_equal_and_experts_quantized_under_their_own_names(tmp_path: Path, text: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    model = save_tiny(tmp_path / "model", "qwen2_moe", shared_expert_intermediate_size=48, **sizes)
    report = quantize(model, tmp_path / "out", text)
    source, written = (load_file(p / "model.safetensors") for p in (model, tmp_path / "out"))
    for name in ("mlp.gate.weight", "mlp.shared_expert_gate.weight"):
        assert torch.equal(source[f"model.layers.0.{name}"], written[f"model.layers.0.{name}"])
    assert "model.layers.1.mlp.experts.3.down_proj.weight_packed" in written
    # C50: everything but embedding, head, norms, biases and routers.
    assert report.quantized_linears == 2 * (4 + 3 * 4 + 3)
    ids = torch.randint(3, 128, (1, 20), generator=torch.Generator().manual_seed(3))
    assert bool(torch.isfinite(our_logits(tmp_path / "out", ids)).all())


def test_spooled_and_in_memory_activations_give_the_same_bytes(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model")
    quantize(model, tmp_path / "memory", text)
    quantize(model, tmp_path / "spooled", text, options=RunOptions(activation_budget=0))
    for name in ("model.safetensors", "config.json", "inference_config.json"):
        assert (tmp_path / "memory" / name).read_bytes() == (tmp_path / "spooled" / name).read_bytes()


def test_c27_small_shards_and_the_same_tensors(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model")
    quantize(model, tmp_path / "one", text)
    report = quantize(model, tmp_path / "many", text, options=RunOptions(max_shard_bytes=40_000))
    assert len(report.weight_files) > 1
    whole = load_file(tmp_path / "one" / "model.safetensors")
    with open_checkpoint(str(tmp_path / "many"), accept_quantized=True) as checkpoint:
        assert set(checkpoint.tensors) == set(whole)
        assert all(torch.equal(checkpoint.load(name), whole[name]) for name in whole)


def test_c03_c13_dead_rows_and_channels_stay_finite_and_exact_zeros_stay_zero(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][1] = 0
    tensors["model.layers.0.self_attn.v_proj.weight"][3] = 0
    tensors["model.layers.0.self_attn.o_proj.weight"][:, 3] = 0
    tensors["model.layers.0.input_layernorm.weight"][5] = 0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    quantize(model, tmp_path / "out", text)
    with open_native(tmp_path / "out") as checkpoint:
        assert all(bool(torch.isfinite(checkpoint.load(name)).all()) for name in checkpoint.tensors)
        assert int(checkpoint.load("model.layers.0.mlp.up_proj.weight")[1].count_nonzero()) == 0


def test_c06_overflow_stops_with_layer_and_window(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1e38
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NumericError, match=r"layer 1 .*window 0"):
        quantize(model, tmp_path / "out", text)
    assert not (tmp_path / "out").exists()


def test_c49_windows_longer_than_the_model_are_refused(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model")
    with pytest.raises(UsageError, match="256 positions"):
        quantize(model, tmp_path / "out", text, calibration=Calibration(data=(str(text),), samples=1, length=512))
    assert not (tmp_path / "out.partial").exists()


def test_c31_companions_travel_byte_for_byte(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model")
    odd = '{"do_sample": false, "temperature": 0.6,   "top_p": 0.9}'
    (model / "generation_config.json").write_text(
        odd
    )  # C56: invalid to transformers' strict save, none of our business
    (model / "chat_template.jinja").write_text("{{ messages }}\n")
    quantize(model, tmp_path / "out", text)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()


def test_c16_same_command_twice_gives_the_same_bytes(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model")
    for name in ("first", "second"):
        quantize(model, tmp_path / name, text)
    files = [sorted(p.name for p in (tmp_path / name).iterdir()) for name in ("first", "second")]
    assert files[0] == files[1]
    assert all((tmp_path / "first" / f).read_bytes() == (tmp_path / "second" / f).read_bytes() for f in files[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_c06_c14_weights_that_are_not_finite_are_refused_by_name(
    tmp_path: Path, text: Path, name: str, bad: float
) -> None:
    model = save_tiny(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors[name].view(-1)[7] = bad
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NumericError, match=rf"{name} .* first at \["):
        quantize(model, tmp_path / "out", text, method="rtn")
    assert not (tmp_path / "out").exists()


def test_a_fold_that_moves_the_float_layer_is_undone_and_reported(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny(tmp_path / "model")
    quantize(model, tmp_path / "plain", text, method="rtn", clip=True)
    monkeypatch.setattr("cann_llm_quant.pipeline.smoothing.divide_rows", lambda weight, bias, rows: (weight, bias))
    report = quantize(model, tmp_path / "out", text, method="awq")
    assert len(report.warnings) == 2
    assert "layer 0: folding scaling factors changed the float layer's output" in report.warnings[0]
    source, written = (load_file(p / "model.safetensors") for p in (model, tmp_path / "out"))
    gain = "model.layers.0.input_layernorm.weight"
    assert torch.equal(source[gain], written[gain])


def test_c08_scales_too_small_for_fp16_are_stored_wider_and_the_config_says_so(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model", dtype=torch.float16)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"] *= 1e-4
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    quantize(model, tmp_path / "out", text, method="rtn")
    linears = load_inference_config(tmp_path / "out").weights.linears
    assert linears["model.layers.0.self_attn.q_proj"].endswith("bfloat16")
    assert linears["model.layers.0.self_attn.k_proj"].endswith("float16")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written["model.layers.0.self_attn.q_proj.weight_scale"].dtype == torch.bfloat16


def test_float64_sources_get_float32_scales(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model", dtype=torch.float64)
    quantize(model, tmp_path / "out", text)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written["model.layers.0.self_attn.q_proj.weight_scale"].dtype == torch.float32
    assert bool(torch.isfinite(our_logits(tmp_path / "out", torch.tensor([[3, 4, 5]]))).all())
