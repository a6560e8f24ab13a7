"""A linear's input quantized in the graph, with the formulas of `quant/activations.py` in standard operators.

    codes = clip(round(x / scale + zero_point)),   x ~ (codes - zero_point) * scale

Round is to nearest, ties to even, in ONNX as in torch. Everything is float32 here; codes are whole numbers.
"""

from dataclasses import dataclass

import torch

from cann_llm_quant.export.onnx_graph import Graph
from cann_llm_quant.quant.activations import InputQuantizer, code_range
from cann_llm_quant.quant.number_formats import INT_BITS
from cann_llm_quant.quant.scheme import ActivationScheme

WIDE = torch.float32
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class QuantizedNodes:
    """Names of a quantized input's parts; of groups, [tokens, groups, size] and scales [tokens, groups, 1]."""

    codes: str
    scale: str
    zero_point: str | None


def is_expressible(scheme: ActivationScheme) -> bool:
    """Whether standard operators can round to this type: integers only."""
    return scheme.dtype in INT_BITS


def quantize(graph: Graph, x: str, quantizer: InputQuantizer, columns: int) -> QuantizedNodes:
    """Quantize `x` [tokens, columns], float32, by an integer scheme."""
    scheme = quantizer.scheme
    least, most = code_range(scheme)
    if scheme.strategy == "group":
        assert scheme.group_size is not None, "the scheme checks it"
        # the tokens are what is inferred: there are none for an expert that nothing is routed to
        x = graph.op("Reshape", x, graph.integers(-1, columns // scheme.group_size, scheme.group_size))
    scale, zero_point = _stored(graph, quantizer) if not scheme.dynamic else _measured(graph, x, scheme)
    scaled = graph.op("Div", x, scale)
    if zero_point is not None:
        scaled = graph.op("Add", scaled, zero_point)
    codes = graph.op("Clip", graph.op("Round", scaled), graph.scalar(least, WIDE), graph.scalar(most, WIDE))
    return QuantizedNodes(codes, scale, zero_point)


def dequantize(graph: Graph, quantized: QuantizedNodes, columns: int) -> str:
    """`(codes - zero_point) * scale` as [tokens, in]."""
    codes = quantized.codes
    if quantized.zero_point is not None:
        codes = graph.op("Sub", codes, quantized.zero_point)
    return graph.op("Reshape", graph.op("Mul", codes, quantized.scale), graph.integers(-1, columns))


def _stored(graph: Graph, quantizer: InputQuantizer) -> tuple[str, str | None]:
    fixed = quantizer.fixed
    assert fixed is not None, "static schemes come with their range"
    scale = graph.scalar(float(fixed.scale), WIDE)
    return scale, None if fixed.zero_point is None else graph.scalar(float(fixed.zero_point), WIDE)


def _measured(graph: Graph, x: str, scheme: ActivationScheme) -> tuple[str, str | None]:
    least, most = code_range(scheme)
    tiny = graph.scalar(_TINY, WIDE)
    if scheme.symmetric:
        largest = _extreme(graph, "ReduceMax", graph.op("Abs", x), scheme)
        return graph.op("Max", graph.op("Div", largest, graph.scalar((most - least) / 2, WIDE)), tiny), None
    zero = graph.scalar(0.0, WIDE)
    low = graph.op("Min", _extreme(graph, "ReduceMin", x, scheme), zero)
    high = graph.op("Max", _extreme(graph, "ReduceMax", x, scheme), zero)
    span = graph.op("Div", graph.op("Sub", high, low), graph.scalar(most - least, WIDE))
    scale = graph.op("Max", span, tiny)
    start = graph.op("Sub", graph.scalar(least, WIDE), graph.op("Div", low, scale))
    bounded = graph.op("Clip", start, graph.scalar(least, WIDE), graph.scalar(most, WIDE))
    return scale, graph.op("Round", bounded)


def _extreme(graph: Graph, kind: str, x: str, scheme: ActivationScheme) -> str:
    """One number a row (and group), or one in all."""
    if scheme.strategy == "tensor":
        x = graph.op("Reshape", x, graph.integers(1, -1))
    return graph.reduce(kind, x)
