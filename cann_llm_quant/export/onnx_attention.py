"""Attention in a decoder's graph: what all layers share (which key a query sees, how far positions turn), then a layer.

    slot of new token s = past + s
    key j is seen if  j <= slot,  j > slot - window  and  attention_mask[j] = 1,  or  j == slot

as `models/attention.py` defines it. Cosines and sines are computed in the graph: a table would end at some position and
be as large as many weights (64 MB for 131072 positions of 64 pairs in float32), while a step needs a few rows of it.
Queries that share a key head are multiplied as one longer run of queries, so that keys and values are never repeated.
"""

from dataclasses import dataclass

import torch

from cann_llm_quant.export.onnx_graph import Graph
from cann_llm_quant.export.onnx_inputs import WIDE
from cann_llm_quant.models.arch import Arch, Rope
from cann_llm_quant.models.rope import frequencies, rotary_dim

# Beside it every score vanishes in float32 and float16 alike, while a sum with it stays finite.
_UNSEEN = -65504.0


@dataclass(frozen=True)
class Sizes:
    """Names of the sizes that are known when the graph runs: one-element vectors."""

    batch_sequence: str
    sequence: str
    total: str


def sizes(graph: Graph) -> Sizes:
    """From the shapes of `input_ids` [batch, sequence] and `attention_mask` [batch, total]."""
    both = graph.op("Shape", "input_ids")
    mask = graph.op("Shape", "attention_mask")
    one = graph.integers(1)
    return Sizes(both, graph.op("Gather", both, one), graph.op("Gather", mask, one))


class Masks:
    """What is added to scores, float32 [batch, 1, sequence, total], one for every window that layers have."""

    def __init__(self, graph: Graph, sizes: Sizes) -> None:
        self._graph = graph
        self._made: dict[int | None, str] = {}
        total, sequence = (graph.op("Squeeze", size) for size in (sizes.total, sizes.sequence))
        zero, one = (graph.constant_once(f"int64_{n}", torch.tensor(n)) for n in (0, 1))
        self._keys = graph.op("Range", zero, total, one)
        past = graph.op("Sub", total, sequence)
        self._slots = graph.op("Unsqueeze", graph.op("Range", past, total, one), graph.integers(1))
        self._own = graph.op("Equal", self._keys, self._slots)
        self._causal = graph.op("LessOrEqual", self._keys, self._slots)
        real = graph.cast("attention_mask", torch.bool)
        self._real = graph.op("Unsqueeze", real, graph.integers(1, 2))

    def of(self, window: int | None) -> str:
        """The mask of layers with this window; its nodes are added when it is first asked for."""
        if window not in self._made:
            self._made[window] = self._make(window)
        return self._made[window]

    def _make(self, window: int | None) -> str:
        graph, visible = self._graph, self._causal
        if window is not None:
            first = graph.op("Sub", self._slots, graph.integers(window))
            visible = graph.op("And", visible, graph.op("Greater", self._keys, first))
        seen = graph.op("Or", graph.op("And", visible, self._real), self._own)
        return graph.op("Where", seen, graph.scalar(0.0, WIDE), graph.scalar(_UNSEEN, WIDE))


@dataclass(frozen=True)
class Turn:
    """Cosines and sines of the positions, [batch, 1, sequence, half], for the first `dim` channels of a head.

    `order` is that of a head's channels in which the two halves turn, None where they lie so.
    """

    cos: str
    sin: str
    dim: int
    order: str | None = None


def turn(graph: Graph, arch: Arch, dtype: torch.dtype) -> Turn:
    """RoPE of `position_ids`; angles are float32, cosines and sines are rounded to `dtype` last."""
    per_position, factor = frequencies(arch.rope, arch.head_dim, arch.rope.trained_positions)
    speeds = graph.constant("rope.frequencies", per_position.to(torch.float32))
    positions = graph.cast("position_ids", WIDE)
    if arch.rope.kind == "dynamic":
        speeds = _stretched(graph, arch.rope, rotary_dim(arch.rope, arch.head_dim), positions, speeds)
    angles = graph.op("Mul", graph.op("Unsqueeze", positions, graph.integers(2)), speeds)
    pair = []
    for kind in ("Cos", "Sin"):
        wave = graph.op(kind, angles)
        wave = wave if factor == 1.0 else graph.op("Mul", wave, graph.scalar(factor, WIDE))
        pair.append(graph.op("Unsqueeze", graph.cast(wave, dtype), graph.integers(1)))
    dim = rotary_dim(arch.rope, arch.head_dim)
    if not arch.rope.interleaved:
        return Turn(pair[0], pair[1], dim)
    channels = torch.arange(arch.head_dim)
    order = torch.cat((channels[0:dim:2], channels[1:dim:2], channels[dim:]))
    return Turn(pair[0], pair[1], dim, graph.constant("rope.order", order))


def _stretched(graph: Graph, rope: Rope, dim: int, positions: str, speeds: str) -> str:
    """Speeds [batch, 1, half] for a base that grows with each row's last position: pair i slows by s^(-2i/(d-2))."""
    factor = float(rope.parameters["factor"])
    last = graph.op("Add", graph.reduce("ReduceMax", positions), graph.scalar(1.0, WIDE))
    length = graph.op("Max", last, graph.scalar(float(rope.trained_positions), WIDE))
    stretch = graph.op("Mul", length, graph.scalar(factor / rope.trained_positions, WIDE))
    stretch = graph.op("Sub", stretch, graph.scalar(factor - 1, WIDE))
    powers = graph.constant("rope.powers", -torch.arange(0, dim, 2, dtype=torch.float32) / (dim - 2))
    slower = graph.op("Pow", graph.op("Unsqueeze", stretch, graph.integers(2)), powers)
    return graph.op("Mul", slower, speeds)


def rotate(graph: Graph, x: str, turn: Turn, head_dim: int) -> str:
    """Turn the first channels of every head of `x` [batch, heads, sequence, head_dim]; the rest passes through."""
    if turn.order is not None:
        x = graph.op("Gather", x, turn.order, axis=3)
    half, rest = turn.dim // 2, head_dim - turn.dim
    first, second, *still = graph.split(x, half, half, *([rest] if rest else []))
    left = graph.op("Sub", graph.op("Mul", first, turn.cos), graph.op("Mul", second, turn.sin))
    right = graph.op("Add", graph.op("Mul", second, turn.cos), graph.op("Mul", first, turn.sin))
    return graph.op("Concat", left, right, *still, axis=-1)


def attend(graph: Graph, arch: Arch, q: str, k: str, v: str, mask: str, sizes: Sizes, dtype: torch.dtype) -> str:
    """Mixed values [tokens, heads * head_dim] for q [batch, heads, sequence, head_dim] over all keys and values.

    k and v are [batch, kv_heads, total, head_dim]. The softmax is computed in float32.
    """
    heads, kv_heads, dim = arch.num_heads, arch.num_kv_heads, arch.head_dim
    q = graph.op("Mul", q, graph.scalar(dim**-0.5, dtype))
    grouped = graph.op("Reshape", q, graph.integers(0, kv_heads, -1, dim))
    scores = graph.op("MatMul", grouped, graph.op("Transpose", k, perm=[0, 1, 3, 2]))
    if heads != kv_heads:
        scores = graph.op("Reshape", scores, graph.op("Concat", graph.integers(0, heads, -1), sizes.total, axis=0))
    scores = scores if dtype == WIDE else graph.cast(scores, WIDE)
    weights = graph.op("Softmax", graph.op("Add", scores, mask), axis=-1)
    weights = weights if dtype == WIDE else graph.cast(weights, dtype)
    if heads != kv_heads:
        weights = graph.op("Reshape", weights, graph.op("Concat", graph.integers(0, kv_heads, -1), sizes.total, axis=0))
    mixed = graph.op("Reshape", graph.op("MatMul", weights, v), graph.integers(0, heads, -1, dim))
    tokens_first = graph.op("Transpose", mixed, perm=[0, 2, 1, 3])
    return graph.op("Reshape", tokens_first, graph.integers(-1, heads * dim))
