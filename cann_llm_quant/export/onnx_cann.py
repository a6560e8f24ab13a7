"""Quantized weights for Huawei's CANN, whose compiler `atc` turns a graph into an offline model for one kind of NPU.

The operator is NPUWeightQuantBatchMatmulV2 (CANN's own, under the standard domain, versions 11 to 19):

    y = x @ ((weight + antiquant_offset) * antiquant_scale) + bias

    x                 [m, k], float16 or bfloat16
    weight            int4: int32 [k, n / 8], column 8j + i in bits 4i of word j, two's complement; int8: [k, n]
    antiquant_scale   [k / group, n], or [1, n] without groups; in the type of x
    antiquant_offset  the same, optional; minus our zero points
    bias              [n], float32 beside bfloat16
    attributes        antiquant_group_size (0: none), dtype (-1: that of x)

Between offset and bias the operator takes quant_scale and quant_offset, which stay empty. Groups are multiples of 32
below k. Codes of 2 and 3 bits lie in 4; those of 5 and 6 in 8, and so do fp4's values doubled, and 4-bit codes where 8
does not divide n. The parser takes graphs of one operator set only, and the last that all operators used here are
registered for is 17.
"""

import re
import shlex
from dataclasses import dataclass

import torch
from jaxtyping import Int8, Int32
from torch import Tensor

from cann_llm_quant.errors import UsageError
from cann_llm_quant.export.layout import PackedModel
from cann_llm_quant.export.onnx_dialect import StoredMatrix, as_integers, by_group, describe_linear
from cann_llm_quant.export.onnx_graph import Graph
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.scheme import (
    ActivationScheme,
    QuantizedTensor,
    Scheme,
    largest_fitting_group,
    row_scales,
)

OPERATOR = "NPUWeightQuantBatchMatmulV2"
COMMAND_FILE = "atc_command.sh"
_GROUP_STEP = 32
_LARGEST_SIDE = 65535


@dataclass(frozen=True)
class CannDialect:
    """CANN's compiler; `soc` is the exact name of the NPU, as `npu-smi info` shows it after `Ascend`."""

    soc: str = "Ascend910B1"
    layout: str = "onnx"
    name: str = "cann"
    opset: int = 17
    dtypes: tuple[str, ...] = ("fp16", "bf16")
    routes_experts: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_]+", self.soc):
            raise UsageError(f"SoC version {self.soc!r} is no name of an NPU; give one such as Ascend910B1")

    def refusal(
        self, module: str, scheme: Scheme, activations: ActivationScheme | None, shape: tuple[int, int]
    ) -> str | None:
        """Integers in groups that the operator takes, of a size that it takes."""
        if scheme.dtype == "fp8_e4m3":
            return f"is of small floats, and {OPERATOR} takes integer weights only"
        if max(shape) > _LARGEST_SIDE:
            return f"has {max(shape)} rows or columns, and {OPERATOR} takes up to {_LARGEST_SIDE}; keep it in float"
        width = scheme.columns_per_scale(shape[1])
        if scheme.strategy == "tile" and width < shape[1] and shape[1] % width:
            return f"ends in a tile of {shape[1] % width} columns, and {OPERATOR} takes groups of one size"
        if width < shape[1] and width % _GROUP_STEP:
            return f"has groups of {width} columns, and {OPERATOR} takes multiples of {_GROUP_STEP}"
        return None

    def nearest(self, scheme: Scheme, shape: tuple[int, int]) -> Scheme | None:
        """int8 by row for 8 bits, else int4 in groups of 128, 64 or 32 columns, or by row; None for too large ones."""
        if max(shape) > _LARGEST_SIDE:
            return None
        symmetric = scheme.symmetric
        group = largest_fitting_group(shape[1], 128)
        if scheme.bits > 4:
            return Scheme("int8", symmetric, "channel", None)
        if group is None or group < _GROUP_STEP or group == shape[1]:
            return Scheme("int4", symmetric, "channel", None)
        return Scheme("int4", symmetric, "group", group)

    def check(self, model: PackedModel) -> list[str]:
        """Inputs that stay in float, codes that become wider, experts that all run."""
        found = []
        if model.activations:
            found.append("inputs stay in float: this operator quantizes weights only")
        if any(scheme.bits in (2, 3, 5, 6) or not scheme.is_integer for scheme in model.schemes.values()):
            found.append(f"codes of 2 and 3 bits take 4, those of 5 and 6 and fp4 take 8: {OPERATOR} knows no others")
        if any(layer.moe is not None for layer in model.arch.layers):
            found.append("every expert sees every token, since sizes that depend on data do not compile well")
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
        """The transposed codes; packed to int32 where 4 bits hold them, 8 divides the rows and none is looked up."""
        weight, order = by_group(as_integers(weight))
        out, columns = weight.shape
        bits = 4 if weight.scheme.bits <= 4 and out % 8 == 0 and not table else 8
        width = weight.scheme.columns_per_scale(columns)
        scales = row_scales(weight.scale, weight.scheme, out)
        parts = {
            "codes": graph.constant(f"{name}.codes", pack_transposed(weight.codes) if bits == 4 else weight.codes.t()),
            "scales": graph.constant(f"{name}.scales", scales.t().contiguous(), dtype),
        }
        if weight.zero_point is not None:
            offsets = -weight.zero_point.expand(out, -1).t().to(torch.float32)
            parts["offsets"] = graph.constant(f"{name}.offsets", offsets.contiguous(), dtype)
        order_name = "" if order is None else graph.constant(f"{name}.columns", order)
        return StoredMatrix(name, "npu", (out, columns), bits, 0 if width >= columns else width, parts, order_name)

    def product(
        self,
        graph: Graph,
        x: str,
        matrix: StoredMatrix,
        inputs: InputQuantizer | None,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> str:
        """The operator, which adds the bias itself."""
        if matrix.columns:
            x = graph.op("Gather", x, matrix.columns, axis=1)
        names = [x, matrix.parts["codes"], matrix.parts["scales"], matrix.parts.get("offsets", "")]
        if bias is not None:
            kind = torch.float32 if dtype == torch.bfloat16 else dtype
            names += ["", "", graph.constant(f"{matrix.name}.bias", bias, kind)]
        while not names[-1]:
            names.pop()
        y = graph.op(OPERATOR, *names, antiquant_group_size=matrix.group, dtype=-1)
        return describe_linear(graph, y, matrix, dtype)

    def lookup(self, graph: Graph, ids: str, matrix: StoredMatrix, dtype: torch.dtype) -> str:
        """Gathered columns of the transposed codes, with offsets and scales as the operator applies them."""
        found = {
            part: graph.op("Transpose", graph.op("Gather", name, ids, axis=1), perm=[1, 0])
            for part, name in matrix.parts.items()
        }
        groups = matrix.shape[1] // matrix.group if matrix.group else 1
        codes = graph.op("Reshape", graph.cast(found["codes"], dtype), graph.integers(0, groups, -1))
        for kind, part in (("Add", "offsets"), ("Mul", "scales")):
            if part in found:
                codes = graph.op(kind, codes, graph.op("Unsqueeze", found[part], graph.integers(2)))
        return graph.op("Reshape", codes, graph.integers(0, -1))

    def files(self, graph: Graph) -> dict[str, bytes]:
        """The command that compiles the graph."""
        return {COMMAND_FILE: atc_command(graph, self.soc).encode("utf-8")}


def pack_transposed(codes: Int8[Tensor, "out in"]) -> Int32[Tensor, "in words"]:
    """Signed 4-bit codes, 8 rows to a word, the first in the lowest bits; words, being fewer, are then transposed."""
    pairs = codes.contiguous().view(torch.uint8).view(len(codes) // 8, 4, 2, codes.shape[1])
    lanes = (pairs[:, :, 0] & 15) | (pairs[:, :, 1] << 4)
    words = lanes[:, 0].to(torch.int32)
    for lane in range(1, 4):
        words |= lanes[:, lane].to(torch.int32) << (8 * lane)
    return words.t().contiguous()


def atc_command(graph: Graph, soc: str) -> str:
    """A shell script that compiles `model.onnx` in its own folder; sizes that are words in the graph are -1 in it."""
    shapes = (
        f"{value.name}:" + ",".join("-1" if isinstance(size, str) else str(size) for size in value.shape)
        for value in graph.inputs
    )
    options = [
        "--framework=5",
        "--model=model.onnx",
        "--output=model",
        "--input_format=ND",
        f"--input_shape={';'.join(shapes)}",
        "--precision_mode=must_keep_origin_dtype",
        "--external_weight=1",
    ]
    lines = [
        "#!/bin/sh",
        "# Compiles model.onnx for an Ascend NPU; run it in this folder where the CANN toolkit is installed.",
        "# model.onnx.data must lie beside it. The export did not compile it: there was no toolkit.",
        "# SOC_VERSION is the exact name of the NPU: `npu-smi info` shows it, without the word Ascend before it.",
        f'exec atc --soc_version="${{SOC_VERSION:-{soc}}}" \\',
        *[f"  {shlex.quote(option)} \\" for option in options[:-1]],
        f"  {options[-1]}",
    ]
    return "\n".join(lines) + "\n"
