"""What a layout is to the rest of the project: how a quantized model lies in files, in each direction.

Reading, a layout's `Reader` tells which stored tensors make up a linear and gives it as `QuantizedTensor`; everything
else (`packed.PackedCheckpoint`) follows from that. Writing, a layout's `Encoder` says what it cannot hold, before any
work, and turns one linear at a time into stored tensors; `convert.py` streams a model through it. Layouts that are no
folder of safetensors (GGUF, ONNX) have writers of their own and share only the refusals.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from cann_llm_quant.export.kv_section import KvCache
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.kv import KvPlan
from cann_llm_quant.quant.scheme import ActivationScheme, QuantizedTensor, Scheme


@dataclass(frozen=True)
class StoredLinear:
    """One quantized matrix in a source's files.

    `shape` is `(out, in)`; `tensors` are the full stored names that make it up (its bias is none of them), which the
    float view hides; `dtype` is what its weights are dequantized to when nothing else is asked for. `scattered` says
    that groups are no runs of neighbouring columns (`QuantizedTensor.group_index`).
    """

    scheme: Scheme
    shape: tuple[int, int]
    tensors: tuple[str, ...]
    dtype: torch.dtype
    activations: ActivationScheme | None = None
    scattered: bool = False


@runtime_checkable
class Reader(Protocol):
    """The quantized linears of one opened source.

    Its members may be plain attributes.
    """

    @property
    def layout(self) -> str:
        """The layout's name."""
        ...

    @property
    def linears(self) -> Mapping[str, StoredLinear]:
        """How each is stored, by module, known without reading weights."""
        ...

    @property
    def tied(self) -> Mapping[str, str]:
        """Modules without a matrix of their own, to the module whose matrix they read."""
        ...

    @property
    def kv_cache(self) -> KvCache:
        """How keys and values are to be stored; without layers where the source does not say."""
        ...

    def quantized(self, module: str) -> QuantizedTensor:
        """One linear in its stored codes. Raises CheckpointError when its tensors contradict each other."""
        ...

    def inputs(self, module: str) -> InputQuantizer | None:
        """How the input of one linear is quantized; None where it stays in float."""
        ...


@dataclass(frozen=True)
class PackedModel:
    """What an exporter knows of a model before it reads a weight.

    `schemes`, `activations` and `shapes` are by module; linears that `schemes` lacks are stored in float. `dtype` is
    the storage type of most float tensors, `config` the source's `config.json` without its quantization section,
    `scattered` the linears whose groups are no runs of neighbouring columns.
    """

    arch: Arch
    schemes: Mapping[str, Scheme]
    activations: Mapping[str, ActivationScheme]
    shapes: Mapping[str, tuple[int, int]]
    kv: KvPlan
    dtype: torch.dtype
    config: Mapping[str, Any]
    tied: Mapping[str, str] = field(default_factory=dict)
    kv_cache: KvCache = field(default_factory=KvCache)
    scattered: frozenset[str] = frozenset()

    def float_linears(self) -> list[str]:
        """Every matrix of the decoder that is stored in float, head included, by module, in the model's order."""
        modules = [spec.module for layer in self.arch.layers for spec in layer.linears] + [self.arch.head_module]
        return [module for module in modules if module not in self.schemes and module not in self.tied]

    def fused(self) -> list[tuple[str, ...]]:
        """Modules that runtimes load as one matrix: q, k, v and gate, up of every layer (and expert)."""
        return [
            tuple(layer.linear(role).module for role in group)
            for layer in self.arch.layers
            for group in layer.fusion_groups
        ]


@runtime_checkable
class Holder(Protocol):
    """What a layout can hold."""

    @property
    def layout(self) -> str:
        """The layout's name."""
        ...

    def refusal(
        self, module: str, scheme: Scheme, activations: ActivationScheme | None, shape: tuple[int, int]
    ) -> str | None:
        """Why the layout cannot hold this linear, as the end of a sentence about it; None where it can."""
        ...

    def nearest(self, scheme: Scheme, shape: tuple[int, int]) -> Scheme | None:
        """The scheme that `--requantize` would round a refused linear to; None where there is none."""
        ...


@runtime_checkable
class Encoder(Holder, Protocol):
    """A layout of safetensors that is written.

    `stem` begins the names of the weight files: `<stem>.safetensors`, or `<stem>-00001-of-00002.safetensors` with
    `<stem>.safetensors.index.json`.
    """

    @property
    def stem(self) -> str:
        """What the names of weight files begin with."""
        ...

    def check(self, model: PackedModel) -> list[str]:
        """Warnings about the whole model, a sentence each. Raises UnsupportedError for what cannot be loaded."""
        ...

    def encode(
        self, module: str, weight: QuantizedTensor, inputs: InputQuantizer | None, bias: Tensor | None
    ) -> dict[str, Tensor]:
        """All stored tensors of one quantized linear by full name, its bias (as the layout wants it) included."""
        ...

    def plain(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The stored tensors of a tensor that is no part of a quantized linear."""
        ...

    def files(self, model: PackedModel, tensors: Mapping[str, torch.dtype]) -> dict[str, bytes]:
        """`config.json` and whatever else the layout wants beside the weights, by file name.

        `tensors` are the names and dtypes of everything that was written, in order.
        """
        ...
