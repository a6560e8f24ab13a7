"""transformers with GPTQModel's kernels reads the GPTQ folders that we write as we do.

Weights must be equal bit for bit after rounding to float16, in which the kernels compute. Logits are compared with our
runner's on the same folder in float32; the torch kernel's differ by float16 rounding, the int4 kernel rounds its inputs
and scales to bfloat16 beside that.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from consumers import python_with, run
from encoded_folders import save_encoded
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny

from cann_llm_quant.export.gptq import GptqEncoder, Version
from cann_llm_quant.quant.scheme import Scheme, scheme_for
from cann_llm_quant.runner.engine import LLMEngine

PYTHON = python_with("gptqmodel")

IDS = torch.tensor([[5, 77, 123, 30, 12, 9, 100, 44, 55, 66, 50, 60, 31, 7, 8, 25]])
ODD = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
ODD |= {"attention_bias": True, "mlp_bias": True}
# Family, config, version, scheme of the layers, and whether o_proj stays in float.
MODELS: dict[str, tuple[str, dict[str, Any], Version, Scheme, bool]] = {
    "llama-bias-gqa-odd": (
        "llama",
        ODD | {"attention_bias": True, "mlp_bias": True},
        1,
        scheme_for(4, 32, True),
        False,
    ),
    "llama-tied-v1-asym": ("llama", {"tie_word_embeddings": True}, 1, scheme_for(4, 32, False), False),
    "qwen2-v2-asym": ("qwen2", {}, 2, scheme_for(4, 32, False), True),
    "qwen3-w8-rows": ("qwen3", {"head_dim": 32}, 1, scheme_for(8, -1, True), False),
    "qwen3-w3": ("qwen3", {"head_dim": 32}, 2, scheme_for(3, 32, False), False),
    "llama-w2": ("llama", {}, 2, scheme_for(2, 16, False), False),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, torch.Tensor]]]:
    """Each model's folder, loaded once by the consumer, and its weights as we mean them."""
    root = tmp_path_factory.mktemp("gptq")
    save_file({"ids": IDS}, root / "ids.safetensors")
    made = {}
    for name, (family, config, version, scheme, keeps_o) in MODELS.items():
        source = save_tiny(root / f"{name}-float", family, dtype=torch.float16, **config)

        def scheme_of(module: str, scheme: Scheme = scheme, keeps_o: bool = keeps_o) -> Scheme | None:
            return None if module == "lm_head" or (keeps_o and module.endswith("o_proj")) else scheme

        _, weights = save_encoded(source, root / name, GptqEncoder(version), scheme_of)
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
    with safe_open(folder / "loaded.safetensors", framework="pt") as file:
        kernel = file.metadata()["kernels"]
    difference = float((loaded["logits"][0] - expected).abs().max())
    row = {"target": "gptq", "model": name, "consumer": f"transformers + GPTQModel ({kernel})"}
    record_property("conformance", row | {"difference": difference})
    assert difference < (0.02 if kernel == "TorchLinear" else 0.1) * float(expected.std())
