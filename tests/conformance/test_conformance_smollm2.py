"""One real model in every layout: SmolLM2-135M, or whatever folder `CONFORMANCE_SMOLLM2` names, rounded to 4 bits.

Its logits for a sentence by each consumer against our runner's on the same files; for Ascend each linear's output.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from consumers import python_with, run
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cann_llm_quant.export.layouts import ExportOptions, export_model
from cann_llm_quant.export.packed import open_packed
from cann_llm_quant.pipeline import RunOptions, quantize_model
from cann_llm_quant.recipe import validate_recipe
from cann_llm_quant.runner.engine import LLMEngine
from cann_llm_quant.tokenizer import encode

SOURCE = os.environ.get("CONFORMANCE_SMOLLM2")
pytestmark = pytest.mark.skipif(SOURCE is None, reason="CONFORMANCE_SMOLLM2 names no folder of SmolLM2-135M")
TEXT = "The old lighthouse keeper climbed the stairs, lit the lamp and looked out over the dark sea."
FLOAT, MODEL = "SmolLM2-135M", "SmolLM2-135M int4 g64"


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smollm2") / "native"
    recipe = validate_recipe({"method": "rtn", "scheme": {"bits": 4, "group_size": 64, "symmetric": True}}, "test")
    quantize_model(str(SOURCE), out, recipe, options=RunOptions())
    return out


@pytest.fixture(scope="module")
def ids(native: Path) -> torch.Tensor:
    with LLMEngine(native) as engine:
        return torch.tensor([encode(engine.tokenizer, TEXT, bos=False)])


def exported(native: Path, layout: str, **options: object) -> Path:
    out = native.parent / f"{layout}-{'-'.join(map(str, options.values()))}"
    return export_model(native, out, layout, ExportOptions(**options)).path


def ours(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    with LLMEngine(folder) as engine:
        (logits,) = engine.logits(ids)
    return logits.view(ids.shape[1], -1)


def record(
    record_property, target: str, consumer: str, difference: float, of: str = "logits", model: str = MODEL
) -> None:
    row = {"target": target, "model": model, "consumer": consumer, "difference": difference, "of": of}
    record_property("conformance", row)


def test_transformers(native: Path, ids: torch.Tensor, record_property) -> None:
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(native, dtype=torch.float32)(ids).logits[0]
    difference = float((theirs - ours(native, ids)).abs().max())
    record(record_property, "compressed-tensors", "transformers", difference)
    assert difference < 1e-3


def test_onnx_runtime(native: Path, ids: torch.Tensor, record_property) -> None:
    pytest.importorskip("onnxruntime")
    from onnx_runs import OrtRun

    folder = exported(native, "onnx", dtype="fp32")
    difference = float(np.abs(OrtRun(folder, batch=1)(ids)[0] - ours(native, ids).numpy()).max())
    record(record_property, "onnx ort", "ONNX Runtime", difference)
    assert difference < 5e-3


def test_llama_cpp_in_float(native: Path, ids: torch.Tensor, record_property) -> None:
    pytest.importorskip("xllamacpp")
    from llama_cpp import LlamaCpp

    out = export_model(SOURCE, native.parent / "gguf-float", "gguf", ExportOptions(dtype="fp32")).path
    (file,) = out.glob("*.gguf")
    expected = torch.log_softmax(ours(Path(SOURCE), ids)[-1].double(), -1)
    theirs = LlamaCpp(file).next_token(ids[0].tolist(), expected.numel(), int(expected.argmax()))
    difference = float((theirs - expected).abs().max())
    record(record_property, "gguf F32", "llama.cpp", difference, "log-probabilities of the next token", FLOAT)
    assert difference < 1e-3


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_llama_cpp(native: Path, ids: torch.Tensor, dtype: str, record_property) -> None:
    """It rounds the inputs of Q4_0 products to 8 bits."""
    pytest.importorskip("xllamacpp")
    from llama_cpp import LlamaCpp

    (file,) = exported(native, "gguf", dtype=dtype).glob("*.gguf")
    expected = torch.log_softmax(ours(native, ids)[-1].double(), -1)
    theirs = LlamaCpp(file).next_token(ids[0].tolist(), expected.numel(), int(expected.argmax()))
    divergence = float((expected.exp() * (expected - theirs)).sum())
    record(record_property, f"gguf Q4_0 {dtype}", "llama.cpp", divergence, "KL of the next token")
    assert divergence < 0.05
    assert int(theirs.argmax()) == int(expected.argmax())


@pytest.mark.parametrize(
    ("layout", "package", "script", "consumer"),
    [
        ("mlx", "mlx_lm", "mlx_loader.py", "mlx-lm"),
        ("awq", "gptqmodel", "gptqmodel_loader.py", "transformers + GPTQModel"),
        ("gptq", "gptqmodel", "gptqmodel_loader.py", "transformers + GPTQModel"),
        ("gptq_v2", "gptqmodel", "gptqmodel_loader.py", "transformers + GPTQModel"),
    ],
)
def test_loaders(
    native: Path, ids: torch.Tensor, layout: str, package: str, script: str, consumer: str, record_property
) -> None:
    python = python_with(package)
    folder = exported(native, layout)
    save_file({"ids": ids.to(torch.int32) if layout == "mlx" else ids}, native.parent / f"{layout}.safetensors")
    run(python, script, native.parent / f"{layout}.safetensors", folder)
    logits = load_file(folder / "loaded.safetensors")["logits"][0]
    expected = ours(folder, ids)
    difference = float((logits - expected).abs().max())
    record(record_property, layout, consumer, difference)
    assert difference < 0.1 * float(expected.std())


def test_vllm(native: Path, ids: torch.Tensor, record_property) -> None:
    """One process for all layouts: it takes longer to start than to read them."""
    from test_conformance_vllm import PYTHON, theirs

    folders = {layout: exported(native, layout) for layout in ("awq", "gptq", "gptq_v2")}
    folders["compressed-tensors"] = native
    save_file({"ids": ids}, native.parent / "vllm.safetensors")
    run(PYTHON, "vllm_loader.py", "float16", native.parent / "vllm.safetensors", *folders.values())
    differences = {}
    for layout, folder in folders.items():
        expected = torch.log_softmax(ours(folder, ids).float(), -1)[:-1]
        differences[layout] = float((theirs(folder)[0] - expected).abs().max())
        assert differences[layout] < 0.1 * float(expected.std())
    worst = max(differences, key=lambda layout: differences[layout])
    consumer = f"vLLM, {len(folders)} layouts, this the worst"
    record(record_property, worst, consumer, differences[worst], "log-probabilities")


def test_vllm_ascend(native: Path, record_property) -> None:
    from test_conformance_ascend import DENSE, HERE, Run, error, reference

    wheel = os.environ.get("CONFORMANCE_VLLM_ASCEND")
    if wheel is None:
        pytest.skip("CONFORMANCE_VLLM_ASCEND names no unpacked wheel of vllm-ascend; see ascend_fetch.py")
    folder, out = exported(native, "ascend"), native.parent / "ascend.safetensors"
    command = [sys.executable, str(HERE / "ascend_loader.py"), wheel, str(folder), str(out)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, cwd=HERE).stdout
    (found,) = json.loads(answer.splitlines()[-1])
    assert found["errors"] == {}
    with open_packed(folder) as checkpoint:
        weights = {module: checkpoint.quantized(module) for module in checkpoint.modules}
        layers = checkpoint.config["num_hidden_layers"]
    loaded = Run(folder, weights, found["methods"], {}, load_file(out))
    worst = 0.0
    for layer in range(layers):
        for name, members in DENSE.items():
            prefix = f"model.layers.{layer}.{name}"
            worst = max(worst, error(loaded.outputs[f"{prefix}:y"], reference(loaded, prefix, members)))
    record(record_property, "ascend", "vllm-ascend 0.23.0's methods", worst, "linears' outputs, relative")
    assert worst < 0.004
