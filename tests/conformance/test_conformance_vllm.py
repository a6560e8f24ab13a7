"""vLLM on a CPU reads our folders as we do: log-probabilities of a text's tokens against our runner's.

Its kernel for 4-bit weights wants AVX512; elsewhere `vllm_loader.py` puts a product in its place, so that what is
tested is how vLLM names, fuses, configures and repacks. 8-bit products are oneDNN's, which without VNNI adds pairs of
them in 16 bits: weights are kept to 7 bits here. vLLM rounds inputs to max|x| / 127 and we to max|x| / 127.5, so that
errors of rounding differ and only their size can be compared.

Not here: asymmetric GPTQ ("Unsupported quantization config: bits=4, sym=False") and 4-bit experts ("No WNA16 MoE
backend"), which vLLM 0.32 does not take on such a CPU.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from consumers import python_with, run
from native_folders import save_native
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny
from torch import Tensor

from cann_llm_quant.export.layouts import ExportOptions, export_model
from cann_llm_quant.quant.scheme import ActivationScheme, scheme_for
from cann_llm_quant.runner.engine import LLMEngine

PYTHON = python_with("vllm")
IDS = torch.tensor([[5, 77, 123, 30, 12, 9, 100, 44, 55, 66, 50, 60, 31, 7, 8, 25]])
# Heads of 64 are the smallest that most of vLLM's kernels take.
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
# Family, config, whether the scheme is symmetric, layouts.
MODELS: dict[str, tuple[str, dict[str, Any], bool, tuple[str, ...]]] = {
    "llama-sym": ("llama", {}, True, ("compressed-tensors", "awq", "gptq", "gptq_v2")),
    "llama-bias-asym": ("llama", {"attention_bias": True}, False, ("compressed-tensors", "awq")),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}, True, ("compressed-tensors", "awq", "gptq")),
}
CASES = [(name, layout) for name, (_, _, _, layouts) in MODELS.items() for layout in layouts]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Each 4-bit folder, loaded by vLLM."""
    root = tmp_path_factory.mktemp("vllm")
    made = {}
    for name, (family, config, symmetric, layouts) in MODELS.items():
        source = save_tiny(root / f"{name}-float", family, **(SIZES | config))
        native = save_native(source, root / f"{name}-native", scheme_for(4, 64, symmetric))
        for layout in layouts:
            made[name, layout] = export_model(native, root / f"{name}-{layout}", layout, ExportOptions()).path
    save_file({"ids": IDS}, root / "ids.safetensors")
    run(PYTHON, "vllm_loader.py", "float16", root / "ids.safetensors", *made.values())
    return made


def ours(folder: Path) -> Tensor:
    with LLMEngine(folder) as engine:
        (logits,) = engine.logits(IDS)
    return torch.log_softmax(logits.view(IDS.shape[1], -1).to(torch.float32), -1)[:-1]


def theirs(folder: Path) -> tuple[Tensor, str]:
    saved = folder.parent / f"{folder.name}.loaded.safetensors"
    with safe_open(saved, framework="pt") as file:
        return file.get_tensor("logprobs"), file.metadata()["kernel"]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_4_bit_folders(folders: dict[tuple[str, str], Path], name: str, layout: str, record_property: Any) -> None:
    (found, kernel), expected = theirs(folders[name, layout]), ours(folders[name, layout])
    difference = float((found - expected).abs().max())
    row = {"target": layout, "model": name, "consumer": f"vLLM, 4-bit products by {kernel}", "difference": difference}
    record_property("conformance", row | {"of": "log-probabilities"})
    assert difference < 0.05 * float(expected.std())


def test_8_bit_weights_and_inputs(tmp_path: Path, record_property: Any) -> None:
    source = save_tiny(tmp_path / "float", **SIZES)
    native = save_native(source, tmp_path / "native", scheme_for(8, -1, True), ActivationScheme("int8"))
    folder = export_model(native, tmp_path / "out", "compressed-tensors", ExportOptions()).path
    halve_codes(folder)
    save_file({"ids": IDS}, tmp_path / "ids.safetensors")
    run(PYTHON, "vllm_loader.py", "float32", tmp_path / "ids.safetensors", folder)
    (found, _), expected, exact = theirs(folder), ours(folder), ours(without_inputs(folder, tmp_path / "exact"))
    effect, error = (float((rounded - exact).square().mean()) for rounded in (expected, found))
    row = {"target": "compressed-tensors", "model": "llama-w8a8", "consumer": "vLLM", "difference": error / effect}
    record_property("conformance", row | {"of": "our own error of rounding inputs"})
    assert 0.5 < error / effect < 2.0


def halve_codes(folder: Path) -> None:
    """Weights of 7 bits in the same files, and no hashes of what they were."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name, tensor in tensors.items() if tensor.dtype == torch.int8]:
        tensors[name] = (tensors[name].to(torch.float32) / 2).round().to(torch.int8)
        tensors[f"{name}_scale"] = tensors[f"{name}_scale"] * 2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "SHA256SUMS").unlink(missing_ok=True)


def without_inputs(folder: Path, out: Path) -> Path:
    """The same weights under a config that leaves inputs in float."""
    shutil.copytree(folder, out)
    (out / "inference_config.json").unlink(missing_ok=True)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = None
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return out
