"""Loads GPTQ and AWQ folders as users do, through transformers and GPTQModel's kernels, and saves what they compute.

Usage: python gptqmodel_loader.py IDS.safetensors FOLDER…; each folder gets `loaded.safetensors` with the logits of
`ids` under float16 and the weights [out, in] as GPTQModel dequantizes them, in float32.
"""

import json
import sys
from pathlib import Path

import torch
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel


def gptq_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """By the kernels themselves, before they reorder their codes for the first product."""
    linears = {name: part for name, part in model.named_modules() if "qweight" in part._buffers}
    return {
        f"{name}.weight": part.dequantize_weight()[: part.in_features].t().to(torch.float32).contiguous()
        for name, part in linears.items()
    }


def awq_weights(folder: Path, group_size: int) -> dict[str, torch.Tensor]:
    """By the function that unpacks stored tensors."""
    stored = load_file(folder / "model.safetensors")
    modules = [name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")]
    weights = {}
    for module in modules:
        qweight, qzeros, scales = (stored[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales"))
        size = len(qweight) if group_size == -1 else group_size
        weight = dequantize_gemm(qweight, qzeros, scales, 4, size)
        weights[f"{module}.weight"] = weight.t().to(torch.float32).contiguous()
    return weights


def main() -> None:
    ids = load_file(sys.argv[1])["ids"]
    for folder in map(Path, sys.argv[2:]):
        section = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
        kernels = sorted({type(part).__name__ for part in model.modules() if "qweight" in part._buffers})
        awq = section["quant_method"] == "awq"
        tensors = awq_weights(folder, section["group_size"]) if awq else gptq_weights(model)
        with torch.no_grad():
            tensors["logits"] = model(ids).logits.to(torch.float32)
        save_file(tensors, folder / "loaded.safetensors", metadata={"kernels": " ".join(kernels)})


main()
