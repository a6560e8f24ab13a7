"""MLX's affine layout, which mlx-lm reads.

Stored tensors of a linear W [out, in] (or an embedding) with b-bit fields q = code + 2^(b-1) and G groups:

    weight  uint32 [out, in*b/32]   a row's fields, a little-endian stream: 3-, 5- and 6-bit fields run over word ends
    scales  [out, G]                of the model's type
    biases  [out, G]                of the model's type: -z * scale, z = zero_point + 2^(b-1)
    bias    [out]                   where the linear has one

    W[n, k] = q * scales[n, g] + biases[n, g],  g = k // group size

The product is rounded to the type of the scales. z = 2^(b-1), that of symmetric linears, only changes an exponent and
stays exact; another z moves a group by at most z * 2^-8 steps in bfloat16, z * 2^-11 in float16. The codes -8..7 give
the words 0x76543210 0xfedcba98. `config.json` has, twice, as `quantization` and `quantization_config`:

    {"group_size": 32 | 64 | 128, "bits": 2 | 3 | 4 | 5 | 6 | 8, "mode": "affine", full name: {what differs}}

Whether a linear is in float is told by its tensors. mlx-lm stacks experts when it loads them, which it does with the
scales of some families only.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.export.layout import PackedModel
from cann_llm_quant.export.model_config import json_bytes, output_config
from cann_llm_quant.export.weight_only import most_common, nearest_bits, refusal, zero_fields
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.bit_stream import as_words
from cann_llm_quant.quant.number_formats import all_finite
from cann_llm_quant.quant.scheme import ActivationScheme, QuantizedTensor, Scheme, scheme_for

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
MODE = "affine"
# Families whose experts' scales mlx-lm stacks as it does their weights.
_STACKED = ("qwen2_moe", "mixtral")


class MlxEncoder:
    """MLX affine; implements `layout.Encoder`."""

    layout = "mlx"
    stem = "model"

    def refusal(
        self, module: str, scheme: Scheme, activations: ActivationScheme | None, shape: tuple[int, int]
    ) -> str | None:
        """Why the layout cannot hold this linear; None where it can."""
        reason = refusal("MLX", scheme, activations, BITS, shape[1])
        if reason is None and scheme.group_size not in GROUP_SIZES:
            groups = "one scale a row" if scheme.group_size is None else f"groups of {scheme.group_size}"
            return f"has {groups}, and MLX has groups of 32, 64 or 128"
        return reason

    def nearest(self, scheme: Scheme, shape: tuple[int, int]) -> Scheme | None:
        """At least the same width in the widest group that fits and is no wider; None where not even 32 fits."""
        width = scheme.group_size or max(GROUP_SIZES)
        fitting = [size for size in GROUP_SIZES if size <= max(width, 32) and shape[1] % size == 0]
        return scheme_for(nearest_bits(scheme, BITS), fitting[-1], scheme.symmetric) if fitting else None

    def check(self, model: PackedModel) -> list[str]:
        """Warnings. Raises UnsupportedError for experts that mlx-lm cannot load and where nothing is quantized."""
        if not model.schemes:
            raise UnsupportedError(
                "no linear is in codes, so there is nothing to write in MLX; quantize the model first"
            )
        if any(layer.moe for layer in model.arch.layers) and model.arch.model_type not in _STACKED:
            raise UnsupportedError(
                f"mlx-lm loads no quantized experts of {model.arch.model_type} one by one; export to float and run "
                "mlx_lm.convert -q on that"
            )
        warnings = []
        widest = max((scheme.bits for scheme in model.schemes.values() if not scheme.symmetric), default=None)
        if widest is not None:
            warnings.append(
                f"MLX stores zero points as products with the scale, rounded to its type: weights move by up to "
                f"{2 ** (widest - 8):g} of a step under bfloat16 scales, {2 ** (widest - 11):g} under float16"
            )
        if model.kv.quantizes:
            warnings.append("MLX cannot say how keys and values are cached; the KV cache's format is left out")
        return warnings

    def encode(
        self, module: str, weight: QuantizedTensor, inputs: InputQuantizer | None, bias: Tensor | None
    ) -> dict[str, Tensor]:
        """The stored tensors of one linear. Raises UnsupportedError for columns that are scattered over groups."""
        assert inputs is None, "refused: MLX stores weights only"
        return encode(module, weight, bias)

    def plain(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The tensor as it is."""
        return {name: tensor}

    def files(self, model: PackedModel, tensors: Mapping[str, torch.dtype]) -> dict[str, bytes]:
        """`config.json`."""
        section = _section(model.schemes)
        dtype = str(model.dtype).removeprefix("torch.")
        config = output_config(model.config, model.arch, dtype, section) | {"quantization": section}
        return {"config.json": json_bytes(config)}


def _section(schemes: Mapping[str, Scheme]) -> dict[str, Any]:
    base = _form(most_common(dict(schemes)))
    others = {module: _form(scheme) for module, scheme in schemes.items()}
    return base | {module: form for module, form in others.items() if form != base}


def _form(scheme: Scheme) -> dict[str, Any]:
    return {"group_size": scheme.group_size, "bits": scheme.bits, "mode": MODE}


def encode(module: str, weight: QuantizedTensor, bias: Tensor | None = None) -> dict[str, Tensor]:
    """The stored tensors of one linear by full name; biases are rounded to the type of the scales.

    Raises UnsupportedError for columns that are scattered over groups and for biases beyond the type of the scales.
    """
    if weight.group_index is not None:
        raise UnsupportedError(f"{module} has its columns scattered over groups, which MLX cannot say; requantize it")
    scale = weight.scale.contiguous()
    biases = zero_fields(weight).to(torch.float32).mul_(scale.to(torch.float32)).neg_().to(scale.dtype)
    if not all_finite(biases):
        raise UnsupportedError(
            f"{module}: the product of a zero point and its scale, which MLX stores as {str(scale.dtype)[6:]}, is "
            f"beyond that under scales of up to {float(scale.abs().amax()):g}; export to another layout"
        )
    tensors = {"weight": as_words(weight.stream.packed).view(torch.uint32), "scales": scale, "biases": biases}
    if bias is not None:
        tensors["bias"] = bias
    return {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}
