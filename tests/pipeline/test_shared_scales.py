"""C24: linears that runtimes fuse share the scale of the whole matrix, whatever solves them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
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


@pytest.mark.parametrize("scheme", ["NVFP4", {"bits": 4, "group_size": "tensor"}], ids=["nvfp4", "tensor"])
@pytest.mark.parametrize("method", ["rtn", "awq", "gptq"])
def test_plain_rounding_is_judged_with_the_shared_scale(
    tmp_path: Path, scheme: str | dict[str, object], method: str
) -> None:
    model, text = save_tiny(tmp_path / "model"), save_text(tmp_path / "text.txt")
    # k outweighs q and v, so that the scale of three suits them badly: rounding must be charged for that, too.
    tensors = load_file(model / "model.safetensors")
    for name in tensors:
        if name.endswith("k_proj.weight"):
            tensors[name][0, 0] = 8 * tensors[name].abs().max()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    static = {"bits": 8, "group_size": -1, "activations": {"dynamic": False}}
    recipe = Recipe.model_validate(
        {
            "method": method,
            "scheme": scheme,
            "effort": "balanced" if method == "rtn" else "fast",
            "calibration": {"data": [str(text)], "samples": 4, "length": 32},
            # One linear with a stored range makes plain rounding read the text as well.
            "rules": [{"match": "re:.*layers.1.mlp.down_proj", "scheme": static}],
        }
    )
    quantize_model(str(model), tmp_path / "out", recipe, options=RunOptions())
    linears = json.loads((tmp_path / "out" / "inference_config.json").read_text(encoding="utf-8"))["linears"]
    for module in (name for name in linears if name.endswith(("q_proj", "v_proj")) and "layers.0" in name):
        error, plain = linears[module]["error"], linears[module]["rtn_error"]
        assert error == plain if method == "rtn" else error <= plain, module
