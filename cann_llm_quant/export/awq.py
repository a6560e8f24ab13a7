"""AutoAWQ's layout `gemm`, which AutoAWQ defined and transformers, vLLM and SGLang read.

Stored tensors of a linear W [out, in] with 4-bit fields q = code + 8, zero points z = zero_point + 8 and G groups:

    qweight  int32 [in, out/8]   eight neighbouring output features of one input feature
    qzeros   int32 [G, out/8]    z, packed alike
    scales   float16 [G, out]
    bias     float16 [out]       where the linear has one

    W[n, k] = (q - z[g, n]) * scales[g, n],  g = k // group size

Nibble i of a word, from the lowest, is output feature 8c + ORDER[i]; the fields 0..7 give the word 0x75316420.
Symmetric linears store z = 8 and are as asymmetric to readers as any: kernels subtract `qzeros` always, and AutoAWQ
itself writes `zero_point: true` only. The section of the config:

    {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": … (-1: a whole row), "zero_point": true,
     "modules_to_not_convert": [full names of the linears in float] | null, "sym": whether every z is 8}

One group size holds for all linears, and the output head stays in float, because loaders know nothing else.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int8, Int32, UInt8
from torch import Tensor

from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.export.layout import PackedModel
from cann_llm_quant.export.model_config import json_bytes, output_config
from cann_llm_quant.export.weight_only import (
    dense,
    half_precision,
    left_out,
    linears_only,
    refusal,
    unread_experts,
    zero_fields,
)
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.bit_stream import BitStream, as_bytes, as_words, to_codes, to_fields
from cann_llm_quant.quant.nibbles import transpose_nibbles
from cann_llm_quant.quant.scheme import ActivationScheme, QuantizedTensor, Scheme, scheme_for

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
BITS = 4
PER_WORD = 8
GROUP_SIZES = (16, 32, 64, 128)


class AwqEncoder:
    """AWQ `gemm`; implements `layout.Encoder`.

    `floats` are modules in codes that are written in float, as embedding and head must be.
    """

    layout = "awq"
    stem = "model"

    def __init__(self, *, floats: frozenset[str] = frozenset()) -> None:
        self.floats = floats

    def refusal(
        self, module: str, scheme: Scheme, activations: ActivationScheme | None, shape: tuple[int, int]
    ) -> str | None:
        """Why the layout cannot hold this linear; None where it can."""
        if module in self.floats:
            return None
        if shape[0] % PER_WORD:
            return f"has {shape[0]} rows, and AWQ packs them in runs of {PER_WORD}"
        if scheme.group_size is not None and scheme.group_size not in GROUP_SIZES:
            return f"has groups of {scheme.group_size}, and AWQ's readers take {', '.join(map(str, GROUP_SIZES))}"
        return refusal("AWQ", scheme, activations, (BITS,), shape[1])

    def nearest(self, scheme: Scheme, shape: tuple[int, int]) -> Scheme | None:
        """int4 in groups of the same size or the next smaller that fits; None for rows that 8 does not divide."""
        if shape[0] % PER_WORD:
            return None
        width = scheme.group_size or (128 if scheme.strategy == "tile" else shape[1])
        fitting = [size for size in GROUP_SIZES if size <= width and shape[1] % size == 0]
        own = scheme.strategy in ("channel", "tensor")
        return scheme_for(BITS, -1 if own or not fitting else fitting[-1], scheme.symmetric)

    def check(self, model: PackedModel) -> list[str]:
        """Warnings. Raises UnsupportedError for several group sizes, a quantized head or embedding."""
        warnings = left_out("AWQ", model, self.floats)
        model = linears_only("AWQ", model, self.floats)
        sizes = {_group_size(scheme): module for module, scheme in model.schemes.items()}
        if len(sizes) > 1:
            (one, first), (other, second) = list(sizes.items())[:2]
            raise UnsupportedError(
                f"{first} has groups of {one} and {second} of {other} (-1 is a whole row), and AWQ has one size for "
                "all; regroup them to the smaller one"
            )
        if model.arch.head_module in model.schemes:
            raise UnsupportedError(
                f"{model.arch.head_module} is quantized, and AWQ's loaders take the output head in float; leave it so"
            )
        if 16 in sizes:
            warnings.append("GPTQModel's CPU kernel and vLLM's Marlin kernels take no groups of 16")
        mixed = next((group for group in model.fused() if len({m in model.schemes for m in group}) > 1), None)
        if mixed:
            warnings.append(f"of {', '.join(mixed)} some are in float, and vLLM and SGLang load them as one matrix")
        return warnings + unread_experts("AWQ", model)

    def encode(
        self, module: str, weight: QuantizedTensor, inputs: InputQuantizer | None, bias: Tensor | None
    ) -> dict[str, Tensor]:
        """The stored tensors of one linear.

        Raises UnsupportedError for columns that are scattered over groups and for scales or a bias beyond float16.
        """
        if module in self.floats:
            return dense(module, weight, bias)
        assert inputs is None, "refused: AWQ stores weights only"
        if weight.group_index is not None:
            raise UnsupportedError(
                f"{module} has its columns scattered over groups, which AWQ cannot say; requantize it"
            )
        return encode(module, weight, bias)

    def plain(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The tensor as it is: norms and embeddings keep their type, as AWQ's readers cast them themselves."""
        return {name: tensor}

    def files(self, model: PackedModel, tensors: Mapping[str, torch.dtype]) -> dict[str, bytes]:
        """`config.json`."""
        model = linears_only("AWQ", model, self.floats)
        dtype = str(model.dtype).removeprefix("torch.")
        return {"config.json": json_bytes(output_config(model.config, model.arch, dtype, _section(model)))}


def _section(model: PackedModel) -> dict[str, Any]:
    schemes = list(model.schemes.values())
    symmetry = {scheme.symmetric for scheme in schemes}
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": BITS,
        "group_size": _group_size(schemes[0]),
        "zero_point": True,
        "modules_to_not_convert": model.float_linears() or None,
        # Where linears differ the field is left out, so that a reader looks.
        **({"sym": symmetry.pop()} if len(symmetry) == 1 else {}),
    }


def _group_size(scheme: Scheme) -> int:
    return -1 if scheme.group_size is None else scheme.group_size


def encode(module: str, weight: QuantizedTensor, bias: Tensor | None = None) -> dict[str, Tensor]:
    """The stored tensors of one linear of 4 bits by full name; 8 must divide its rows.

    Raises UnsupportedError for scales or a bias beyond float16.
    """
    tensors = {
        "qweight": _pack_matrix(weight),
        "qzeros": pack_rows(zero_fields(weight)),
        "scales": half_precision(f"{module}.scales", weight.scale.expand(weight.shape[0], -1).t().contiguous()),
    }
    if bias is not None:
        tensors["bias"] = half_precision(f"{module}.bias", bias)
    return {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}


def _pack_matrix(weight: QuantizedTensor) -> Int32[Tensor, "columns words"]:
    out, columns = weight.shape
    if columns % PER_WORD:
        return pack_rows(to_fields(weight.codes.contiguous(), BITS))
    stream = weight.stream
    packed = torch.empty(columns // PER_WORD, PER_WORD, out // PER_WORD, dtype=torch.int32, device=weight.scale.device)
    for rows in stream.blocks():
        runs = as_words(stream.packed[rows]).view(-1, PER_WORD, columns // PER_WORD)[:, ORDER]
        packed[:, :, rows.start // PER_WORD : rows.stop // PER_WORD] = transpose_nibbles(runs).permute(2, 1, 0)
    return packed.view(columns, -1)


def pack_rows(fields: UInt8[Tensor, "out columns"]) -> Int32[Tensor, "columns words"]:
    """Eight rows to a row of words, transposed."""
    runs = fields.reshape(-1, PER_WORD, fields.shape[1])
    # Byte j of a word has nibbles 2j and 2j + 1.
    planes = [runs[:, ORDER[i]] | (runs[:, ORDER[i + 1]] << BITS) for i in range(0, PER_WORD, 2)]
    words = torch.stack(planes, dim=-1).view(torch.int32).squeeze(-1)
    return words.t().contiguous()


def unpack_rows(words: Int32[Tensor, "columns words"]) -> UInt8[Tensor, "out columns"]:
    """The inverse of `pack_rows`."""
    packed = words.t().contiguous()
    fields = torch.empty(packed.shape[0], PER_WORD, packed.shape[1], dtype=torch.uint8, device=words.device)
    for place, row in enumerate(ORDER):
        # The shift brings copies of the sign from above, which the mask drops.
        fields[:, row] = (packed >> (BITS * place)).bitwise_and_(15)
    return fields.flatten(0, 1)


def decode_codes(qweight: Int32[Tensor, "columns words"]) -> BitStream | Int8[Tensor, "out columns"]:
    """The codes of a stored matrix."""
    columns, words = qweight.shape
    if columns % PER_WORD:
        return decode_zeros(qweight)
    runs = transpose_nibbles(qweight.view(-1, PER_WORD, words).permute(2, 1, 0).contiguous())
    stream = torch.empty_like(runs)
    stream[:, ORDER] = runs
    return BitStream(as_bytes(stream.view(PER_WORD * words, -1)), BITS)


def decode_zeros(qzeros: Int32[Tensor, "groups words"]) -> Int8[Tensor, "out groups"]:
    """The zero points of a stored matrix."""
    return to_codes(unpack_rows(qzeros), BITS)
