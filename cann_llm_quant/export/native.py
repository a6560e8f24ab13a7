"""The native layouts: those of compressed-tensors, which transformers, vLLM and SGLang read as well.

Stored tensors of a linear W [out, in] with G groups a row (source: the compressed-tensors formats, checked against its
own reader). Every layout has `<module>.weight_scale`, `[out, G]`, `[out, 1]` per channel, `[1]` per tensor,
`[ceil(out/128), ceil(in/128)]` for tiles; a float type unless stated.

    pack-quantized        weight_packed int32 [out, ceil(in*b/32)]  a row's codes + 2^(b-1), a little-endian stream
      int2 … int8         weight_zero_point int32 [ceil(out*b/32), G]  asymmetric only; packed alike, along the rows
                          weight_shape int64 [2]
    int-quantized         weight int8 [out, in], weight_zero_point int8 like the scale (asymmetric only)
      int8 with int8 activations
    float-quantized       weight float8_e4m3fn [out, in]
    mxfp8-quantized       weight float8_e4m3fn [out, in]; the scale is uint8, 2^(byte - 127)
    mxfp4-pack-quantized  weight_packed uint8 [out, in/2], even columns in the low nibbles; the scale as above
    nvfp4-pack-quantized  weight_packed as above; the scale is float8_e4m3fn, to be divided by weight_global_scale
                          float32 [1]

An embedding is `int-quantized` although its input is no activation: transformers initializes embeddings through their
`weight` and fails where it is packed. A head that is tied to it reads the same `weight` with a `weight_scale` of its
own, equal to the embedding's, because transformers ties no scales.

One scale per tensor is written as one per row in `pack-quantized`, whose readers know no other.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.export.weight_only import finite
from cann_llm_quant.quant.bit_stream import BitStream, as_bytes, as_words
from cann_llm_quant.quant.pack import pack_int32, pack_pairs, packed_length, unpack_int32, unpack_pairs
from cann_llm_quant.quant.ranges import SCALE_DTYPES
from cann_llm_quant.quant.scheme import ActivationScheme, QuantizedTensor, Scheme

Layout = Literal[
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "mxfp8-quantized",
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
]
WEIGHT_SUFFIXES = (
    "weight_packed",
    "weight",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_global_scale",
)
INPUT_SUFFIXES = ("input_scale", "input_zero_point", "input_global_scale")


def layout_of(scheme: Scheme, activations: ActivationScheme | None = None, *, table: bool = False) -> Layout:
    """The layout for weights of this scheme whose inputs are quantized so; `table` is for embeddings.

    Integers below 8 bits stay packed beside quantized inputs: `int-quantized` would store each in a whole byte.
    """
    if scheme.is_integer:
        return "int-quantized" if scheme.bits == 8 and (table or activations is not None) else "pack-quantized"
    if scheme.scale_type == "float":
        return "float-quantized"
    if scheme.scale_type == "e4m3":
        return "nvfp4-pack-quantized"
    return "mxfp8-quantized" if scheme.bits == 8 else "mxfp4-pack-quantized"


def stored_scheme(scheme: Scheme, layout: Layout) -> Scheme:
    """The scheme as the files show it: one scale per tensor is one per row in `pack-quantized`."""
    if layout == "pack-quantized" and scheme.strategy == "tensor":
        return Scheme(scheme.dtype, scheme.symmetric, "channel", None)
    return scheme


def encode(module: str, weight: QuantizedTensor, activations: ActivationScheme | None = None) -> dict[str, Tensor]:
    """The stored tensors of one quantized linear, by full name; `activations` is how its input is quantized."""
    return _encode(module, weight, layout_of(weight.scheme, activations))


def encode_table(readers: Sequence[str], weight: QuantizedTensor) -> dict[str, Tensor]:
    """The stored tensors of a quantized embedding, the first of `readers`, which the others are tied to."""
    tensors = _encode(readers[0], weight, layout_of(weight.scheme, table=True))
    return tensors | {f"{reader}.weight_scale": _stored_scale(weight).clone() for reader in readers[1:]}


def _encode(module: str, weight: QuantizedTensor, layout: Layout) -> dict[str, Tensor]:
    if layout == "pack-quantized":
        tensors = _encode_packed(weight)
    else:
        tensors = {"weight_scale": _stored_scale(weight)}
        fp4 = weight.scheme.dtype == "fp4_e2m1"
        tensors["weight_packed" if fp4 else "weight"] = pack_pairs(weight.codes) if fp4 else weight.codes.contiguous()
        if weight.zero_point is not None:
            tensors["weight_zero_point"] = weight.zero_point.view(tensors["weight_scale"].shape).contiguous()
        if weight.global_scale is not None:
            tensors["weight_global_scale"] = weight.global_scale.view(1)
    return {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}


def _encode_packed(weight: QuantizedTensor) -> dict[str, Tensor]:
    bits, (out, columns) = weight.scheme.bits, weight.shape
    tensors = {
        "weight_packed": as_words(weight.stream.packed) if _whole(columns) else pack_int32(weight.codes, bits, dim=1),
        "weight_scale": weight.scale.expand(out, -1).contiguous(),
        "weight_shape": torch.tensor([out, columns], dtype=torch.int64),
    }
    if weight.zero_point is not None:
        tensors["weight_zero_point"] = pack_int32(weight.zero_point.expand(out, -1), bits, dim=0)
    return tensors


def _stored_scale(weight: QuantizedTensor) -> Tensor:
    scale, divisor = weight.scale, weight.global_scale
    if weight.scheme.scale_type == "e8m0":
        stored = scale.to(torch.float8_e8m0fnu)
        assert torch.equal(stored.to(torch.float32), scale), "scales are no powers of two"
        return stored.view(torch.uint8)
    if divisor is not None:
        stored = (scale * divisor).to(torch.float8_e4m3fn)
        assert torch.equal(stored.to(torch.float32) / divisor, scale), "scales were not rounded under the global scale"
        return stored
    return scale.view(1) if weight.scheme.strategy == "tensor" else scale.contiguous()


def decode(module: str, tensors: Mapping[str, Tensor], scheme: Scheme) -> QuantizedTensor:
    """The quantized linear that these tensors store in `scheme`.

    Raises CheckpointError when a tensor is absent, of the wrong type or shape, or holds NaN.
    """
    if scheme.is_integer and f"{module}.weight" not in tensors:
        return _decode_packed(module, tensors, stored_scheme(scheme, "pack-quantized"))
    if scheme.dtype == "fp4_e2m1":
        codes = unpack_pairs(_tensor(module, tensors, "weight_packed", torch.uint8))
    else:
        codes = _tensor(module, tensors, "weight", torch.int8 if scheme.is_integer else torch.float8_e4m3fn)
    shape = _scale_shape(module, scheme, codes.shape)
    scale, divisor = _loaded_scale(module, tensors, scheme, shape)
    if scheme.dtype == "fp8_e4m3" and bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise CheckpointError(f"{module}: weight holds NaN; the file is damaged")
    zeros = None
    if not scheme.symmetric:
        zeros = _tensor(module, tensors, "weight_zero_point", torch.int8)
        zeros = _shaped(module, "weight_zero_point", zeros, shape)
    return QuantizedTensor(codes, scale, zeros, scheme, divisor)


@contextmanager
def read_from(path: Path) -> Iterator[None]:
    """Let a CheckpointError of the block inside begin with the folder that the tensors are from."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _decode_packed(module: str, tensors: Mapping[str, Tensor], scheme: Scheme) -> QuantizedTensor:
    packed = _tensor(module, tensors, "weight_packed", torch.int32)
    shape = _tensor(module, tensors, "weight_shape", torch.int64)
    if shape.shape != (2,):
        raise CheckpointError(f"{module}: weight_shape must hold two numbers, rows and columns")
    out, columns = (int(n) for n in shape.tolist())
    bits = scheme.bits
    packed = _shaped(module, "weight_packed", packed, (out, packed_length(columns, bits)))
    groups = _scale_shape(module, scheme, (out, columns))[1]
    scale = _tensor(module, tensors, "weight_scale", None)
    scale = _finite(module, _shaped(module, "weight_scale", scale, (out, groups)))
    zeros = None
    if not scheme.symmetric:
        stored = _tensor(module, tensors, "weight_zero_point", torch.int32)
        stored = _shaped(module, "weight_zero_point", stored, (packed_length(out, bits), groups))
        zeros = unpack_int32(stored, bits, out, dim=0)
    codes = BitStream(as_bytes(packed), bits) if _whole(columns) else unpack_int32(packed, bits, columns, dim=1)
    return QuantizedTensor(codes, scale, zeros, scheme)


def _whole(columns: int) -> bool:
    """Whether a row ends where a word does, whatever the bits."""
    return columns % 32 == 0


def _loaded_scale(
    module: str, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]
) -> tuple[Tensor, Tensor | None]:
    """Scales as `QuantizedTensor` has them, and the divisor that NVFP4 stores beside them."""
    kinds = {"e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}
    stored = _tensor(module, tensors, "weight_scale", kinds.get(scheme.scale_type))
    stored = _shaped(module, "weight_scale", stored, shape)
    if scheme.scale_type == "float":
        return _finite(module, stored), None
    if scheme.scale_type == "e8m0":
        return _finite(module, stored.view(torch.float8_e8m0fnu).to(torch.float32)), None
    divisor = _tensor(module, tensors, "weight_global_scale", torch.float32)
    divisor = _shaped(module, "weight_global_scale", divisor, (1, 1)).reshape(())
    return _finite(module, stored.to(torch.float32) / divisor), divisor


def _finite(module: str, scale: Tensor) -> Tensor:
    return finite(f"{module}.weight_scale", scale)


def _tensor(module: str, tensors: Mapping[str, Tensor], suffix: str, dtype: torch.dtype | None) -> Tensor:
    """One stored tensor, of `dtype` (None: one of those that scales have)."""
    tensor = tensors.get(f"{module}.{suffix}")
    if tensor is None:
        raise CheckpointError(f"{module}: tensor {module}.{suffix} is missing; the linear cannot be read")
    if tensor.dtype != dtype and (dtype is not None or tensor.dtype not in SCALE_DTYPES):
        expected = dtype or "a float type of 16 or 32 bits"
        raise CheckpointError(f"{module}: {suffix} is {tensor.dtype}, expected {expected}")
    return tensor


def _scale_shape(module: str, scheme: Scheme, shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of the scales of a matrix of this shape."""
    if len(shape) != 2 or shape[1] % (scheme.group_size or 1):
        raise CheckpointError(f"{module}: scheme {scheme.label()} does not fit a weight of {list(shape)}")
    return scheme.scale_shape(shape[0], shape[1])


def _shaped(module: str, suffix: str, tensor: Tensor, shape: tuple[int, int]) -> Tensor:
    """The tensor in this shape; one number may be stored as `[]` or `[1]`."""
    if tuple(tensor.shape) == shape:
        return tensor
    if shape == (1, 1) and tensor.numel() == 1:
        return tensor.reshape(shape)
    raise CheckpointError(f"{module}: {suffix} is {list(tensor.shape)}, expected {list(shape)}")
