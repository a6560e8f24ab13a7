"""mlx-lm reads the MLX folders that we write as we do, and we read what MLX itself quantizes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from consumers import python_with, run
from encoded_folders import save_encoded
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.export.mlx import MlxEncoder
from cann_llm_quant.export.mlx_folder import MlxFolder
from cann_llm_quant.export.mlx_reader import MlxReader
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme, scheme_for
from cann_llm_quant.runner.engine import LLMEngine

PYTHON = python_with("mlx_lm")

IDS = torch.tensor([[5, 77, 123, 30, 12, 9, 100, 44, 55, 66, 50, 60, 31, 7, 8, 25]], dtype=torch.int32)
ODD = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
FEW = {"num_local_experts": 4}
# Family, config, scheme of all linears but the routers.
MODELS: dict[str, tuple[str, dict[str, Any], Scheme]] = {
    "llama-gqa-odd-bias": ("llama", ODD | {"attention_bias": True, "mlp_bias": True}, scheme_for(4, 32, True)),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, scheme_for(3, 32, False)),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}, scheme_for(6, 32, True)),
    "qwen3": ("qwen3", {"head_dim": 32}, scheme_for(8, 32, True)),
    "mixtral": ("mixtral", FEW, scheme_for(4, 32, False)),
    "qwen2-moe": ("qwen2_moe", {}, scheme_for(5, 32, True)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, QuantizedTensor]]]:
    """Each model's folder, loaded once by the consumer, and its linears as we mean them."""
    root = tmp_path_factory.mktemp("mlx")
    save_file({"ids": IDS}, root / "ids.safetensors")
    made = {}
    for name, (family, config, scheme) in MODELS.items():
        source = save_tiny(root / f"{name}-float", family, dtype=torch.float32, **config)

        def scheme_of(module: str, scheme: Scheme = scheme) -> Scheme | None:
            return None if module.endswith((".gate", "shared_expert_gate", "layers.0.self_attn.o_proj")) else scheme

        _, weights = save_encoded(source, root / name, MlxEncoder(), scheme_of)
        made[name] = (root / name, weights)
    run(PYTHON, "mlx_loader.py", root / "ids.safetensors", *(folder for folder, _ in made.values()))
    return made


@pytest.mark.parametrize("name", MODELS)
def test_weights_and_logits(folders: dict[str, tuple[Path, dict[str, QuantizedTensor]]], name: str, record_property):
    folder, weights = folders[name]
    loaded = load_file(folder / "loaded.safetensors")
    for module, weight in weights.items():
        if f"{module}.weight" in loaded:  # experts are stacked
            step = float(weight.scale.to(torch.float32).max())
            shift = (0.0 if weight.zero_point is None else 2.0 ** (weight.scheme.bits - 11)) + 2.0**-18
            assert (loaded[f"{module}.weight"] - weight.dequantize()).abs().max() <= shift * step, module
    with LLMEngine(folder) as engine:
        (expected,) = engine.logits(IDS.to(torch.int64))
    difference = float((loaded["logits"][0] - expected).abs().max())
    row = {"target": "mlx", "model": name, "consumer": "mlx-lm", "difference": difference}
    record_property("conformance", row)
    assert difference < 0.02 * float(expected.std())


def test_we_read_what_mlx_quantizes(tmp_path: Path) -> None:
    run(PYTHON, "mlx_loader.py", "--quantize", tmp_path)
    for bits in (2, 3, 4, 5, 6, 8):
        folder = tmp_path / f"m{bits}"
        folder.mkdir()
        shutil.move(tmp_path / f"{bits}.safetensors", folder / "model.safetensors")
        section = {"quantization": {"group_size": 64, "bits": bits}}
        (folder / "config.json").write_text(json.dumps(section), encoding="utf-8")
        with MlxFolder(open_checkpoint(str(folder), accept_quantized=True)) as opened:
            reader, expected = MlxReader(opened), opened.load("expected")
            step = float(opened.load("m.scales").abs().max()) if "m" in reader.linears else 0.0
            found = reader.quantized("m").dequantize() if step else opened.load("m.weight").to(torch.float32)
        assert bits in (5, 6) or (step > 0) == (bits <= 4)  # between, rounding may or may not reach a sixteenth
        assert (found - expected).abs().max() <= (step / 16 if step else 2.0**-8 * float(expected.abs().max())), bits
