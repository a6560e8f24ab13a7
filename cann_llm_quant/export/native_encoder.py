"""Any quantized source written as `quantize` writes: compressed-tensors with an `inference_config.json` beside it.

transformers, vLLM and SGLang load the folder, and so do this tool's runner and its other exporters. Of a source that
this tool made, the inference config keeps its provenance and measurements.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from cann_llm_quant import __version__
from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.export import native
from cann_llm_quant.export.inference_config import (
    FILE_NAME,
    Accounting,
    InferenceConfig,
    InputFormat,
    Inputs,
    Limits,
    Provenance,
    StoredLayout,
    WeightFormat,
    Weights,
)
from cann_llm_quant.export.kv_scales import common_scheme, model_tensors, scales_bytes
from cann_llm_quant.export.kv_section import SCALES_FILE, KvCache, KvFormat, KvLayer, ScalesPlace
from cann_llm_quant.export.layout import PackedModel
from cann_llm_quant.export.model_config import json_bytes, output_config
from cann_llm_quant.export.native_inputs import encode_range
from cann_llm_quant.export.native_reader import NativeReader
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.export.quantization_config import quantization_config
from cann_llm_quant.quant.activations import InputQuantizer, label
from cann_llm_quant.quant.kv import KvScheme, LayerKv
from cann_llm_quant.quant.scheme import ActivationScheme, QuantizedTensor, Scheme

LIBRARIES = ("torch", "transformers", "safetensors")
_EMBEDDING = Scheme("int8", True, "channel", None)


class NativeEncoder:
    """Writes one source in the native layouts; implements `layout.Encoder`."""

    layout = "compressed-tensors"
    stem = "model"

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._reader = checkpoint.reader if isinstance(checkpoint, PackedCheckpoint) else None
        self._tied: Mapping[str, str] = self._reader.tied if self._reader else {}
        self._tables = _tables(checkpoint)
        self._source_tensors = len(checkpoint.tensors)
        self._name = checkpoint.path.resolve().name
        self._fingerprint = checkpoint.fingerprint()
        self._cache: Mapping[str, dict[str, Tensor]] = {}

    def refusal(
        self, module: str, scheme: Scheme, activations: ActivationScheme | None, shape: tuple[int, int]
    ) -> str | None:
        """Only embeddings are restricted: readers want them in `int-quantized`, one scale a row."""
        if module in self._tables and scheme != _EMBEDDING:
            return f"is an embedding, which its readers take as {_EMBEDDING.label()} only"
        return None

    def nearest(self, scheme: Scheme, shape: tuple[int, int]) -> Scheme | None:
        """Eight bits a row, for embeddings."""
        return _EMBEDDING

    def check(self, model: PackedModel) -> list[str]:
        """Nothing about the whole model stands in the way."""
        if _place(model) == "model":
            self._cache = {
                layer.parameters[0].name: model_tensors(layer.linear("k").module.rpartition(".")[0], scales)
                for layer, scales in zip(model.arch.layers, model.kv.scales, strict=True)
            }
        return []

    def encode(
        self, module: str, weight: QuantizedTensor, inputs: InputQuantizer | None, bias: Tensor | None
    ) -> dict[str, Tensor]:
        """See `native.encode`; an embedding is written for all that read it."""
        if module in self._tables:
            return native.encode_table(self._tables[module], weight)
        tensors = native.encode(module, weight, None if inputs is None else inputs.scheme)
        if inputs is not None and inputs.fixed is not None:
            tensors |= encode_range(module, inputs.scheme, inputs.fixed)
        return tensors if bias is None else tensors | {f"{module}.bias": bias}

    def plain(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Unchanged, and beside a layer's first norm the scales of its keys and values."""
        return {name: tensor} | self._cache.get(name, {})

    def files(self, model: PackedModel, tensors: Mapping[str, torch.dtype]) -> dict[str, bytes]:
        """`config.json`, `inference_config.json` and the scales of a KV cache that need a file of their own."""
        kept = model.float_linears()
        tables = {module: self._tables[module] for module in model.schemes if module in self._tables}
        section = quantization_config(model.schemes, kept, model.activations, tables, common_scheme(model.kv.layers))
        dtype = str(model.dtype).removeprefix("torch.")
        inference = self._inference(model, tensors, "dense" if section is None else section["format"])
        files = {
            "config.json": json_bytes(output_config(model.config, model.arch, dtype, section)),
            FILE_NAME: inference.to_json(),
        }
        return files | ({SCALES_FILE: scales_bytes(model.kv.scales)} if _place(model) == SCALES_FILE else {})

    def _inference(
        self, model: PackedModel, tensors: Mapping[str, torch.dtype], layout: StoredLayout
    ) -> InferenceConfig:
        formats = {
            module: WeightFormat.of(scheme, str(tensors[f"{module}.weight_scale"]).removeprefix("torch."))
            for module, scheme in model.schemes.items()
        }
        weights = Weights(
            layout=layout,
            schemes={one.key(): one for one in formats.values()},
            linears={module: one.key() for module, one in formats.items()},
            float=dict.fromkeys(model.float_linears(), "float in the source"),
            tied=dict(model.tied),
            bits_per_weight=_bits_per_weight(model, tensors),
        )
        inputs = Inputs(
            schemes={label(scheme): InputFormat.of(scheme) for scheme in model.activations.values()},
            linears={module: label(scheme) for module, scheme in model.activations.items()},
        )
        if isinstance(self._reader, NativeReader):
            update: dict[str, Any] = {"weights": weights, "inputs": inputs}
            return self._reader.inference.model_copy(update=update)
        return InferenceConfig(
            model_type=model.arch.model_type,
            weights=weights,
            inputs=inputs,
            kv_cache=_kv_section(model),
            limits=Limits(max_context=model.arch.max_positions),
            accounting=self._accounting(model),
            provenance=self._provenance(),
            linears={},
        )

    def _accounting(self, model: PackedModel) -> Accounting:
        count, quantized = self._source_tensors, len(model.schemes)
        return Accounting(source=count, quantized=quantized, kept=count - quantized, dropped={}, extra=[])

    def _provenance(self) -> Provenance:
        return Provenance(
            tool_version=__version__,
            source_name=self._name,
            source_fingerprint=self._fingerprint,
            recipe={"converted_from": self._reader.layout if self._reader else "float"},
            compute_dtype="float32",
            device="cpu",
            calibration=None,
            libraries={name: version(name) for name in LIBRARIES},
        )


def _tables(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """The embedding, if it is quantized, with all modules that read it."""
    if not isinstance(checkpoint, PackedCheckpoint):
        return {}
    tied = checkpoint.reader.tied
    tables = {module for module in checkpoint.modules if "embed" in module.rpartition(".")[2]} | set(tied.values())
    return {table: (table, *(module for module, read in tied.items() if read == table)) for table in sorted(tables)}


def _place(model: PackedModel) -> ScalesPlace | None:
    """Where scales of the KV cache go; None where there are none."""
    if not any(scale is not None for one in model.kv.scales for scale in (one.k_scale, one.v_scale)):
        return None
    return "model" if common_scheme(model.kv.layers) is not None else SCALES_FILE


def _kv_section(model: PackedModel) -> KvCache:
    """Of a source whose own files say it in another form."""
    if model.kv_cache.layers or not model.kv.quantizes:
        return model.kv_cache
    schemes = {scheme for layer in model.kv.layers for scheme in (layer.k, layer.v) if scheme is not None}
    return KvCache(
        schemes={scheme.label(): KvFormat.of(scheme) for scheme in sorted(schemes, key=KvScheme.label)},
        layers=[_kv_layer(layer) for layer in model.kv.layers],
        scales=_place(model),
    )


def _kv_layer(layer: LayerKv) -> KvLayer:
    return KvLayer(k=layer.k.label() if layer.k else None, v=layer.v.label() if layer.v else None)


def _bits_per_weight(model: PackedModel, tensors: Mapping[str, torch.dtype]) -> float | None:
    bits = weights = 0.0
    for module, scheme in model.schemes.items():
        out, columns = model.shapes[module]
        scale_bits = 32 if tensors[f"{module}.weight_scale"] == torch.float32 else 16
        bits += scheme.bits_per_weight(out, columns, scale_bits) * out * columns
        weights += out * columns
    return bits / weights if weights else None
