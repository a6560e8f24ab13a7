"""A decoder as a graph, straight from the architecture map: the same steps as `models/decoder.py`, one operator each.

Inputs    input_ids [batch, sequence], attention_mask [batch, total], position_ids [batch, sequence], all int64, and
          past_key_values.N.key, past_key_values.N.value [batch, kv_heads, past, head_dim];  total = past + sequence
Outputs   logits [batch, sequence, vocab], present.N.key, present.N.value [batch, kv_heads, total, head_dim]

Names are those of optimum and onnxruntime-genai; all but heads, widths and the vocabulary are sizes that a run decides.
The first run has a past of 0 tokens. Between attention's steps the stream is [tokens, hidden], tokens being batch *
sequence. Norms, angles and the softmax are float32, everything else `dtype`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from cann_llm_quant.export.layout import PackedModel
from cann_llm_quant.export.onnx_attention import Masks, Sizes, Turn, attend, rotate, sizes, turn
from cann_llm_quant.export.onnx_dialect import Dialect
from cann_llm_quant.export.onnx_graph import ELEMENT_TYPES, Graph, Value
from cann_llm_quant.export.onnx_inputs import WIDE
from cann_llm_quant.export.onnx_linears import Linears, Quantized
from cann_llm_quant.export.onnx_mlp import Mlp
from cann_llm_quant.models.arch import Layer

BATCH, SEQUENCE, PAST, TOTAL = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"

Progress = Callable[[int, int], None]


class Decoder:
    """Adds one model's decoder to `graph`; weights are read from `checkpoint` and written one at a time."""

    def __init__(
        self, graph: Graph, model: PackedModel, checkpoint: Quantized, dialect: Dialect, dtype: torch.dtype
    ) -> None:
        self.graph, self.arch, self.dtype = graph, model.arch, dtype
        self._checkpoint = checkpoint
        self._linears = Linears(graph, model, checkpoint, dialect, dtype)
        self._mlp = Mlp(graph, model.arch, self._linears, dtype, routed=dialect.routes_experts)

    def build(self, progress: Progress) -> None:
        """The whole graph; `progress` is told the layers done and how many there are."""
        graph, arch = self.graph, self.arch
        self._declare()
        shared = sizes(graph)
        masks, rotation = Masks(graph, shared), turn(graph, arch, self.dtype)
        with graph.named(arch.embedding_name.removesuffix(".weight")):
            x = self._linears.embed(graph.op("Reshape", "input_ids", graph.integers(-1)))
        for layer in arch.layers:
            mask = masks.of(layer.window)
            x = self._layer(layer, x, mask, rotation, shared)
            progress(layer.index + 1, arch.num_layers)
        x = self._norm(x, arch.final_norm_name)
        with graph.named(arch.head_module):
            logits = self._linears.head(x)
            shape = graph.op("Concat", shared.batch_sequence, graph.integers(arch.vocab_size), axis=0)
            graph.rename(graph.op("Reshape", logits, shape), "logits")

    def _declare(self) -> None:
        integers, floats = ELEMENT_TYPES[torch.int64], ELEMENT_TYPES[self.dtype]
        graph, arch = self.graph, self.arch
        graph.inputs += [
            Value("input_ids", integers, (BATCH, SEQUENCE)),
            Value("attention_mask", integers, (BATCH, TOTAL)),
            Value("position_ids", integers, (BATCH, SEQUENCE)),
        ]
        graph.outputs.append(Value("logits", floats, (BATCH, SEQUENCE, arch.vocab_size)))
        for index in range(arch.num_layers):
            for part in ("key", "value"):
                before = (BATCH, arch.num_kv_heads, PAST, arch.head_dim)
                after = (BATCH, arch.num_kv_heads, TOTAL, arch.head_dim)
                graph.inputs.append(Value(f"past_key_values.{index}.{part}", floats, before))
                graph.outputs.append(Value(f"present.{index}.{part}", floats, after))

    def _layer(self, layer: Layer, x: str, mask: str, rotation: Turn, sizes: Sizes) -> str:
        graph = self.graph
        names = {parameter.role: parameter.name for parameter in layer.parameters}
        with graph.named(f"layers.{layer.index}/attention"):
            normed = self._norm(x, names["input_norm"])
            q = self._heads(layer, "q", normed, self.arch.num_heads, sizes, names.get("q_norm"))
            k = self._heads(layer, "k", normed, self.arch.num_kv_heads, sizes, names.get("k_norm"))
            v = self._heads(layer, "v", normed, self.arch.num_kv_heads, sizes, None)
            q, k = (rotate(graph, heads, rotation, self.arch.head_dim) for heads in (q, k))
            k, v = self._extend(layer.index, "key", k), self._extend(layer.index, "value", v)
            mixed = attend(graph, self.arch, q, k, v, mask, sizes, self.dtype)
            h = graph.op("Add", x, self._linears(layer.linear("o"), mixed))
        with graph.named(f"layers.{layer.index}/mlp"):
            return graph.op("Add", h, self._mlp(layer, self._norm(h, names["post_norm"])))

    def _heads(self, layer: Layer, role: str, x: str, count: int, sizes: Sizes, norm: str | None) -> str:
        """A projection as [batch, heads, sequence, head_dim]."""
        graph = self.graph
        width = graph.integers(count, self.arch.head_dim)
        shape = graph.op("Concat", sizes.batch_sequence, width, axis=0)
        heads = graph.op("Reshape", self._linears(layer.linear(role), x), shape)
        if norm is not None:
            heads = self._norm(heads, norm)
        return graph.op("Transpose", heads, perm=[0, 2, 1, 3])

    def _extend(self, index: int, part: str, new: str) -> str:
        """Keys or values of the past followed by the new ones, which is also what the next run is given."""
        joined = self.graph.op("Concat", f"past_key_values.{index}.{part}", new, axis=2)
        self.graph.rename(joined, f"present.{index}.{part}")
        return joined

    def _norm(self, x: str, name: str) -> str:
        """`x / rms(x) * gain` over the last axis; families with an offset round after the gain, as the decoder does."""
        graph, offset = self.graph, self.arch.norm_offset
        wide = x if self.dtype == WIDE else graph.cast(x, WIDE)
        square = graph.op("Pow", wide, graph.scalar(2.0, WIDE))
        mean = graph.op("Add", graph.reduce("ReduceMean", square), graph.scalar(self.arch.rms_norm_eps, WIDE))
        normed = graph.op("Div", wide, graph.op("Sqrt", mean))
        gain: Tensor = self._checkpoint.load(name)
        if offset:
            gained = graph.op("Mul", normed, graph.constant(name, offset + gain.to(WIDE)))
            return gained if self.dtype == WIDE else graph.cast(gained, self.dtype)
        normed = normed if self.dtype == WIDE else graph.cast(normed, self.dtype)
        return graph.op("Mul", normed, graph.constant(name, gain, self.dtype))


def build_decoder(
    graph: Graph,
    model: PackedModel,
    checkpoint: Quantized,
    dialect: Dialect,
    dtype: torch.dtype,
    progress: Progress,
) -> None:
    """Add the decoder of `model` to `graph`. Raises CheckpointError for weights that cannot be stored."""
    Decoder(graph, model, checkpoint, dialect, dtype).build(progress)
