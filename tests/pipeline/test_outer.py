"""A quantized head and embedding, from the recipe to transformers, our runner and the float export."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_quantize import quantize
from tiny_models import our_logits, save_text, save_tiny
from transformers import AutoModelForCausalLM

from cann_llm_quant.export.inference_config import load_inference_config
from cann_llm_quant.export.to_float import export_to_float
from cann_llm_quant.pipeline import RunOptions, row_blocks, run
from cann_llm_quant.recipe import WeightScheme
from cann_llm_quant.runner.engine import LLMEngine

INT8 = WeightScheme(bits=8, group_size=-1)
IDS = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(3))
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return save_text(tmp_path / "text.txt")


def same_everywhere(out: Path, folder: Path) -> None:
    """transformers, the streamed reader, the engine and the exported float model give the same logits."""
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(IDS).logits
    tolerance = {"rtol": 0.0, "atol": 2e-4 * float(expected.abs().max())}
    torch.testing.assert_close(our_logits(out, IDS), expected, **tolerance)
    torch.testing.assert_close(torch.stack(list(LLMEngine(out).logits(IDS))), expected, **tolerance)
    export_to_float(out, folder, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(plain(IDS).logits, expected, **tolerance)


@pytest.mark.parametrize(("method", "bits"), [("rtn", 8), ("awq", 4), ("gptq", 4)])
def test_a_head_and_an_embedding_load_everywhere(tmp_path: Path, text: Path, method: str, bits: int) -> None:
    model = save_tiny(tmp_path / "model")
    head = WeightScheme(bits=bits, group_size=-1 if bits == 8 else 32)
    report = quantize(model, tmp_path / "out", text, method=method, head=head, embedding=INT8)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written[f"{EMBEDDING}.weight"].dtype == torch.int8
    assert f"{HEAD}.weight_packed" in written
    assert f"{HEAD}.weight" not in written
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["quantization_config"]["ignore"] == []
    assert report.source_tensors == report.quantized_linears + report.kept_tensors
    entry = load_inference_config(tmp_path / "out").linears[HEAD]
    if method == "rtn":
        assert entry.error is None
    else:
        assert entry.error is not None
        assert entry.rtn_error is not None
        assert entry.error <= entry.rtn_error
        assert entry.tokens == 4 * 32
    same_everywhere(tmp_path / "out", tmp_path / "float")


def test_c21_a_tied_head_and_the_embedding_are_one_stored_matrix(tmp_path: Path, text: Path) -> None:
    model = save_tiny(tmp_path / "model", "qwen3", tie_word_embeddings=True, head_dim=16)
    report = quantize(model, tmp_path / "out", text, method="gptq", head=INT8)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert [name for name in written if written[name].shape == (128, 64)] == [f"{EMBEDDING}.weight"]
    assert torch.equal(written[f"{HEAD}.weight_scale"], written[f"{EMBEDDING}.weight_scale"])
    inference = load_inference_config(tmp_path / "out")
    assert inference.weights.tied == {HEAD: EMBEDDING}
    assert HEAD not in inference.weights.float_
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    groups = config["quantization_config"]["config_groups"].values()
    assert [group["format"] for group in groups if HEAD in group["targets"]] == ["int-quantized"]
    assert config["tie_word_embeddings"] is True
    assert any("one int8 matrix serves both" in warning for warning in report.warnings)
    same_everywhere(tmp_path / "out", tmp_path / "float")
    engine = LLMEngine(tmp_path / "out")
    assert engine.model.head_op.codes is engine.model.embedding.weight.codes
    assert "lm_head.weight_scale" not in load_file(tmp_path / "float" / "model.safetensors")


def test_calibration_sees_the_rows_that_will_be_looked_up(tmp_path: Path, text: Path) -> None:
    """Layer 0 of the first run is calibrated on int8 rows; a model that has these rows in float gives the same bits."""
    model = save_tiny(tmp_path / "model", dtype=torch.float32)
    quantize(model, tmp_path / "out", text, method="gptq", effort="fast", embedding=INT8)
    export_to_float(tmp_path / "out", tmp_path / "float", dtype=torch.float32)
    rows = load_file(tmp_path / "float" / "model.safetensors")[f"{EMBEDDING}.weight"]
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        theirs.model.embed_tokens.weight.copy_(rows)
    theirs.save_pretrained(tmp_path / "model")
    quantize(model, tmp_path / "again", text, method="gptq", effort="fast")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    layers = [name for name in second if ".layers." in name]
    assert all(torch.equal(first[name], second[name]) for name in layers)


@pytest.mark.parametrize("budget", [0, 1 << 30])
def test_c55_a_run_stopped_before_its_head_ends_bit_identical(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    model = save_tiny(tmp_path / "model")
    asked = {"method": "gptq", "head": INT8, "embedding": INT8, "options": RunOptions(activation_budget=budget)}
    quantize(model, tmp_path / "whole", text, **asked)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "write_head", stop)
    with pytest.raises(KeyboardInterrupt):
        quantize(model, tmp_path / "out", text, **asked)
    monkeypatch.undo()
    assert quantize(model, tmp_path / "out", text, **asked).resumed_layers == 2
    whole, resumed = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out"))
    assert whole == resumed


def test_rows_are_solved_in_blocks_without_a_trace(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny(tmp_path / "model")
    head = WeightScheme(bits=4, group_size=32)
    quantize(model, tmp_path / "whole", text, method="gptq", head=head, embedding=INT8)
    monkeypatch.setattr(row_blocks, "BLOCK_ELEMENTS", 64 * 50)
    quantize(model, tmp_path / "blocks", text, method="gptq", head=head, embedding=INT8)
    whole, blocks = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "blocks"))
    assert all(torch.equal(whole[name], blocks[name]) for name in whole)
    entries = [load_inference_config(tmp_path / name).linears[HEAD] for name in ("whole", "blocks")]
    assert entries[0].error == pytest.approx(entries[1].error, rel=1e-5)
    assert entries[0].rtn_error == pytest.approx(entries[1].rtn_error, rel=1e-5)
