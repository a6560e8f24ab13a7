"""Loads MLX folders with mlx-lm, as users do, and saves what it computes.

Usage: python mlx_loader.py IDS.safetensors FOLDER…; each folder gets `loaded.safetensors` with the logits of `ids` and
the weights [out, in] as MLX dequantizes them, all in float32.
"""

import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_model


def dequantized(module: nn.Module) -> mx.array:
    parts = (module[name].astype(mx.float32) for name in ("scales", "biases"))
    return mx.dequantize(module["weight"], *parts, group_size=module.group_size, bits=module.bits)


def main() -> None:
    ids = mx.load(sys.argv[1])["ids"]
    for folder in map(Path, sys.argv[2:]):
        model, _ = load_model(folder)
        model.set_dtype(mx.float32)  # bfloat16 activations would differ by more than any fault of the weights
        tensors = {
            f"{name}.weight": dequantized(module)
            for name, module in model.named_modules()
            if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding)
        }
        tensors["logits"] = model(ids).astype(mx.float32)
        mx.save_safetensors(str(folder / "loaded.safetensors"), tensors)


def quantize(out: Path) -> None:
    """What MLX itself makes of random weights, for our reader."""
    mx.random.seed(0)
    for bits in (2, 3, 4, 5, 6, 8):
        weight = mx.random.normal((24, 128)).astype(mx.bfloat16)
        codes, scales, biases = mx.quantize(weight, group_size=64, bits=bits)
        wide = (part.astype(mx.float32) for part in (scales, biases))
        expected = mx.dequantize(codes, *wide, group_size=64, bits=bits)
        tensors = {"m.weight": codes, "m.scales": scales, "m.biases": biases, "expected": expected}
        mx.save_safetensors(str(out / f"{bits}.safetensors"), tensors)


if sys.argv[1] == "--quantize":
    quantize(Path(sys.argv[2]))
else:
    main()
