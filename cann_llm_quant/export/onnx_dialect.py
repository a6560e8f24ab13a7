"""What differs between the runtimes that a decoder's graph is written for: how quantized weights are stored and used.

A matrix is stored once (`store`) and then multiplies (`product`) or is looked up by row (`lookup`), so that a head can
share the embedding's codes. The rest of the graph is of standard operators and the same for all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.export.layout import PackedModel
from cann_llm_quant.export.onnx_graph import Graph
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.number_formats import to_values
from cann_llm_quant.quant.scheme import ActivationScheme, QuantizedTensor, Scheme

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Kernels are written for blocks up to this size.
_LARGEST_BLOCK = 256


@dataclass(frozen=True)
class StoredMatrix:
    """A quantized matrix `[out, in]` in a graph: the names of its constants by part, and what its operator needs.

    `form` is the dialect's own word for how it is stored.
    `bits` and `group` (0: one group a row) are those of the storage, which may be wider than the scheme's codes and
    finer than its groups. `columns` names the order in which the input's columns are read, where they are reordered.
    """

    name: str
    form: str
    shape: tuple[int, int]
    bits: int
    group: int
    parts: Mapping[str, str]
    columns: str = ""


@runtime_checkable
class Dialect(Protocol):
    """One runtime's way. `refusal` and `nearest` are those of `layout.Encoder`."""

    @property
    def layout(self) -> str:
        """The layout's name."""
        ...

    @property
    def name(self) -> str:
        """What `--dialect` calls it."""
        ...

    @property
    def opset(self) -> int:
        """Version of the standard operators."""
        ...

    @property
    def dtypes(self) -> tuple[str, ...]:
        """What weights in float and activations can be, the default first."""
        ...

    @property
    def routes_experts(self) -> bool:
        """Whether an expert sees only the tokens that are routed to it; else it sees all, most with a weight of 0."""
        ...

    def refusal(
        self, module: str, scheme: Scheme, activations: ActivationScheme | None, shape: tuple[int, int]
    ) -> str | None:
        """Why the operators cannot hold this linear, as the end of a sentence about it; None where they can."""
        ...

    def nearest(self, scheme: Scheme, shape: tuple[int, int]) -> Scheme | None:
        """The scheme that `--requantize` would round a refused linear to; None where there is none."""
        ...

    def check(self, model: PackedModel) -> list[str]:
        """What the output computes otherwise than the source, a sentence each."""
        ...

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
        """Write a matrix; its constants are named after `name`.

        `inputs` is how its input is quantized; a `table` will be looked up, whether or not it multiplies as well.
        Raises CheckpointError for scales that `dtype` does not hold.
        """
        ...

    def product(
        self,
        graph: Graph,
        x: str,
        matrix: StoredMatrix,
        inputs: InputQuantizer | None,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> str:
        """`x @ matrixᵀ + bias` for `x` [tokens, in] of `dtype`."""
        ...

    def lookup(self, graph: Graph, ids: str, matrix: StoredMatrix, dtype: torch.dtype) -> str:
        """Rows of a table for `ids` [tokens], as [tokens, in]."""
        ...

    def files(self, graph: Graph) -> dict[str, bytes]:
        """What belongs beside the finished graph."""
        ...


def power_of_two_part(width: int) -> int:
    """The largest power of two that divides `width`, at most 256."""
    return min(width & -width, _LARGEST_BLOCK)


def as_integers(weight: QuantizedTensor) -> QuantizedTensor:
    """fp4_e2m1 as integers, other types as they are: twice its values 0, 0.5, 1, 1.5, 2, 3, 4, 6 are whole."""
    if weight.scheme.dtype != "fp4_e2m1":
        return weight
    codes = to_values(weight.codes, "fp4_e2m1").mul_(2).to(torch.int8)
    return QuantizedTensor(codes, weight.scale / 2, None, replace(weight.scheme, dtype="int8", scale_type="float"))


def by_group(weight: QuantizedTensor) -> tuple[QuantizedTensor, Tensor | None]:
    """A matrix whose groups are runs of neighbouring columns, and the order of its columns where it was changed.

    Raises CheckpointError when scattered groups differ in size.
    """
    if weight.group_index is None:
        return weight, None
    columns = torch.argsort(weight.group_index, stable=True)
    width = weight.scheme.columns_per_scale(weight.shape[1])
    expected = torch.arange(weight.shape[1], dtype=torch.int32) // width
    if not torch.equal(weight.group_index[columns], expected):
        raise CheckpointError(f"the g_idx of a matrix of {list(weight.shape)} does not give each group {width} columns")
    return QuantizedTensor(weight.codes[:, columns], weight.scale, weight.zero_point, weight.scheme), columns


def describe_linear(graph: Graph, result: str, matrix: StoredMatrix, dtype: torch.dtype) -> str:
    """The type of a product, for operators that the standard does not know."""
    return graph.describe(result, dtype, None, matrix.shape[0])
