"""C24: linears that runtimes fuse share the scale of the whole matrix, whatever solves them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import save_text, save_tiny

from cann_llm_quant.pipeline import RunOptions, quantize_model
from cann_llm_quant.recipe import Calibration, Recipe, WeightScheme

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@pytest.mark.parametrize("method", ["rtn", "awq", "gptq"])
@pytest.mark.parametrize(
    ("scheme", "suffix"),
    [
        (WeightScheme(type="fp8", group_size="tensor"), "weight_scale"),
        (WeightScheme(type="nvfp4"), "weight_global_scale"),
    ],
    ids=["fp8-tensor", "nvfp4"],
)
def test_c24_fused_linears_share_one_scale(tmp_path: Path, scheme: WeightScheme, suffix: str, method: str) -> None:
    model, text = save_tiny(tmp_path / "model"), save_text(tmp_path / "text.txt")
    recipe = Recipe(method=method, scheme=scheme, calibration=Calibration(data=(str(text),), samples=4, length=32))
    quantize_model(str(model), tmp_path / "out", recipe, options=RunOptions())
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for layer in range(2):
        for group in GROUPS:
            part = "self_attn" if "q_proj" in group else "mlp"
            scales = [stored[f"model.layers.{layer}.{part}.{name}.{suffix}"] for name in group]
            assert all(torch.equal(scale, scales[0]) for scale in scales)
