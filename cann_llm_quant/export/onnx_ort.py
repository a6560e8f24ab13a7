"""Quantized weights for ONNX Runtime.

    form      operator                  stored                                        used for
    nbits     com.microsoft             B uint8 [out, blocks, block * b / 8],         groups that blocks of 16, 32, …
              MatMulNBits               scales [out, blocks], zero points             256 columns divide
    blocks    DequantizeLinear, Gemm    int4 or int8 [out, in], scales [out, groups]  all other groups
    float8    the same                  float8 [out, in], scales [out, groups]        fp8_e4m3
    integers  MatMulInteger             uint8 [in, out], one zero point of 128        int8 rows by int8 inputs

Fields of `nbits` are `code + 2^(b-1)`, lowest bits first along a row, b in 2, 4 and 8; its zero points have the same
offset and are packed along the blocks. A group becomes the blocks that it divides into, each with the group's scale, so
that nothing is rounded: a row of its own scale has blocks of up to 256. Codes of 3 bits lie in 4, those of 5 and 6 in
8, fp4's values doubled in 8. DequantizeLinear has blocks since version 21 of the standard operators. (The operators'
documentation: ONNX Runtime's docs/ContribOperators.md, ONNX's docs/Operators.md.)

Both sides of MatMulInteger are unsigned: signed ones saturate in 16 bits on x86 processors without VNNI.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int8, UInt8
from torch import Tensor
from torch.nn import functional

from cann_llm_quant.export import onnx_inputs
from cann_llm_quant.export.layout import PackedModel
from cann_llm_quant.export.onnx_dialect import (
    StoredMatrix,
    as_integers,
    by_group,
    describe_linear,
    power_of_two_part,
)
from cann_llm_quant.export.onnx_graph import Graph
from cann_llm_quant.export.onnx_inputs import WIDE, QuantizedNodes
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.bit_stream import pack_fields, to_fields
from cann_llm_quant.quant.scheme import (
    ActivationScheme,
    QuantizedTensor,
    Scheme,
    row_scales,
)

CONTRIB = "com.microsoft"
SMALLEST_BLOCK = 16


@dataclass(frozen=True)
class OrtDialect:
    """ONNX Runtime, on any of its devices.

    `accuracy` is MatMulNBits' `accuracy_level`: 1 multiplies in float32, 4 rounds inputs to int8 on the way, which is
    faster and no longer exact. Without `contrib` all operators are standard ones, for runtimes that know no others.
    """

    accuracy: int = 1
    contrib: bool = True
    layout: str = "onnx"
    name: str = "ort"
    opset: int = 21
    dtypes: tuple[str, ...] = ("fp32", "fp16")
    routes_experts: bool = True

    def refusal(
        self, module: str, scheme: Scheme, activations: ActivationScheme | None, shape: tuple[int, int]
    ) -> str | None:
        """Every scheme can be held."""
        return None

    def nearest(self, scheme: Scheme, shape: tuple[int, int]) -> Scheme | None:
        """None is needed."""
        return None

    def check(self, model: PackedModel) -> list[str]:
        """Types that become wider or slow, inputs that stay in float."""
        found = []
        types = {scheme.dtype for scheme in model.schemes.values()}
        if "fp4_e2m1" in types:
            found.append("fp4 codes take 8 bits: ONNX Runtime multiplies by integers")
        if "fp8_e4m3" in types:
            found.append("float8 weights are dequantized whole in every step: ONNX Runtime does not multiply by them")
        wider = sorted({scheme.bits for scheme in model.schemes.values() if scheme.is_integer} & {3, 5, 6})
        if wider:
            held = ", ".join(f"{bits}-bit codes take {_stored_bits(bits)} bits" for bits in wider)
            found.append(f"{held}: ONNX Runtime multiplies by 2, 4 and 8 bits only")
        if any(not onnx_inputs.is_expressible(scheme) for scheme in model.activations.values()):
            found.append("inputs that the source rounds to small floats stay in float: ONNX has no operator for it")
        return found

    def store(
        self,
        graph: Graph,
        name: str,
        weight: QuantizedTensor,
        dtype: torch.dtype,
        *,
        inputs: InputQuantizer | None = None,
        table: bool = False,
    ) -> StoredMatrix:
        """As `integers` or `nbits`; as `blocks` where no block fits or no contributed operator may be used."""
        weight, order = by_group(as_integers(weight))
        if inputs is not None and _multiplies_integers(weight, inputs):
            return _store_integers(graph, name, weight, sums=not inputs.scheme.symmetric)
        columns = "" if order is None else graph.constant(f"{name}.columns", order)
        width = weight.scheme.columns_per_scale(weight.shape[1])
        block = _block_of(weight.scheme, width)
        if self.contrib and block >= SMALLEST_BLOCK and weight.scheme.is_integer:
            return _store_nbits(graph, name, weight, block, dtype, columns)
        bits = 4 if weight.scheme.bits <= 4 and not table else 8
        return _store_blocks(graph, name, weight, width, bits, dtype, columns)

    def product(
        self,
        graph: Graph,
        x: str,
        matrix: StoredMatrix,
        inputs: InputQuantizer | None,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> str:
        """`x @ matrixᵀ + bias`; inputs are quantized first where an integer scheme says so."""
        if inputs is not None and onnx_inputs.is_expressible(inputs.scheme):
            quantized = onnx_inputs.quantize(graph, graph.cast(x, WIDE), inputs, matrix.shape[1])
            if matrix.form == "integers":
                return _multiply_integers(graph, quantized, matrix, bias, dtype)
            x = graph.cast(onnx_inputs.dequantize(graph, quantized, matrix.shape[1]), dtype)
        if matrix.columns:
            x = graph.op("Gather", x, matrix.columns, axis=1)
        if matrix.form == "nbits":
            y = self._multiply_nbits(graph, x, matrix, dtype)
        else:
            y = graph.op("Gemm", x, _dequantized(graph, matrix), transB=1)
        return y if bias is None else graph.op("Add", y, graph.constant(f"{matrix.name}.bias", bias, dtype))

    def _multiply_nbits(self, graph: Graph, x: str, matrix: StoredMatrix, dtype: torch.dtype) -> str:
        out, columns = matrix.shape
        names = [matrix.parts[part] for part in ("codes", "scales", "zero_points") if part in matrix.parts]
        sizes = {"K": columns, "N": out, "bits": matrix.bits, "block_size": matrix.group}
        y = graph.op("MatMulNBits", x, *names, domain=CONTRIB, accuracy_level=self.accuracy, **sizes)
        return describe_linear(graph, y, matrix, dtype)

    def lookup(self, graph: Graph, ids: str, matrix: StoredMatrix, dtype: torch.dtype) -> str:
        """Gathered codes less their zero points, times their scales, without what fills the last block."""
        if matrix.form == "float8":
            return graph.op("Gather", _dequantized(graph, matrix), ids)
        found = {part: graph.op("Gather", name, ids) for part, name in matrix.parts.items()}
        codes = graph.cast(found["codes"], WIDE)
        if matrix.form == "nbits":
            codes = _unpacked(graph, codes, matrix.bits)
        groups = -(-matrix.shape[1] // matrix.group)
        codes = graph.op("Reshape", codes, graph.integers(0, groups, -1))
        scales = graph.op("Unsqueeze", graph.cast(found["scales"], WIDE), graph.integers(2))
        zeros = self._zero_points(graph, found.get("zero_points"), matrix, groups)
        if zeros is not None:
            codes = graph.op("Sub", codes, zeros)
        rows = graph.op("Reshape", graph.op("Mul", codes, scales), graph.integers(0, -1))
        kept = graph.op("Slice", rows, graph.integers(0), graph.integers(matrix.shape[1]), graph.integers(1))
        return graph.cast(kept, dtype)

    def _zero_points(self, graph: Graph, stored: str | None, matrix: StoredMatrix, groups: int) -> str | None:
        """Gathered zero points as [tokens, groups, 1], with the codes' offset; None where they are 0 and it is, too."""
        if stored is None:
            return graph.scalar(float(1 << (matrix.bits - 1)), WIDE) if matrix.form == "nbits" else None
        zeros = graph.cast(stored, WIDE)
        if matrix.form == "nbits":
            zeros = _unpacked(graph, zeros, matrix.bits)
            zeros = graph.op("Slice", zeros, graph.integers(0), graph.integers(groups), graph.integers(1))
        return graph.op("Unsqueeze", zeros, graph.integers(2))

    def files(self, graph: Graph) -> dict[str, bytes]:
        """None."""
        return {}


def _stored_bits(bits: int) -> int:
    return next(held for held in (2, 4, 8) if bits <= held)


def _block_of(scheme: Scheme, width: int) -> int:
    """Columns of a block; a row that is one group may end in a block that is not full."""
    block = power_of_two_part(width)
    return block if scheme.strategy == "group" else max(block, 2 * SMALLEST_BLOCK)


def _store_nbits(
    graph: Graph, name: str, weight: QuantizedTensor, block: int, dtype: torch.dtype, columns: str
) -> StoredMatrix:
    bits = _stored_bits(weight.scheme.bits)
    out, width = weight.shape[0], weight.scheme.columns_per_scale(weight.shape[1])
    blocks = -(-weight.shape[1] // block)
    scales = row_scales(weight.scale, weight.scheme, out)
    each = blocks if scales.shape[1] == 1 else width // block
    parts = {
        "codes": graph.constant(f"{name}.codes", _nbits_codes(weight, bits, block)),
        "scales": graph.constant(f"{name}.scales", _spread(scales, each, blocks), dtype),
    }
    if weight.zero_point is not None:
        zeros = _spread(weight.zero_point.expand(out, -1), each, blocks)
        parts["zero_points"] = graph.constant(f"{name}.zero_points", pack_zero_points(zeros, bits))
    return StoredMatrix(name, "nbits", weight.shape, bits, block, parts, columns)


def _spread(values: Tensor, each: int, blocks: int) -> Tensor:
    """A value for every block from one for every group of `each` blocks."""
    return values.repeat_interleave(each, dim=1)[:, :blocks].contiguous()


def _nbits_codes(weight: QuantizedTensor, bits: int, block: int) -> UInt8[Tensor, "out blocks bytes"]:
    out, columns = weight.shape
    if bits == weight.scheme.bits and columns % block == 0:
        return weight.stream.packed.view(out, columns // block, -1)
    return pack_blocks(weight.codes, bits, block)


def pack_blocks(codes: Int8[Tensor, "out in"], bits: int, block: int) -> UInt8[Tensor, "out blocks bytes"]:
    """Codes in blocks of columns, lowest bits first; a last block that is not full ends in zeros."""
    out, columns = codes.shape
    missing = -columns % block
    padded = functional.pad(codes, (0, missing)) if missing else codes
    packed = pack_fields(to_fields(padded.contiguous(), bits), bits)
    return packed.view(out, padded.shape[1] // block, block * bits // 8)


def pack_zero_points(zeros: Int8[Tensor, "out blocks"], bits: int) -> UInt8[Tensor, "out bytes"]:
    """Zero points with the codes' offset, packed along the blocks; a row begins at a byte."""
    used = -(-zeros.shape[1] * bits // 8)
    padded = functional.pad(to_fields(zeros.contiguous(), bits), (0, -zeros.shape[1] % 8))
    return pack_fields(padded, bits)[:, :used].contiguous()


def _store_blocks(
    graph: Graph, name: str, weight: QuantizedTensor, width: int, bits: int, dtype: torch.dtype, columns: str
) -> StoredMatrix:
    out = weight.shape[0]
    scales = row_scales(weight.scale, weight.scheme, out)
    parts = {
        "codes": _integers(graph, f"{name}.codes", weight.codes, bits),
        "scales": graph.constant(f"{name}.scales", scales.contiguous(), dtype),
    }
    if weight.zero_point is not None:
        zeros = weight.zero_point.expand(out, -1)
        parts["zero_points"] = _integers(graph, f"{name}.zero_points", zeros, bits)
    form = "blocks" if weight.scheme.is_integer else "float8"
    return StoredMatrix(name, form, weight.shape, bits, width, parts, columns)


def _multiplies_integers(weight: QuantizedTensor, inputs: InputQuantizer) -> bool:
    """Whether both sides are integers of at most 8 bits with one scale a row, the weights without zero points."""
    ours = weight.scheme.dtype == "int8" and weight.scale.shape[1] == 1 and weight.zero_point is None
    return ours and onnx_inputs.is_expressible(inputs.scheme) and inputs.scheme.strategy != "group"


def _store_integers(graph: Graph, name: str, weight: QuantizedTensor, *, sums: bool) -> StoredMatrix:
    """`sums` of the rows are what inputs with zero points need."""
    parts = {
        "codes": graph.constant(f"{name}.codes", to_fields(weight.codes, 8).t()),
        "scales": graph.constant(f"{name}.scales", row_scales(weight.scale, weight.scheme, weight.shape[0]).t()),
    }
    if sums:
        parts["sums"] = graph.constant(f"{name}.sums", weight.codes.sum(dim=1, dtype=torch.int32))
    return StoredMatrix(name, "integers", weight.shape, 8, 0, parts)


def _multiply_integers(
    graph: Graph, x: QuantizedNodes, matrix: StoredMatrix, bias: Tensor | None, dtype: torch.dtype
) -> str:
    """Whole numbers summed in int32, less the input's zero point times the sums of the rows; then scaled in float32."""
    offset = graph.constant_once("uint8_128", torch.tensor(128, dtype=torch.uint8))
    fields = graph.cast(graph.op("Add", x.codes, graph.scalar(128.0, WIDE)), torch.uint8)
    sums = graph.op("MatMulInteger", fields, matrix.parts["codes"], offset, offset)
    if x.zero_point is not None:
        shift = graph.op("Mul", graph.cast(x.zero_point, torch.int32), matrix.parts["sums"])
        sums = graph.op("Sub", sums, shift)
    y = graph.op("Mul", graph.op("Mul", graph.cast(sums, WIDE), x.scale), matrix.parts["scales"])
    if bias is not None:
        y = graph.op("Add", y, graph.constant(f"{matrix.name}.bias", bias, WIDE))
    return graph.cast(y, dtype)


def _integers(graph: Graph, name: str, codes: Tensor, bits: int) -> str:
    """Signed integers, those of 4 bits two to a byte over the ends of rows, the first one low."""
    if bits == 8:
        return graph.constant(name, codes.contiguous())
    fields = codes.contiguous().view(-1).view(torch.uint8) & 15
    fields = functional.pad(fields, (0, -fields.numel() % 8))
    return graph.constant_int4(name, pack_fields(fields, 4)[: -(-codes.numel() // 2)], tuple(codes.shape))


def _unpacked(graph: Graph, values: str, bits: int) -> str:
    """Bytes in float as the fields of `bits` bits that they hold, lowest first, along the flattened columns."""
    for width in (8, 4):
        if width > bits:
            base = graph.scalar(float(1 << width // 2), WIDE)
            high = graph.op("Floor", graph.op("Div", values, base))
            low = graph.op("Sub", values, graph.op("Mul", high, base))
            pair = [graph.op("Unsqueeze", part, graph.integers(-1)) for part in (low, high)]
            values = graph.op("Concat", *pair, axis=-1)
    return graph.op("Reshape", values, graph.integers(0, -1))


def _dequantized(graph: Graph, matrix: StoredMatrix) -> str:
    names = [matrix.parts[part] for part in ("codes", "scales", "zero_points") if part in matrix.parts]
    return graph.op("DequantizeLinear", *names, axis=1, block_size=matrix.group)
