"""GPTQModel itself reads experts in our GPTQ and AWQ folders as we do.

Logits are our runner's up to the bfloat16 rounding of the int4 kernel's inputs and scales. Mixtral is not here:
GPTQModel 7.6 looks for `mlp.experts.0.gate_proj`, as its own module is named, where Mixtral's files say
`block_sparse_moe.experts.0.w1`; it refuses such GPTQ files and leaves AWQ's unread (logits are then NaN).
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from consumers import python_with, run
from native_folders import save_native
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import save_tiny

from cann_llm_quant.export.layouts import ExportOptions, export_model
from cann_llm_quant.quant.scheme import scheme_for
from cann_llm_quant.runner.engine import LLMEngine

PYTHON = python_with("gptqmodel")
IDS = torch.tensor([[5, 77, 123, 30, 12, 9, 100, 44, 55, 66, 50, 60, 31, 7, 8, 25]])
SIZES = {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 1}
# Config, and how many linears a layer has in codes: attention, 4 experts, for Qwen 2 the shared one.
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "qwen2_moe": ({"shared_expert_intermediate_size": 256}, 4 + 4 * 3 + 3),
    "qwen3_moe": ({"head_dim": 64}, 4 + 4 * 3),
}
LAYOUTS = ("gptq", "awq")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Each folder, loaded by GPTQModel."""
    root = tmp_path_factory.mktemp("experts")
    made = {}
    for family, (config, _) in FAMILIES.items():
        source = save_tiny(root / f"{family}-float", family, **(SIZES | config))
        native = save_native(source, root / f"{family}-native", scheme_for(4, 64, True))
        for layout in LAYOUTS:
            made[family, layout] = export_model(native, root / f"{family}-{layout}", layout, ExportOptions()).path
    save_file({"ids": IDS}, root / "ids.safetensors")
    run(PYTHON, "gptqmodel_experts.py", root / "ids.safetensors", *made.values())
    return made


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts(folders: dict[tuple[str, str], Path], family: str, layout: str, record_property: Any) -> None:
    folder = folders[family, layout]
    with safe_open(folder / "loaded.safetensors", framework="pt") as file:
        found, packed = file.get_tensor("logits")[0], int(file.metadata()["packed"])
    (folder / "loaded.safetensors").unlink()  # our reader takes every file of weights for the model's
    with LLMEngine(folder) as engine:
        (expected,) = engine.logits(IDS)
    difference = float((found - expected.view(found.shape)).abs().max())
    row = {"target": layout, "model": f"{family} with experts", "consumer": "GPTQModel", "difference": difference}
    record_property("conformance", row)
    assert packed == FAMILIES[family][1]
    assert difference < 0.1 * float(expected.std())
