"""The tensors of one quantized linear in the AscendV1 layout (msModelSlim, version 1.0.0), by type.

n outputs, k inputs, G groups a row; on the disk scales are float32 and every type has `weight_offset`, zeros where
weights are symmetric.

    type          weight                 beside it
    W8A8_DYNAMIC  int8 [n, k]            weight_scale [n, 1]
    W8A16         int8 [n, k]            weight_scale [n, 1]
    W8A8          int8 [n, k]            input_scale [1], input_offset [1], deq_scale [n], quant_bias int32 [n],
                                         weight_scale [n, 1]
    W4A8_DYNAMIC  int4 pairs [n/2, k]    weight_scale [n, 1], scale_bias [n, 1] or [n, 16];
                                         with groups weight_scale_second and weight_offset_second [n, G]
    W4A16         int4 pairs [n/2, k]    weight_scale [n, G]; without groups pairs lie along k, [n, k/2]

A pair is one byte, two's complement in both halves, the even row (column) in the low one: codes -8, 7 give 0x78.

    W8A16, W4A16    w = (code - weight_offset) * weight_scale
    W4A8_DYNAMIC    w = code * weight_scale_second * weight_scale; we write weight_scale 1 beside groups, so that their
                    scales are stored as they are. scale_bias = 8 * sum_k w, of row-parallel linears in 16 slices of k
    W8A8            see ascend_static.py

(Sources: msModelSlim 26.1.0 and what vllm-ascend 0.23 computes from its files.)
"""

import math
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.export.ascend_static import check_static, deq_scale_of, encode_static
from cann_llm_quant.export.ascend_sums import matrix_sums
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.nibbles import zip_nibbles
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme, row_scales

AscendType = Literal["W8A8", "W8A8_DYNAMIC", "W8A16", "W4A8_DYNAMIC", "W4A16"]
TYPES: tuple[AscendType, ...] = get_args(AscendType)
SUFFIXES = (
    "weight",
    "weight_scale",
    "weight_offset",
    "weight_scale_second",
    "weight_offset_second",
    "scale_bias",
    "input_scale",
    "input_offset",
    "deq_scale",
    "quant_bias",
)
ROW_SLICES = 16
_SIGNS = 0x88  # turns a byte of two fields, code + 8, into one of two codes


def encode_linear(
    module: str,
    kind: AscendType,
    weight: QuantizedTensor,
    inputs: InputQuantizer | None,
    bias: Tensor | None,
    *,
    dtype: torch.dtype,
    slices: int = 1,
) -> dict[str, Tensor]:
    """The stored tensors of a linear as `kind`, by full name, its float bias included.

    `dtype` is the model's, `slices` how many parts `scale_bias` is summed in. Raises CheckpointError for scales that
    are not finite, UnsupportedError for a bias that `quant_bias` cannot hold and for scattered groups.
    """
    if weight.group_index is not None and weight.scale.shape[1] > 1:
        raise UnsupportedError(
            f"{module}: its groups are scattered over columns (g_idx), which ascend cannot store; use --requantize"
        )
    scale = weight.scale.to(torch.float32).expand(weight.shape[0], -1).contiguous()
    if not bool(scale.isfinite().all()):
        raise CheckpointError(f"{module}: weight_scale holds NaN or infinity; the source is damaged")
    if kind == "W4A8_DYNAMIC":
        tensors = _encode_w4a8(weight, scale, slices)
    else:
        tensors = {"weight": _packed(weight, kind), "weight_scale": scale}
        tensors["weight_offset"] = _offset(weight, scale)
    if kind == "W8A8":
        tensors |= encode_static(module, weight.codes, scale, inputs, bias, dtype)
    if bias is not None:
        tensors["bias"] = bias
    return {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}


def decode_linear(
    module: str, kind: AscendType, tensors: Mapping[str, Tensor], scheme: Scheme, *, packed: bool = True
) -> QuantizedTensor:
    """The linear that these tensors, by suffix, store as `kind`; `packed` is false for files older than version 1.0.0.

    The caller has checked their shapes. Raises CheckpointError where their values contradict each other.
    """
    codes = tensors["weight"]
    if packed and kind in ("W4A8_DYNAMIC", "W4A16"):
        codes = unpack_rows(codes) if 2 * len(codes) == len(tensors["weight_scale"]) else unpack_columns(codes)
    if int(codes.min()) < scheme.qmin or int(codes.max()) > scheme.qmax:
        raise CheckpointError(f"{module}: weight holds codes beyond {scheme.dtype}; the file is damaged")
    scale = _decoded_scale(tensors)
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise CheckpointError(f"{module}: weight_scale is not positive and finite everywhere; the file is damaged")
    zero_point = None if scheme.symmetric else tensors["weight_offset"].to(torch.int8)
    if kind == "W8A8":
        check_static(module, codes, scale, tensors)
    return QuantizedTensor(codes, scale, zero_point, scheme)


def pack_rows(codes: Int8[Tensor, "out in"]) -> Int8[Tensor, "half in"]:
    """Two int4 codes a byte, even rows in the low halves; `out` must be even."""
    return (codes[0::2] & 15) | (codes[1::2] << 4)


def unpack_rows(packed: Int8[Tensor, "half in"]) -> Int8[Tensor, "out in"]:
    """The codes of `pack_rows`' bytes."""
    codes = torch.empty(2 * packed.shape[0], packed.shape[1], dtype=torch.int8)
    codes[0::2] = (packed << 4) >> 4
    codes[1::2] = packed >> 4
    return codes


def pack_columns(codes: Int8[Tensor, "out in"]) -> Int8[Tensor, "out half"]:
    """Two int4 codes a byte, even columns in the low halves; `in` must be even."""
    return (codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)


def unpack_columns(packed: Int8[Tensor, "out half"]) -> Int8[Tensor, "out in"]:
    """The codes of `pack_columns`' bytes."""
    return torch.stack([(packed << 4) >> 4, packed >> 4], dim=-1).flatten(1)


def _packed(weight: QuantizedTensor, kind: AscendType) -> Tensor:
    if kind != "W4A16":
        return weight.codes.contiguous()
    return _row_pairs(weight) if weight.scheme.strategy == "group" else pack_columns(weight.codes)


def _row_pairs(weight: QuantizedTensor) -> Int8[Tensor, "half in"]:
    """`pack_rows` of the codes, from their stream where that has 4 bits and whole words."""
    out, columns = weight.shape
    if weight.scheme.bits != 4 or columns % 8:
        return pack_rows(weight.codes)
    pairs = torch.empty(out // 2, columns, dtype=torch.uint8)
    for rows in weight.stream.blocks():
        packed = weight.stream.packed[rows]
        pairs[rows.start // 2 : rows.stop // 2] = zip_nibbles(packed[0::2], packed[1::2]).bitwise_xor_(_SIGNS)
    return pairs.view(torch.int8)


def _offset(weight: QuantizedTensor, scale: Tensor) -> Tensor:
    if weight.zero_point is None:
        return torch.zeros_like(scale)
    return weight.zero_point.to(torch.float32).expand(scale.shape).contiguous()


def _encode_w4a8(weight: QuantizedTensor, scale: Float[Tensor, "out groups"], slices: int) -> dict[str, Tensor]:
    zeros = torch.zeros(len(scale), 1)
    tensors = {"weight": _row_pairs(weight), "weight_offset": zeros}
    if weight.scheme.strategy == "group":
        tensors["weight_scale"] = torch.ones_like(zeros)
        tensors |= {"weight_scale_second": scale, "weight_offset_second": torch.zeros_like(scale)}
    else:
        tensors["weight_scale"] = scale
    tensors["scale_bias"] = scale_bias(weight, slices)
    return tensors


def scale_bias(weight: QuantizedTensor, slices: int) -> Float[Tensor, "out slices"]:
    """`8 * sum_k w` over each of `slices` parts of the columns, float32: what undoes kernels that read codes + 8.

    Parts are as equal as they can be; with 16, ranks of any tensor parallel size up to 16 find theirs.
    """
    out, columns = weight.shape
    width = weight.scheme.columns_per_scale(columns)
    # the widest runs of columns that lie within one group and one part
    run = 1 if columns % slices else math.gcd(width, columns // slices)
    sums = matrix_sums(weight, run) * row_scales(weight.scale, weight.scheme, out).repeat_interleave(
        width // run, dim=1
    )
    return torch.stack([part.sum(1) for part in sums.tensor_split(slices, dim=1)], dim=1).mul_(8)


def _decoded_scale(tensors: Mapping[str, Tensor]) -> Float[Tensor, "out groups"]:
    if "weight_scale" not in tensors:
        return (deq_scale_of(tensors) / tensors["input_scale"].to(torch.float32)).view(-1, 1)
    scale = tensors["weight_scale"].to(torch.float32)
    second = tensors.get("weight_scale_second")
    return scale if second is None else scale * second.to(torch.float32)
