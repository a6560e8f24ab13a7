"""GGUF's blocks of 32 columns, in bytes, from and to `QuantizedTensor`.

    type   bytes  layout                         weight          codes
    Q4_0   18     d | 16 nibbles-bytes           d (q - 8)       int4 and narrower, symmetric
    Q4_1   20     d m | 16 nibble-bytes          d q + m         int4 and narrower, asymmetric
    Q5_0   22     d | 4 fifth bits | 16          d (q - 16)      int5, symmetric
    Q5_1   24     d m | 4 fifth bits | 16        d q + m         int5, asymmetric
    Q8_0   34     d | 32 int8                    d q             int8 and int6, symmetric
    MXFP4  17     e | 16 nibble-bytes            2^(e-127) q     fp4_e2m1 with e8m0 scales (MXFP4)

d and m are float16; q is the signed code plus half its range; nibble-byte j holds q[j] below and q[j + 16] above; bit i
of the fifth bits, little-endian, belongs to q[i]. A scale of more than 32 columns is repeated. With a zero point
z, m = -(z + half) d rounded to float16: off by at most 2^-11 of itself, 0.8 % of a step for four bits and 1.6 % for
five. Codes, zero points and scales that float16 holds come back bit for bit.
Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from jaxtyping import Float, Float16, Int8, UInt8
from torch import Tensor

from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.quant.bit_stream import BitStream
from cann_llm_quant.quant.nibbles import unzip_nibbles, zip_nibbles
from cann_llm_quant.quant.number_formats import all_finite
from cann_llm_quant.quant.scheme import MXFP4, QuantizedTensor, Scheme, row_scales

BLOCK = 32
SCHEMES: dict[Kind, Scheme] = {
    Kind.Q4_0: Scheme("int4", True, "group", BLOCK),
    Kind.Q4_1: Scheme("int4", False, "group", BLOCK),
    Kind.Q5_0: Scheme("int5", True, "group", BLOCK),
    Kind.Q5_1: Scheme("int5", False, "group", BLOCK),
    Kind.Q8_0: Scheme("int8", True, "group", BLOCK),
    Kind.MXFP4: MXFP4,
}
_KINDS: dict[tuple[str, bool], Kind] = {
    **{(name, True): Kind.Q4_0 for name in ("int2", "int3", "int4")},
    **{(name, False): Kind.Q4_1 for name in ("int2", "int3", "int4")},
    ("int5", True): Kind.Q5_0,
    ("int5", False): Kind.Q5_1,
    ("int6", True): Kind.Q8_0,
    ("int8", True): Kind.Q8_0,
}


def kind_of(scheme: Scheme) -> Kind | None:
    """The block type that holds codes of this scheme exactly, None where there is none."""
    if scheme.scale_type != "float":
        return Kind.MXFP4 if scheme == MXFP4 else None
    if scheme.strategy == "tile" or (scheme.group_size or BLOCK) % BLOCK:
        return None
    return _KINDS.get((scheme.dtype, scheme.symmetric))


def encode(module: str, weight: QuantizedTensor) -> UInt8[Tensor, "out bytes"]:
    """A matrix's rows of blocks. `kind_of` its scheme must not be None, and 32 must divide its columns.

    Raises UnsupportedError for groups that are scattered over columns, CheckpointError for a scale that float16 cannot
    hold.
    """
    kind = kind_of(weight.scheme)
    out, columns = weight.shape
    assert kind is not None, "refused beforehand"
    if weight.group_index is not None:
        raise UnsupportedError(
            f"{module}: its groups are scattered over the columns (act-order), which GGUF cannot say; add --requantize"
        )
    blocks = columns // BLOCK
    parts = _scale_bytes(module, weight, kind)
    if kind is Kind.Q8_0:
        return torch.cat([*parts, weight.codes.view(torch.uint8).view(out, blocks, BLOCK)], dim=-1).view(out, -1)
    if kind in (Kind.Q4_0, Kind.Q4_1) and weight.scheme.bits == 4:
        packed = weight.stream.packed.view(out, blocks, BLOCK // 2)
        parts.append(zip_nibbles(packed[..., : BLOCK // 4], packed[..., BLOCK // 4 :]))
        joined = torch.cat([part.view(torch.int16) for part in parts], dim=-1)  # in half as many steps as bytes
        return joined.view(torch.uint8).view(out, -1)
    half = 0 if kind is Kind.MXFP4 else 1 << (SCHEMES[kind].bits - 1)
    fields = (weight.codes + half).view(torch.uint8).view(out, blocks, BLOCK)
    if SCHEMES[kind].bits == 5:
        parts.append(_pack_bits(fields.view(out, blocks, 4, 8) >> 4))
        fields = fields & 15
    words = fields.view(torch.int64)  # eight fields at once: none reaches into its neighbour
    parts.append((words[..., :2] | (words[..., 2:] << 4)).view(torch.uint8))
    return torch.cat(parts, dim=-1).view(out, -1)


def decode(module: str, data: UInt8[Tensor, "out bytes"], kind: Kind) -> QuantizedTensor:
    """The matrix that rows of blocks store, in groups of 32 columns.

    Raises CheckpointError for scales that are not finite, and for a Q4_1 or Q5_1 block whose m is no whole number of
    steps (`whole_steps` tells).
    """
    scheme = SCHEMES[kind]
    rows = data.view(len(data), -1, GGML_QUANT_SIZES[kind][1])
    if kind is Kind.MXFP4:
        if bool((rows[..., 0] == 255).any()):
            raise CheckpointError(f"{module}: a block's scale is NaN; the file is damaged")
        scale = rows[..., 0].contiguous().view(torch.float8_e8m0fnu).to(torch.float32)
        return QuantizedTensor(_nibbles(rows[..., 1:]).view(torch.int8), scale, None, scheme)
    scale = _halves(rows, 0)
    _check_finite(module, scale)
    if kind is Kind.Q8_0:
        codes = rows[..., 2:].reshape(len(data), -1).view(torch.int8)
        return QuantizedTensor(codes, scale, None, scheme)
    zeros = None
    if not scheme.symmetric:
        zeros = zero_points(scale, _halves(rows, 2), scheme.bits)
        if zeros is None:
            raise CheckpointError(f"{module}: {kind.name} blocks whose minimum is no whole number of steps")
    if scheme.bits == 4:
        packed = torch.cat(unzip_nibbles(rows[..., -BLOCK // 2 :]), dim=-1).view(len(data), -1)
        return QuantizedTensor(BitStream(packed, 4), scale, zeros, scheme)
    fields = _nibbles(rows[..., -BLOCK // 2 :])
    at = 2 if scheme.symmetric else 4
    fields |= _unpack_bits(rows[..., at : at + 4]).reshape(fields.shape) << 4
    return QuantizedTensor(fields.view(torch.int8) - (1 << (scheme.bits - 1)), scale, zeros, scheme)


def whole_steps(data: UInt8[Tensor, "out bytes"], kind: Kind) -> bool:
    """Whether every block of Q4_1 or Q5_1 rows has a zero point: m = -n d within float16, for a whole n."""
    rows = data.view(len(data), -1, GGML_QUANT_SIZES[kind][1])
    return zero_points(_halves(rows, 0), _halves(rows, 2), SCHEMES[kind].bits) is not None


def zero_points(
    d: Float16[Tensor, "out groups"], m: Float16[Tensor, "out groups"], bits: int
) -> Int8[Tensor, "out groups"] | None:
    """The signed zero points that minima `m` stand for, None where one is not -n d (in float16), 0 <= n < 2^bits."""
    wide = d.to(torch.float32)
    steps = torch.where(wide == 0, 0, -m.to(torch.float32) / wide).round().clamp_(0, (1 << bits) - 1)
    if not bool(steps.isfinite().all()) or not bool(((-steps * wide).to(torch.float16) == m).all()):
        return None
    return (steps - (1 << (bits - 1))).to(torch.int8)


def _scale_bytes(module: str, weight: QuantizedTensor, kind: Kind) -> list[UInt8[Tensor, "out blocks bytes"]]:
    """What precedes the codes of each block."""
    out, columns = weight.shape
    repeats = weight.scheme.columns_per_scale(columns) // BLOCK
    if kind is Kind.MXFP4:
        return [weight.scale.to(torch.float8_e8m0fnu).view(torch.uint8).unsqueeze(-1)]
    d = row_scales(weight.scale, weight.scheme, out).to(torch.float16)
    values = [d]
    if weight.zero_point is not None:
        steps = weight.zero_point.to(torch.float32).expand(out, -1) + (1 << (SCHEMES[kind].bits - 1))
        values.append((-steps * d.to(torch.float32)).to(torch.float16))
    for value in values:
        _check_finite(module, value)
    return [value.repeat_interleave(repeats, dim=1).unsqueeze(-1).view(torch.uint8) for value in values]


def _halves(rows: UInt8[Tensor, "out blocks bytes"], at: int) -> Float16[Tensor, "out blocks"]:
    return rows[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(body: UInt8[Tensor, "out blocks half"]) -> UInt8[Tensor, "out in"]:
    words = body.clone(memory_format=torch.contiguous_format).view(torch.int64)  # at an address that int64 may have
    low = 0x0F0F0F0F0F0F0F0F
    return torch.cat([words & low, (words >> 4) & low], dim=-1).view(torch.uint8).view(len(body), -1)


def _pack_bits(bits: UInt8[Tensor, "out blocks bytes eight"]) -> UInt8[Tensor, "out blocks bytes"]:
    shifts = torch.arange(8, dtype=torch.uint8)
    return (bits << shifts).sum(dim=-1, dtype=torch.uint8)


def _unpack_bits(packed: UInt8[Tensor, "out blocks bytes"]) -> UInt8[Tensor, "out blocks bytes eight"]:
    return (packed[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1


def _check_finite(module: str, scale: Float[Tensor, "..."]) -> None:
    if not all_finite(scale):
        raise CheckpointError(
            f"{module}: a scale is NaN or larger than float16 holds, the type of GGUF's scales; quantize it again"
        )
