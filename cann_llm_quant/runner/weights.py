"""A model for running: linears that are stored packed stay packed, everything else is loaded in the compute dtype."""

import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from cann_llm_quant.checkpoint import Checkpoint
from cann_llm_quant.checkpoint.companion_tokenizer import tokenizer_of
from cann_llm_quant.checkpoint.files import parse_json_object
from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.export.packed import open_source
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint, input_quantizers
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.models.arch import Arch, LinearSpec
from cann_llm_quant.models.decoder import DecoderLayer, DecoderModel, DenseLinear, LinearOp, Table
from cann_llm_quant.models.lookup import QuantizedLookup
from cann_llm_quant.models.weights import load_model
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.runner.linear import packed_linear
from cann_llm_quant.runner.stop import end_ids
from cann_llm_quant.tokenizer import check_vocabulary


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer and the ids that end a text."""

    model: DecoderModel
    tokenizer: PreTrainedTokenizerBase
    end_ids: frozenset[int]


_shared: weakref.WeakValueDictionary[tuple[Any, ...], LoadedModel] = weakref.WeakValueDictionary()
_loading = threading.Lock()


def load_shared(
    path: str,
    device: torch.device,
    dtype: torch.dtype,
    kernel: str = "auto",
    *,
    allow_pickle: bool = False,
) -> LoadedModel:
    """`load_packed`, or what it gave another engine that still holds it, if no file at `path` has changed since."""
    key = (path, _change_times(path), device, dtype, kernel, allow_pickle)
    with _loading:
        loaded = _shared.get(key)
        if loaded is None:
            loaded = load_packed(path, device, dtype, kernel, allow_pickle=allow_pickle)
            _shared[key] = loaded
        return loaded


def _change_times(path: str) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of change of every file of a model, as far as they are there."""
    if not os.path.isdir(path):
        stat = os.stat(path) if os.path.exists(path) else None
        return () if stat is None else ((os.path.realpath(path), stat.st_size, stat.st_mtime_ns),)
    with os.scandir(path) as entries:
        files = sorted((entry.path, entry.stat()) for entry in entries if entry.is_file())
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)


def load_packed(
    path: str,
    device: torch.device,
    dtype: torch.dtype,
    kernel: str = "auto",
    *,
    allow_pickle: bool = False,
) -> LoadedModel:
    """The model at `path`: what `quantize` wrote, from packed weights, or any float checkpoint (folder or GGUF).

    Raises InputError's kinds when files are missing, contradict each other or are unknown.
    """
    with open_source(path, allow_pickle=allow_pickle) as checkpoint:
        arch = arch_from_checkpoint(checkpoint)
        tokenizer = tokenizer_of(checkpoint)
        check_vocabulary(tokenizer, arch.vocab_size)
        ends = end_ids(checkpoint.config, _generation_config(checkpoint), tokenizer.eos_token_id)
        if isinstance(checkpoint, PackedCheckpoint):
            inputs = input_quantizers(checkpoint)
            model = _PackedLoader(checkpoint, arch, device, dtype, kernel, inputs).model()
        else:
            model = load_model(checkpoint, arch, device, dtype)
    return LoadedModel(model, tokenizer, ends)


def _generation_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    content = checkpoint.companion_files().get("generation_config.json")
    if content is None:
        return {}
    return parse_json_object(content, checkpoint.path / "generation_config.json")


@dataclass(frozen=True)
class _PackedLoader:
    """Builds a decoder over packed linears, one matrix in memory at a time beside what is kept."""

    checkpoint: PackedCheckpoint[Any]
    arch: Arch
    device: torch.device
    dtype: torch.dtype
    kernel: str
    inputs: Mapping[str, InputQuantizer]

    def model(self) -> DecoderModel:
        arch = self.arch
        layers = [self._layer(index) for index in range(arch.num_layers)]
        embedding, tied_head = self._embedding()
        shape = (arch.vocab_size, arch.hidden_size)
        head = tied_head if arch.tied_head else self._linear(arch.head_module, shape, None)
        return DecoderModel(arch, layers, embedding, self._tensor(arch.final_norm_name), head)

    def _embedding(self) -> tuple[Table, LinearOp]:
        """The embedding, and the same matrix as a tied head: one storage for both."""
        module = self.arch.embedding_name.removesuffix(".weight")
        packed = self.checkpoint.quantized(module)
        if packed is None or packed.scale.shape[0] != packed.shape[0]:
            weight = self._tensor(self.arch.embedding_name)
            return weight, DenseLinear(weight)
        self._check_shape(module, packed.shape, (self.arch.vocab_size, self.arch.hidden_size))
        table = QuantizedLookup(packed, self.device, self.dtype)
        return table, packed_linear(table.weight, None, device=self.device, dtype=self.dtype, kernel=self.kernel)

    def _layer(self, index: int) -> DecoderLayer:
        layer = self.arch.layers[index]
        linears = {spec.role: self._linear_of(spec) for spec in layer.linears}
        parameters = {spec.role: self._tensor(spec.name) for spec in layer.parameters}
        return DecoderLayer(self.arch, layer, linears, parameters)

    def _linear_of(self, spec: LinearSpec) -> LinearOp:
        bias = self._tensor(f"{spec.module}.bias") if spec.bias else None
        return self._linear(spec.module, (spec.out_features, spec.in_features), bias)

    def _linear(self, module: str, shape: tuple[int, int], bias: Tensor | None) -> LinearOp:
        packed = self.checkpoint.quantized(module)
        if packed is None:
            return DenseLinear(self._tensor(f"{module}.weight"), bias)
        self._check_shape(module, packed.shape, shape)
        return packed_linear(
            packed, bias, device=self.device, dtype=self.dtype, kernel=self.kernel, inputs=self.inputs.get(module)
        )

    def _check_shape(self, module: str, found: tuple[int, int], shape: tuple[int, int]) -> None:
        if found != shape:
            raise CheckpointError(
                f"{self.checkpoint.path}: {module} is packed as {list(found)}, config says {list(shape)}"
            )

    def _tensor(self, name: str) -> Tensor:
        return self.checkpoint.load(name).to(device=self.device, dtype=self.dtype)
