"""We read what AutoRound writes in its own format as AutoRound does: logits against those of its own modules.

They differ by the float16 in which its modules dequantize. Not here: AWQ's layout and asymmetric GPTQ version 1, for
which AutoRound has no kernel of its own on a processor; goldens of both are in `tests/data/goldens/auto_round`.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from consumers import python_with, run
from safetensors import safe_open
from tiny_models import save_tiny

from cann_llm_quant.export.packed import open_packed
from cann_llm_quant.runner.engine import LLMEngine

PYTHON = python_with("auto_round")
IDS = [[5, 77, 123, 30, 12, 9, 100, 44, 55, 66, 50, 60, 31, 7, 8, 25]]
MIXED = {
    "sym": False,
    "layer_config": {
        "down_proj": {"bits": 8},
        ".*k_proj": {"group_size": 16},
        "model.layers.0.self_attn.v_proj": {"sym": True},
        "model.layers.1.mlp.gate_proj": {"bits": 16},
    },
}
EXPERTS = {"sym": False, "layer_config": {"mlp.*experts.*down_proj": {"bits": 8, "group_size": 16}}}
# Family, AutoRound's format and options, and how many linears of which scheme are to be found.
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, int]]] = {
    "llama-w3": ("llama", "auto_round", {"bits": 3}, {"int3-sym-g32": 14}),
    "llama-w5-asym": ("llama", "auto_round", {"bits": 5, "sym": False}, {"int5-asym-g32": 14}),
    "llama-v2-asym": ("llama", "auto_round:gptqmodel", {"sym": False}, {"int4-asym-g32": 14}),
    "llama-mixed": (
        "llama",
        "auto_round",
        MIXED,
        {"int8-sym-g32": 2, "int4-asym-g16": 2, "int4-sym-g32": 1, "int4-asym-g32": 8},
    ),
    "qwen3_moe-mixed": ("qwen3_moe", "auto_round", EXPERTS, {"int8-sym-g16": 8, "int4-asym-g32": 24}),
    "mixtral": ("mixtral", "auto_round", {}, {"int4-sym-g32": 32}),
}
FEW: dict[str, dict[str, int]] = {"mixtral": {"num_local_experts": 4}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every folder, written and loaded by AutoRound."""
    root = tmp_path_factory.mktemp("auto_round")
    cases = {}
    for name, (family, form, options, _) in CASES.items():
        source = root / f"{family}-float"
        if not source.is_dir():
            save_tiny(source, family, **FEW.get(family, {}))
        cases[name] = {"source": str(source), "format": form, "options": options}
    (root / "cases.json").write_text(json.dumps({"ids": IDS, "cases": cases}), encoding="utf-8")
    run(PYTHON, "auto_round_maker.py", root / "cases.json", root)
    return root


@pytest.mark.parametrize("name", CASES)
def test_what_auto_round_wrote(made: Path, name: str, record_property: Any) -> None:
    with open_packed(made / name) as checkpoint:
        found = Counter(linear.scheme.label() for linear in checkpoint.reader.linears.values())
    with safe_open(made / f"{name}.loaded.safetensors", framework="pt") as file:
        expected, kinds = file.get_tensor("logits")[0], file.metadata()["kinds"]
    with LLMEngine(made / name) as engine:
        (ours,) = engine.logits(torch.tensor(IDS))
    difference = float((ours.view(expected.shape) - expected).abs().max())
    row = {"target": "from auto-round", "model": name, "consumer": f"AutoRound, {kinds}", "difference": difference}
    record_property("conformance", row)
    assert found == CASES[name][3]
    assert difference < 0.02 * float(expected.std())
