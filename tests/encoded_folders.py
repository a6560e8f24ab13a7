"""A tiny model written by one of our encoders without the exporter: plain rounding, one file of weights."""

from collections.abc import Callable
from pathlib import Path

import torch
from native_folders import round_weight
from safetensors.torch import save_file
from torch import Tensor

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.export.layout import Encoder, PackedModel
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.quant.kv import KvPlan
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme

SchemeOf = Callable[[str], Scheme | None]


def save_encoded(
    source: Path, out: Path, encoder: Encoder, scheme_of: SchemeOf
) -> tuple[PackedModel, dict[str, QuantizedTensor]]:
    """`source` with each linear that `scheme_of` gives a scheme rounded to it and written by `encoder` to `out`.

    Scales are those that float16 and bfloat16 both hold, so that every layout keeps them. The companion files are
    copied. Returns what the encoder was told and the linears by module.
    """
    stored: dict[str, Tensor] = {}
    with open_checkpoint(str(source)) as checkpoint:
        arch = arch_from_checkpoint(checkpoint)
        modules = [spec.module for layer in arch.layers for spec in layer.linears] + [arch.head_module]
        weights = {}
        for module in modules:
            scheme = scheme_of(module)
            if scheme is not None and f"{module}.weight" in checkpoint.tensors:
                weights[module] = exact_scales(round_weight(checkpoint.load(f"{module}.weight"), scheme))
        model = PackedModel(
            arch=arch,
            schemes={module: weight.scheme for module, weight in weights.items()},
            activations={},
            shapes={module: weight.shape for module, weight in weights.items()},
            kv=KvPlan.plain(arch.num_layers),
            dtype=checkpoint.tensors[arch.final_norm_name].dtype,
            config=checkpoint.config,
        )
        encoder.check(model)
        for name in checkpoint.tensors:
            module, _, part = name.rpartition(".")
            if module not in weights:
                stored |= encoder.plain(name, checkpoint.load(name))
            elif part == "weight":
                bias = f"{module}.bias"
                loaded = checkpoint.load(bias) if bias in checkpoint.tensors else None
                stored |= encoder.encode(module, weights[module], None, loaded)
        files = checkpoint.companion_files()
    files |= encoder.files(model, {name: tensor.dtype for name, tensor in stored.items()})
    out.mkdir()
    save_file(stored, out / f"{encoder.stem}.safetensors", metadata={"format": "pt"})
    for name, content in files.items():
        (out / name).write_bytes(content)
    return model, weights


def exact_scales(weight: QuantizedTensor) -> QuantizedTensor:
    """The same codes under scales of at most 8 significant bits in float16's range."""
    scale = weight.scale.to(torch.bfloat16).to(torch.float32).clamp(2.0**-14, 2.0**10).to(torch.float16)
    return QuantizedTensor(weight.codes, scale, weight.zero_point, weight.scheme)


def dequantized(weights: dict[str, QuantizedTensor], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A float model's tensors with the quantized ones in the place of theirs."""
    return state | {f"{module}.weight": weight.dequantize() for module, weight in weights.items()}
