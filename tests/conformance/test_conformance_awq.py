"""transformers with GPTQModel's kernels reads the AWQ folders that we write as we do.

Weights must be equal bit for bit after rounding to float16, as GPTQModel unpacks them; logits are our runner's up to
the bfloat16 rounding of the int4 kernel's inputs and scales.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from consumers import python_with, run
from encoded_folders import save_encoded
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny

from cann_llm_quant.export.awq import AwqEncoder
from cann_llm_quant.quant.scheme import Scheme, scheme_for
from cann_llm_quant.runner.engine import LLMEngine

PYTHON = python_with("gptqmodel")

IDS = torch.tensor([[5, 77, 123, 30, 12, 9, 100, 44, 55, 66, 50, 60, 31, 7, 8, 25]])
ODD = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
# Family, config, scheme of the layers, and whether o_proj stays in float.
MODELS: dict[str, tuple[str, dict[str, Any], Scheme, bool]] = {
    "llama-bias-gqa-odd": ("llama", ODD | {"attention_bias": True, "mlp_bias": True}, scheme_for(4, 32, True), False),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, scheme_for(4, 32, False), False),
    "qwen2-mixed": ("qwen2", {}, scheme_for(4, 32, False), True),
    "qwen3": ("qwen3", {"head_dim": 32}, scheme_for(4, 32, True), False),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, torch.Tensor]]]:
    """Each model's folder, loaded once by the consumer, and its weights as we mean them."""
    root = tmp_path_factory.mktemp("awq")
    save_file({"ids": IDS}, root / "ids.safetensors")
    made = {}
    for name, (family, config, scheme, keeps_o) in MODELS.items():
        source = save_tiny(root / f"{name}-float", family, dtype=torch.float16, **config)

        def scheme_of(module: str, scheme: Scheme = scheme, keeps_o: bool = keeps_o) -> Scheme | None:
            return None if module == "lm_head" or (keeps_o and module.endswith("o_proj")) else scheme

        _, weights = save_encoded(source, root / name, AwqEncoder(), scheme_of)
        made[name] = (root / name, {module: weight.dequantize(torch.float16) for module, weight in weights.items()})
    run(PYTHON, "gptqmodel_loader.py", root / "ids.safetensors", *(folder for folder, _ in made.values()))
    return made


@pytest.mark.parametrize("name", MODELS)
def test_weights_and_logits(folders: dict[str, tuple[Path, dict[str, torch.Tensor]]], name: str, record_property):
    folder, weights = folders[name]
    loaded = load_file(folder / "loaded.safetensors")
    for module, weight in weights.items():
        assert torch.equal(loaded[f"{module}.weight"], weight.to(torch.float32)), module
    with LLMEngine(folder) as engine:
        (expected,) = engine.logits(IDS)
    difference = float((loaded["logits"][0] - expected).abs().max())
    row = {"target": "awq", "model": name, "consumer": "transformers + GPTQModel", "difference": difference}
    record_property("conformance", row)
    assert difference < 0.1 * float(expected.std())
