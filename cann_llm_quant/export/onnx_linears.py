"""The matrices of a model in a graph: quantized ones as the dialect has it, float ones as Gemm, by module.

Every matrix is read, written and let go before the next. The embedding is the exception in that a tied head multiplies
by the same constant.
"""

from typing import Protocol

import torch
from torch import Tensor

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.export.layout import PackedModel
from cann_llm_quant.export.onnx_dialect import Dialect, StoredMatrix
from cann_llm_quant.export.onnx_graph import Graph
from cann_llm_quant.models.arch import LinearSpec
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.scheme import QuantizedTensor


class Quantized(Checkpoint, Protocol):
    """A checkpoint that gives its quantized linears in codes, as `PackedCheckpoint` does."""

    def quantized(self, module: str) -> QuantizedTensor | None:
        """A linear in codes, None when it is stored in float."""
        ...

    def inputs(self, module: str) -> InputQuantizer | None:
        """How a linear's input is quantized, None when it stays in float."""
        ...


class Linears:
    """Multiplies by the model's matrices; `x` is [tokens, in], results are [tokens, out]."""

    def __init__(
        self, graph: Graph, model: PackedModel, checkpoint: Quantized, dialect: Dialect, dtype: torch.dtype
    ) -> None:
        self._graph, self._model, self._checkpoint = graph, model, checkpoint
        self._dialect, self._dtype = dialect, dtype
        self._embedding = model.arch.embedding_name.removesuffix(".weight")
        self._table: StoredMatrix | None = None

    def __call__(self, spec: LinearSpec, x: str) -> str:
        """One linear of a layer, with its bias."""
        bias = self._checkpoint.load(f"{spec.module}.bias") if spec.bias else None
        return self._multiply(spec.module, x, bias)

    def embed(self, ids: str) -> str:
        """Rows of the embedding for `ids` [tokens]."""
        weight = self._checkpoint.quantized(self._embedding)
        if weight is None:
            name = self._model.arch.embedding_name
            table = self._graph.constant(name, self._checkpoint.load(name), self._dtype)
            return self._graph.op("Gather", table, ids)
        self._table = self._dialect.store(self._graph, self._embedding, weight, self._dtype, table=True)
        return self._dialect.lookup(self._graph, ids, self._table, self._dtype)

    def head(self, x: str) -> str:
        """Logits [tokens, vocab]."""
        arch = self._model.arch
        own = arch.head_module in self._model.schemes and arch.head_module not in self._model.tied
        if own or not (arch.tied_head or arch.head_module in self._model.tied):
            return self._multiply(arch.head_module, x, None)
        if self._table is not None:
            return self._dialect.product(self._graph, x, self._table, None, None, self._dtype)
        return self._graph.op("Gemm", x, arch.embedding_name, transB=1)

    def _multiply(self, module: str, x: str, bias: Tensor | None) -> str:
        graph, dtype = self._graph, self._dtype
        with graph.named(module):
            weight = self._checkpoint.quantized(module)
            if weight is not None:
                inputs = self._checkpoint.inputs(module)
                matrix = self._dialect.store(graph, module, weight, dtype, inputs=inputs)
                return self._dialect.product(graph, x, matrix, inputs, bias, dtype)
            names = [x, graph.constant(f"{module}.weight", self._checkpoint.load(f"{module}.weight"), dtype)]
            if bias is not None:
                names.append(graph.constant(f"{module}.bias", bias, dtype))
            return graph.op("Gemm", *names, transB=1)
