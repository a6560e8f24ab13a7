"""An output loaded by the code that will run it: the last word on whether it is what its layout says.

    transformers   float, native, compressed-tensors, fp8, gptq, awq   a folder; one forward pass, finite logits
    onnxruntime    onnx                                                 a session is made
    xllamacpp      gguf                                                 the model is loaded

A runtime that is not installed is said to be so; it is no fault.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cann_llm_quant.export.verify_findings import Findings, listed

_ADVICE = "see whether this version of the runtime reads the layout, or write the model again"


@dataclass(frozen=True)
class Loaded:
    """The runtime of a layout and what came of loading."""

    runtime: str
    outcome: str


def load_in_runtime(path: Path, layout: str, findings: Findings) -> Loaded:
    """Load an output with its layout's own runtime; failures are faults. Reads the whole model into memory."""
    name, needed = _runtime(path, layout)
    if name is None:
        return Loaded("none", f"no runtime for {layout} runs here")
    absent = [package for package in needed if importlib.util.find_spec(package) is None]
    if absent:
        return Loaded(name, f"not installed: {', '.join(absent)}")
    loaders: dict[str, Callable[[Path, Findings], str]] = {
        "transformers": _with_transformers,
        "onnxruntime": _with_onnxruntime,
        "xllamacpp": _with_llama_cpp,
    }
    try:
        return Loaded(name, loaders[name](path, findings))
    except Exception as error:  # whatever a runtime raises is its answer
        reason = str(error).strip().splitlines() or [""]
        findings.add(str(path), f"{name} does not load it: {type(error).__name__}: {reason[0]}", _ADVICE)
        return Loaded(name, "failed")


def _runtime(path: Path, layout: str) -> tuple[str | None, tuple[str, ...]]:
    if layout == "onnx":
        return "onnxruntime", ("onnxruntime",)
    if layout == "gguf":
        return "xllamacpp", ("xllamacpp",)
    needed = {
        "float": (),
        "native": ("compressed_tensors",),
        "compressed-tensors": ("compressed_tensors",),
        "fp8": (),
        "gptq": ("optimum", "gptqmodel"),
        "gptq_v2": ("optimum", "gptqmodel"),
        "awq": ("gptqmodel",),
    }
    return ("transformers", ("transformers", *needed[layout])) if layout in needed and path.is_dir() else (None, ())


def _with_transformers(path: Path, findings: Findings) -> str:
    from transformers import AutoModelForCausalLM

    model, told = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
    for kind in ("missing_keys", "mismatched_keys"):
        names = sorted(str(name) for name in told.get(kind, ()))
        if names:
            findings.add(str(path), f"transformers reports {kind.replace('_', ' ')}: {listed(names)}", _ADVICE)
    unexpected = sorted(str(name) for name in told.get("unexpected_keys", ()))
    if unexpected:
        findings.remark(f"transformers does not use {len(unexpected)} tensors: {listed(unexpected)}")
    ids = torch.arange(1, 9).clamp(max=model.config.get_text_config().vocab_size - 1).unsqueeze(0)
    with torch.no_grad():
        logits = model(ids).logits
    if not bool(logits.isfinite().all()):
        findings.add(str(path), "transformers computes logits that are NaN or infinite", _ADVICE)
    return f"{model.num_parameters()} parameters, logits of {ids.shape[1]} tokens computed"


def _with_onnxruntime(path: Path, findings: Findings) -> str:
    import onnxruntime

    file = path if path.is_file() else next(path.glob("*.onnx"))
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return f"{len(session.get_inputs())} inputs, {len(session.get_outputs())} outputs"


def _with_llama_cpp(path: Path, findings: Findings) -> str:
    xllamacpp: Any = importlib.import_module("xllamacpp")
    parameters: Any = xllamacpp.CommonParams()
    parameters.model.path = str(path if path.is_file() else next(path.glob("*.gguf")))
    parameters.warmup = False
    parameters.n_ctx = 64
    parameters.cpuparams.n_threads = 1
    server = xllamacpp.Server(parameters)
    answer = server.handle_completions({"prompt": "a", "max_tokens": 1})
    return "a token was generated" if answer else "nothing was generated"
