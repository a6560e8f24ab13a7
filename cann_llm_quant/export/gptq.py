"""GPTQ's layout, as AutoGPTQ defined it and GPTQModel, transformers, vLLM and SGLang read it.

Stored tensors of a linear W [out, in] with b-bit fields q = code + 2^(b-1), zero points z = zero_point + 2^(b-1) and G
groups; both streams are little-endian in 32-bit words, so that 3-bit fields run on over the ends of words:

    qweight  int32 [in*b/32, out]    the fields of a column of `qweight` go down the input features
    qzeros   int32 [G, out*b/32]     z - 1 in version 1, z in version 2, along the output features
    scales   float16 [G, out]
    g_idx    int32 [in]              the group of each input feature
    bias     float16 [out]           where the linear has one

    W[n, k] = (q - z[g_idx[k], n]) * scales[g_idx[k], n]

A row of codes -8..7 gives the words 0x76543210 0xfedcba98; a symmetric linear of 4 bits has zero words 0x77777777 in
version 1 and 0x88888888 in version 2. Version 1 has no way to say z = 0: its readers add 1 to whole words, where the
carry of a field 15 would spoil its neighbour. `checkpoint_format` in the config tells the versions apart.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from jaxtyping import Int32, UInt8
from torch import Tensor

from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.export.gptq_config import float_in_layers, gptq_section, same_in_all_layers
from cann_llm_quant.export.layout import PackedModel
from cann_llm_quant.export.model_config import json_bytes, output_config
from cann_llm_quant.export.weight_only import (
    dense,
    half_precision,
    left_out,
    linears_only,
    nearest_bits,
    refusal,
    unread_experts,
    zero_fields,
)
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.bit_stream import BitStream, as_bytes, as_words, pack_fields, unpack_fields
from cann_llm_quant.quant.scheme import ActivationScheme, QuantizedTensor, Scheme, scheme_for

Version = Literal[1, 2]

BITS = (2, 3, 4, 8)
WORD = 32
GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)


class GptqEncoder:
    """GPTQ of one `version`; implements `layout.Encoder`.

    `act_order` lets linears have columns scattered over groups; it must be known ahead because kernels are chosen by
    it. `floats` are modules in codes that are written in float, as an embedding must be.
    """

    stem = "model"

    def __init__(self, version: Version = 1, *, act_order: bool = False, floats: frozenset[str] = frozenset()) -> None:
        self.version, self.act_order, self.floats = version, act_order, floats
        self.layout = "gptq" if version == 1 else "gptq_v2"

    def refusal(
        self, module: str, scheme: Scheme, activations: ActivationScheme | None, shape: tuple[int, int]
    ) -> str | None:
        """Why the layout cannot hold this linear; None where it can. Zero points are looked at when encoding."""
        if module in self.floats:
            return None
        if shape[0] % WORD or shape[1] % WORD:
            return f"is {shape[0]} x {shape[1]}, and GPTQ packs rows and columns in runs of {WORD}"
        if scheme.group_size is not None and scheme.group_size not in GROUP_SIZES:
            return f"has groups of {scheme.group_size}, and GPTQ's readers take {', '.join(map(str, GROUP_SIZES))}"
        return refusal("GPTQ", scheme, activations, BITS, shape[1])

    def nearest(self, scheme: Scheme, shape: tuple[int, int]) -> Scheme | None:
        """An integer scheme of at least the same width and groups as small; None for sizes that 32 does not divide."""
        if shape[0] % WORD or shape[1] % WORD:
            return None
        width = scheme.group_size or (128 if scheme.strategy == "tile" else shape[1])
        fitting = [size for size in GROUP_SIZES if size <= width and shape[1] % size == 0]
        own = scheme.strategy in ("channel", "tensor")
        return scheme_for(nearest_bits(scheme, BITS), -1 if own or not fitting else fitting[-1], scheme.symmetric)

    def check(self, model: PackedModel) -> list[str]:
        """Warnings about what only some readers load. Raises UnsupportedError for a quantized embedding."""
        warnings = left_out("GPTQ", model, self.floats)
        model = linears_only("GPTQ", model, self.floats)
        if self.version == 1 and any(not scheme.symmetric for scheme in model.schemes.values()):
            warnings.append(
                "GPTQModel itself takes asymmetric GPTQ version 1 only from its own exports, and vLLM's build for "
                "processors refuses it (transformers takes it); GPTQModel has no such limit on gptq_v2"
            )
        if len(set(model.schemes.values())) > 1:
            warnings.append("schemes differ between linears: GPTQModel, vLLM and SGLang read that, transformers not")
        elif float_in_layers(model) and same_in_all_layers(model) is None:
            warnings.append(
                "some layers have linears in float that others have in codes: GPTQModel, vLLM and SGLang read that, "
                "transformers not"
            )
        if model.arch.head_module in model.schemes:
            warnings.append(
                f"{model.arch.head_module} is in codes: GPTQModel, vLLM and SGLang read that, transformers loads a "
                "random head instead"
            )
        if any((scheme.bits, scheme.group_size) == (4, 16) for scheme in model.schemes.values()):
            warnings.append("GPTQModel's CPU kernel for 4 bits and vLLM's Marlin kernels take no groups of 16")
        mixed = next((group for group in model.fused() if len({model.schemes.get(m) for m in group}) > 1), None)
        if mixed:
            warnings.append(f"{' and '.join(mixed)} differ in scheme, and vLLM and SGLang load them as one matrix")
        return warnings + unread_experts("GPTQ", model)

    def encode(
        self, module: str, weight: QuantizedTensor, inputs: InputQuantizer | None, bias: Tensor | None
    ) -> dict[str, Tensor]:
        """The stored tensors of one linear. Raises UnsupportedError as `gptq.encode`."""
        if module in self.floats:
            return dense(module, weight, bias)
        assert inputs is None, "refused: GPTQ stores weights only"
        if weight.group_index is not None and not self.act_order:
            raise UnsupportedError(f"{module} has its columns scattered over groups; write it with act order")
        return encode(module, weight, self.version, bias)

    def plain(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The tensor as it is: norms and embeddings keep their type, as GPTQ's readers cast them themselves."""
        return {name: tensor}

    def files(self, model: PackedModel, tensors: Mapping[str, torch.dtype]) -> dict[str, bytes]:
        """`config.json` and `quantize_config.json`."""
        model = linears_only("GPTQ", model, self.floats)
        section = gptq_section(model, self.layout)
        dtype = str(model.dtype).removeprefix("torch.")
        config = output_config(model.config, model.arch, dtype, section)
        return {"config.json": json_bytes(config), "quantize_config.json": json_bytes(section)}


def encode(module: str, weight: QuantizedTensor, version: Version, bias: Tensor | None = None) -> dict[str, Tensor]:
    """The stored tensors of one linear, by full name.

    Raises UnsupportedError for a zero point that version 1 cannot say and for scales or a bias beyond float16. Rows
    and columns must be multiples of 32.
    """
    bits, (out, columns) = weight.scheme.bits, weight.shape
    tensors = {
        "qweight": as_words(weight.stream.packed).t().contiguous(),
        "qzeros": _stored_zeros(module, zero_fields(weight), bits, version),
        "scales": half_precision(f"{module}.scales", weight.scale.expand(out, -1).t().contiguous()),
        "g_idx": _group_index(weight, columns),
    }
    if bias is not None:
        tensors["bias"] = half_precision(f"{module}.bias", bias)
    return {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}


def _stored_zeros(
    module: str, zeros: UInt8[Tensor, "out groups"], bits: int, version: Version
) -> Int32[Tensor, "groups words"]:
    if version == 1:
        if not bool(zeros.all()):
            raise UnsupportedError(
                f"{module} has a group whose zero point is its smallest code, which GPTQ version 1 cannot store; "
                "export to gptq_v2"
            )
        zeros = zeros - 1
    return as_words(pack_fields(zeros.t().contiguous(), bits))


def _group_index(weight: QuantizedTensor, columns: int) -> Int32[Tensor, "columns"]:
    if weight.group_index is not None:
        return weight.group_index.to(torch.int32)
    return neighbours(columns, weight.scheme.columns_per_scale(columns))


def neighbours(columns: int, width: int) -> Int32[Tensor, "columns"]:
    """The group of each column where groups are runs of `width`."""
    return torch.arange(columns, dtype=torch.int32) // width


def decode_codes(qweight: Int32[Tensor, "words out"], bits: int) -> BitStream:
    """Codes of a stored matrix, which is transposed."""
    return BitStream(as_bytes(qweight.t()), bits)


def decode_zeros(qzeros: Int32[Tensor, "groups words"], bits: int) -> UInt8[Tensor, "out groups"]:
    """The fields of `qzeros` as they are stored, before any version is applied."""
    return unpack_fields(as_bytes(qzeros), bits).t()
