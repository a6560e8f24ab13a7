"""A directory in the native layout without the pipeline: plain rounding, our encoder, a minimal inference config."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cann_llm_quant.export import native
from cann_llm_quant.export.inference_config import InputFormat, WeightFormat
from cann_llm_quant.export.quantization_config import quantization_config
from cann_llm_quant.quant.rtn import solve
from cann_llm_quant.quant.scheme import ActivationScheme, QuantizedTensor, Scheme


def round_weight(weight: Tensor, scheme: Scheme) -> QuantizedTensor:
    """Min-max rounding of a matrix, a group at a time."""
    w = weight.to(torch.float32)
    w = w.view(len(w), -1, scheme.columns_per_scale(w.shape[1]))
    low, high = w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)
    if scheme.symmetric:
        scale = (torch.maximum(-low, high) / scheme.qmax).to(torch.bfloat16)
        zero = torch.zeros_like(low)
    else:
        scale = ((high - low) / (scheme.qmax - scheme.qmin)).to(torch.bfloat16)
        zero = (scheme.qmin - low / scale.float()).round().clamp(scheme.qmin, scheme.qmax)
    codes = (w / scale.float()[..., None] + zero[..., None]).round().clamp(scheme.qmin, scheme.qmax)
    return QuantizedTensor(
        codes.view(weight.shape).to(torch.int8), scale, None if scheme.symmetric else zero.to(torch.int8), scheme
    )


def save_native(source: Path, out: Path, scheme: Scheme, inputs: ActivationScheme | None = None) -> Path:
    """`source` with every linear of its layers but routers quantized, inputs as `inputs` says; returns `out`."""
    shutil.copytree(source, out)
    stored: dict[str, Tensor] = {}
    schemes: dict[str, Scheme] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        routes = module.endswith(("mlp.gate", "shared_expert_gate", "block_sparse_moe.gate"))
        if tensor.dim() == 2 and ".layers." in name and not routes:
            own = scheme.is_integer and scheme.strategy in ("group", "channel")
            weight = round_weight(tensor, scheme) if own else solve(tensor, scheme, torch.bfloat16)
            stored |= native.encode(module, weight, inputs)
            schemes[module] = scheme
        else:
            stored[name] = tensor
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = quantization_config(
        schemes, ["lm_head"], {} if inputs is None else dict.fromkeys(schemes, inputs)
    )
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (out / "inference_config.json").write_text(json.dumps(_inference(config, schemes, inputs)), encoding="utf-8")
    return out


def _inference(config: dict, schemes: dict[str, Scheme], inputs: ActivationScheme | None) -> dict:
    scheme = next(iter(schemes.values()))
    weights = WeightFormat.of(scheme, "bfloat16").model_dump()
    formats = {} if inputs is None else {"all": InputFormat.of(inputs).model_dump()}
    return {
        "format_version": 1,
        "model_type": config["model_type"],
        "weights": {
            "schemes": {"all": weights},
            "linears": dict.fromkeys(schemes, "all"),
            "float": {},
            "bits_per_weight": 4.5,
        },
        "inputs": {"schemes": formats, "linears": dict.fromkeys(schemes, "all") if formats else {}},
        "limits": {"max_context": config["max_position_embeddings"]},
        "accounting": {"source": 0, "quantized": 0, "kept": 0, "dropped": {}, "extra": []},
        "provenance": {
            "tool_version": "0",
            "source_name": "tiny",
            "source_fingerprint": "",
            "recipe": {},
            "compute_dtype": "float32",
            "device": "cpu",
            "calibration": None,
            "libraries": {},
        },
        "linears": {},
    }


def dequantized_copy(packed: Path, source: Path, out: Path) -> Path:
    """The packed model as a plain float32 checkpoint, dequantized by compressed-tensors' own code."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    shutil.copytree(source, out)
    config = json.loads((packed / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(config).config_groups.values()
    stored = load_file(packed / "model.safetensors")
    tensors = {name: tensor for name, tensor in stored.items() if not name.rpartition(".")[2].startswith("weight_")}
    for name in stored:
        module = name.removesuffix(".weight_packed")
        if module == name:
            continue
        parts = {key.removeprefix(f"{module}."): stored[key] for key in stored if key.startswith(f"{module}.weight_")}
        # its product has the scale's dtype; the stored scales are exact in float32
        parts["weight_scale"] = parts["weight_scale"].to(torch.float32)
        weight = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
        tensors[f"{module}.weight"] = weight.to(torch.float32)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out
