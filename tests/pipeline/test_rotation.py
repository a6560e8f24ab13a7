"""`--rotate` end to end: the output computes what the source does, and what changed is said."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, our_logits, save_text, save_tiny
from transformers import AutoModelForCausalLM

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.pipeline import RunOptions, quantize_model
from cann_llm_quant.pipeline.request import Event
from cann_llm_quant.recipe import Recipe, validate_recipe


def recipe(text: Path, **fields: object) -> Recipe:
    calibration = {"data": str(text), "samples": 4, "length": 32}
    return validate_recipe({"calibration": calibration, "rotate": True} | fields, "the test")


def logits_of(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mixtral"])
def test_a_rotated_model_in_eight_bits_computes_what_the_source_does(family: str, tmp_path: Path) -> None:
    config = {"tie_word_embeddings": True} if family != "mixtral" else {"num_local_experts": 3}
    model = save_tiny(tmp_path / "model", family, dtype=torch.float32, head_dim=16, **config)
    said: list[Event] = []
    wanted = recipe(save_text(tmp_path / "text.txt"), method="rtn", scheme={"bits": 8, "group_size": 16})
    report = quantize_model(str(model), tmp_path / "out", wanted, options=RunOptions(), progress=said.append)
    ids = torch.randint(3, VOCAB, (1, 24), generator=torch.Generator().manual_seed(0))
    expected, found = logits_of(model, ids), our_logits(tmp_path / "out", ids)
    assert float((found - expected).norm()) < 0.02 * float(expected.norm())
    torch.testing.assert_close(logits_of(tmp_path / "out", ids), found, rtol=1e-3, atol=1e-3)
    assert any("rotated (Hadamard" in (event.message or "") for event in said)
    assert any("stored on its own" in text for text in report.warnings) == (family != "mixtral")
    assert any("routers are rotated" in text for text in report.warnings) == (family == "mixtral")
    with open_checkpoint(str(tmp_path / "out"), accept_quantized=True) as out:
        assert out.config["tie_word_embeddings"] is False
        assert torch.equal(out.load("model.norm.weight"), torch.ones(64))


def test_rotation_and_scaling_join_and_are_part_of_the_runs_identity(tmp_path: Path) -> None:
    """Four-bit inputs on a model with outliers in its residual stream."""
    model = save_tiny(tmp_path / "model", dtype=torch.float32, head_dim=16)
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, [3, 40]] *= 25
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    text, errors = save_text(tmp_path / "text.txt"), {}
    for rotate in (False, True):
        wanted = recipe(text, method="smoothquant+awq", effort="fast", scheme="W4A4", rotate=rotate)
        report = quantize_model(str(model), tmp_path / f"out{rotate}", wanted, options=RunOptions())
        errors[rotate] = report.mean_error
    with open_checkpoint(str(tmp_path / "outTrue"), accept_quantized=True) as turned:
        assert "rotate" in turned.path.joinpath("recipe.json").read_text(encoding="utf-8")
    assert all(error is not None and 0 < error < 1 for error in errors.values())


def test_tensors_beside_the_map_are_refused(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", head_dim=16)
    tensors = load_file(model / "model.safetensors")
    tensors["model.mtp.weight"] = torch.ones(64, 64)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedError, match=r"model\.mtp\.weight has no place.*leave out --rotate"):
        quantize_model(str(model), tmp_path / "out", recipe(save_text(tmp_path / "t.txt")), options=RunOptions())
    assert not (tmp_path / "out").exists()
