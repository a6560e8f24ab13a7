"""The MLP of a layer in a graph, and mixtures of them.

    p = softmax(router logits) in float32;  (w, e) = top_k(p);  w /= sum(w) if normalized
    y = sum over experts of w[:, expert] * mlp_expert(x),   w being 0 where a token is not routed to the expert

`routed` experts are given the rows with a weight alone, found by NonZero and added back by ScatterND, so that a mixture
costs what its tokens need. Otherwise every expert computes every token, num_experts / top_k times the work, for
runtimes that cannot compile sizes that depend on data. Both are the same sum, in the same order.
"""

import math

import torch

from cann_llm_quant.export.onnx_graph import Graph
from cann_llm_quant.export.onnx_inputs import WIDE
from cann_llm_quant.export.onnx_linears import Linears
from cann_llm_quant.models.arch import Arch, Layer, Moe


class Mlp:
    """Adds the second half of a layer; `x` is [tokens, hidden]."""

    def __init__(self, graph: Graph, arch: Arch, linears: Linears, dtype: torch.dtype, *, routed: bool) -> None:
        self.graph, self._linears = graph, linears
        self._activation, self._dtype, self._routed = arch.activation, dtype, routed

    def __call__(self, layer: Layer, x: str) -> str:
        """The output of the layer's MLP or mixture for the normed `x`."""
        return self._gated(layer, "", x) if layer.moe is None else self._mixture(layer, layer.moe, x)

    def _gated(self, layer: Layer, prefix: str, x: str) -> str:
        gate = self._activate(self._linears(layer.linear(f"{prefix}gate"), x))
        inner = self.graph.op("Mul", gate, self._linears(layer.linear(f"{prefix}up"), x))
        return self._linears(layer.linear(f"{prefix}down"), inner)

    def _activate(self, x: str) -> str:
        """The activation by its name in configs, as `models/decoder.py` lists them."""
        graph = self.graph
        if self._activation in ("silu", "swish"):
            return graph.op("Mul", x, graph.op("Sigmoid", x))
        if self._activation == "relu":
            return graph.op("Relu", x)
        half, one = graph.scalar(0.5, self._dtype), graph.scalar(1.0, self._dtype)
        if self._activation == "gelu":
            curve = graph.op("Erf", graph.op("Mul", x, graph.scalar(math.sqrt(0.5), self._dtype)))
        else:
            assert self._activation == "gelu_pytorch_tanh", "the architecture map names known activations only"
            cube = graph.op("Mul", graph.op("Mul", x, graph.op("Mul", x, x)), graph.scalar(0.044715, self._dtype))
            inner = graph.op("Mul", graph.op("Add", x, cube), graph.scalar(math.sqrt(2 / math.pi), self._dtype))
            curve = graph.op("Tanh", inner)
        return graph.op("Mul", graph.op("Mul", x, half), graph.op("Add", curve, one))

    def _mixture(self, layer: Layer, moe: Moe, x: str) -> str:
        graph = self.graph
        weights = self._route(layer, moe, x)
        y = graph.op("Mul", x, graph.scalar(0.0, self._dtype))
        for expert in range(moe.num_experts):
            column = graph.op("Gather", weights, graph.integers(expert), axis=1)
            with graph.named(f"layers.{layer.index}/expert.{expert}"):
                y = (self._add_routed if self._routed else self._add_dense)(layer, f"experts.{expert}.", x, column, y)
        if moe.shared_intermediate_size is None:
            return y
        shared = self._gated(layer, "shared.", x)
        if moe.shared_gate:
            shared = graph.op("Mul", graph.op("Sigmoid", self._linears(layer.linear("shared_gate"), x)), shared)
        return graph.op("Add", y, shared)

    def _route(self, layer: Layer, moe: Moe, x: str) -> str:
        """Weights float32 [tokens, experts], 0 for experts that a token is not routed to."""
        graph = self.graph
        logits = graph.cast(self._linears(layer.linear("router"), x), WIDE)
        shares = graph.op("Softmax", logits, axis=-1)
        best, experts = graph.op_many(2, "TopK", shares, graph.integers(moe.top_k), axis=-1)
        if moe.normalize_top_k:
            best = graph.op("Div", best, graph.op("ReduceSum", best, graph.integers(-1), keepdims=1))
        nothing = graph.op("Mul", shares, graph.scalar(0.0, WIDE))
        return graph.op("ScatterElements", nothing, experts, best, axis=1)

    def _add_dense(self, layer: Layer, prefix: str, x: str, column: str, y: str) -> str:
        output = self._gated(layer, prefix, x)
        return self.graph.op("Add", y, self._weighted(output, column))

    def _add_routed(self, layer: Layer, prefix: str, x: str, column: str, y: str) -> str:
        graph = self.graph
        places = graph.op("NonZero", graph.op("Squeeze", column, graph.integers(1)))
        rows = graph.op("Squeeze", places, graph.integers(0))
        output = self._gated(layer, prefix, graph.op("Gather", x, rows))
        share = self._weighted(output, graph.op("Gather", column, rows))
        # every row occurs once; ONNX Runtime's ScatterND does not add float16 itself
        sums = graph.op("Add", graph.op("Gather", y, rows), share)
        return graph.op("ScatterND", y, graph.op("Transpose", places, perm=[1, 0]), sums)

    def _weighted(self, output: str, column: str) -> str:
        """`output * column` in float32, rounded to the stream's type."""
        graph = self.graph
        if self._dtype == WIDE:
            return graph.op("Mul", output, column)
        return graph.cast(graph.op("Mul", graph.cast(output, WIDE), column), self._dtype)
