"""Every layout that is written, by the name that `--to` and `--format` call it."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.checkpoint.output_place import check_output
from cann_llm_quant.checkpoint.view import CheckpointView
from cann_llm_quant.device import resolve_dtype
from cann_llm_quant.errors import UsageError
from cann_llm_quant.export import gguf_plan
from cann_llm_quant.export.ascend import AscendEncoder
from cann_llm_quant.export.ascend_targets import DEFAULT_RUNTIME, target_named
from cann_llm_quant.export.awq import AwqEncoder
from cann_llm_quant.export.convert import Progress, convert
from cann_llm_quant.export.fitting import Fit, fit, fitted
from cann_llm_quant.export.gguf_export import FloatType, export_gguf, vocabulary
from cann_llm_quant.export.gptq import GptqEncoder
from cann_llm_quant.export.layout import Encoder, Holder, PackedModel
from cann_llm_quant.export.mlx import MlxEncoder
from cann_llm_quant.export.native_encoder import NativeEncoder
from cann_llm_quant.export.onnx_dialect import Dialect
from cann_llm_quant.export.onnx_export import dialect_of, export_onnx
from cann_llm_quant.export.packed import open_packed, open_source
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.export.packed_model import packed_model
from cann_llm_quant.export.to_float import export_to_float
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.scheme import ActivationScheme, QuantizedTensor, Scheme


@dataclass(frozen=True)
class ExportOptions:
    """What may be asked of an export beyond its layout; None leaves the layout's default.

    `regroup` splits groups, `requantize` lets linears be rounded anew (see `fitting`). `dtype` is that of float tensors
    (float, gguf, onnx), `runtime` the one that Ascend files are for, `dialect` that of ONNX operators with the options
    that `onnx_export.dialect_of` takes; without `tokenizer` a GGUF file holds no vocabulary, without `kv_cache` Ascend
    files no formats of the cache.
    """

    regroup: int | None = None
    requantize: bool = False
    dtype: str | None = None
    runtime: str | None = None
    dialect: str | None = None
    accuracy_level: int | None = None
    contrib_ops: bool = True
    soc_version: str | None = None
    tokenizer: bool = True
    kv_cache: bool = True
    allow_pickle: bool = False
    max_shard_bytes: int = 5_000_000_000
    overwrite: bool = False


@dataclass(frozen=True)
class Exported:
    """What was published: folder, bytes of weights, linears in codes, how many were rounded anew, warnings, and the
    layout's own options as they were taken (None: the layout's default; empty where an earlier run had published it).
    """

    path: Path
    layout: str
    total_bytes: int
    linears: int
    rounded: int
    warnings: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"path": str(self.path), "warnings": list(self.warnings)}


class FittedSource(CheckpointView):
    """A source whose linears come in the schemes that a layout can hold, for exporters with writers of their own."""

    def __init__(self, checkpoint: Checkpoint, chosen: Fit) -> None:
        super().__init__(checkpoint)
        self._chosen = chosen

    def load(self, name: str) -> Tensor:
        """One tensor in float."""
        weight = self.quantized(name.removesuffix(".weight")) if name.endswith(".weight") else None
        return self.inner.load(name) if weight is None else weight.dequantize(self.tensors[name].dtype)

    def quantized(self, module: str) -> QuantizedTensor | None:
        """A linear in its codes, None when it is stored in float."""
        if not isinstance(self.inner, PackedCheckpoint):
            return None
        weight = self.inner.quantized(module)
        return None if weight is None else self._chosen.weight(module, weight)

    def inputs(self, module: str) -> InputQuantizer | None:
        """How a linear's input is quantized."""
        return self.inner.inputs(module) if isinstance(self.inner, PackedCheckpoint) else None


def export_model(
    source: str | Path,
    output: Path,
    layout: str,
    options: ExportOptions,
    *,
    progress: Progress = lambda done, total: None,
) -> Exported:
    """Write `source` (folder, GGUF file or hub id) in `layout` to the folder `output`.

    Raises UsageError for options that the layout does not take or an `output` that cannot be written, UnsupportedError
    for what the layout cannot hold, CheckpointError for a damaged source; all before any work but damaged numbers.
    """
    check_options(options, layout)
    if layout in ("gguf", "onnx"):
        return _export_file(source, output, layout, options, progress)
    if layout == "float":
        return _export_float(source, output, options, progress)
    make = _ENCODERS[layout]
    done = convert(
        source,
        output,
        lambda model, checkpoint: make(model, checkpoint, options),
        regroup=options.regroup,
        requantize=options.requantize,
        allow_pickle=options.allow_pickle,
        options={"runtime": options.runtime, "kv_cache": options.kv_cache} if layout == "ascend" else None,
        max_shard_bytes=options.max_shard_bytes,
        overwrite=options.overwrite,
        progress=progress,
    )
    written = done.written
    asked = _asked(layout, options)
    return Exported(written.path, layout, written.total_bytes, done.linears, done.rounded, tuple(done.warnings), asked)


def precheck(model: PackedModel, source: Checkpoint, layout: str, options: ExportOptions) -> list[str]:
    """Warnings about a model that is still to be quantized from `source`.

    Raises UnsupportedError for what the layout cannot hold, CheckpointError for a tokenizer that cannot be read.
    """
    if layout in ("compressed-tensors", "float"):
        return []
    file = layout in ("gguf", "onnx")
    holder = _file_holder(layout, options) if file else _ENCODERS[layout](model, None, options)
    chosen = fit(model, holder, size=options.regroup, requantize=options.requantize, planned=True)
    model = fitted(model, chosen)
    if isinstance(holder, Encoder):
        return holder.check(model)
    if layout == "onnx":
        return []
    if options.tokenizer:
        vocabulary(source, model.arch.vocab_size)  # its warnings come with the file
    return gguf_plan.check(model)


def check_options(options: ExportOptions, *layouts: str) -> None:
    """Raise UsageError for an unknown layout and for options that none of the layouts takes."""
    for layout in layouts:
        if layout not in LAYOUTS:
            raise UsageError(f"layout {layout!r} is not known; choose from {', '.join(LAYOUTS)}")
    for option, takers in _TAKEN_BY.items():
        if getattr(options, option) != getattr(_DEFAULTS, option) and not set(layouts) & set(takers):
            flag = f"--{'no-' if getattr(_DEFAULTS, option) is True else ''}{option.replace('_', '-')}"
            raise UsageError(f"{flag} is for {' and '.join(takers)}, not for {' and '.join(layouts)}; leave it out")
    if "onnx" in layouts:
        _dialect(options)
    if options.runtime is not None:
        target_named(options.runtime)


def options_for(layout: str, options: ExportOptions) -> ExportOptions:
    """The options without what is meant for other layouts that are written beside this one."""
    return replace(
        options,
        **{option: getattr(_DEFAULTS, option) for option, takers in _TAKEN_BY.items() if layout not in takers},
    )


def _export_float(source: str | Path, output: Path, options: ExportOptions, progress: Progress) -> Exported:
    with open_packed(str(source)) as checkpoint:
        inputs = sum(linear.activations is not None for linear in checkpoint.reader.linears.values())
    written = export_to_float(
        source,
        output,
        dtype=None if options.dtype is None else resolve_dtype(options.dtype),
        allow_pickle=options.allow_pickle,
        max_shard_bytes=options.max_shard_bytes,
        overwrite=options.overwrite,
        progress=progress,
    )
    warning = (
        f"the source quantizes the inputs of {inputs} linears, which a float checkpoint cannot say; measure the packed "
        "one to include their error"
    )
    warnings = (warning,) if inputs else ()
    return Exported(written.path, "float", written.total_bytes, 0, 0, warnings, _asked("float", options))


def _export_file(source: str | Path, output: Path, layout: str, options: ExportOptions, progress: Progress) -> Exported:
    """Layouts with writers of their own."""
    with open_source(str(source), allow_pickle=options.allow_pickle, dtype=None) as checkpoint:
        check_output(output, overwrite=options.overwrite, sources=[checkpoint.path])
        model = packed_model(checkpoint)
        holder = _file_holder(layout, options)
        chosen = fit(model, holder, size=options.regroup, requantize=options.requantize)
        view, model = FittedSource(checkpoint, chosen), fitted(model, chosen)
        if layout == "gguf":
            gguf = export_gguf(
                view,
                model,
                output,
                float_type=_float_type(options.dtype),
                tokenizer=options.tokenizer,
                progress=progress,
                overwrite=options.overwrite,
            )
            path, size, warnings, asked = gguf.path, gguf.nbytes, gguf.warnings, _asked(layout, options)
        else:
            onnx = export_onnx(
                view,
                model,
                output,
                dialect=_dialect(options),
                dtype=options.dtype,
                progress=progress,
                overwrite=options.overwrite,
            )
            path, size, warnings, asked = onnx.path, onnx.data_bytes, onnx.warnings, dict(onnx.options)
            asked |= {"regroup": options.regroup, "requantize": options.requantize}
    return Exported(path, layout, size, len(model.schemes), len(chosen.rounded), tuple(warnings), asked)


def _asked(layout: str, options: ExportOptions) -> dict[str, Any]:
    return {option: getattr(options, option) for option, takers in _TAKEN_BY.items() if layout in takers}


def _file_holder(layout: str, options: ExportOptions) -> Holder:
    return GgufHolder() if layout == "gguf" else _dialect(options)


def _dialect(options: ExportOptions) -> Dialect:
    return dialect_of(
        options.dialect or "ort",
        accuracy_level=options.accuracy_level,
        contrib_ops=options.contrib_ops,
        soc_version=options.soc_version,
    )


def _float_type(dtype: str | None) -> FloatType | None:
    types: Mapping[torch.dtype, FloatType] = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
    return None if dtype is None else types[resolve_dtype(dtype)]


class GgufHolder:
    """What GGUF's blocks hold; implements `layout.Holder`."""

    layout = "gguf"

    def refusal(
        self, module: str, scheme: Scheme, activations: ActivationScheme | None, shape: tuple[int, int]
    ) -> str | None:
        """Why no block type holds this linear; None where one does."""
        return gguf_plan.refusal(module, scheme, activations, shape)

    def nearest(self, scheme: Scheme, shape: tuple[int, int]) -> Scheme | None:
        """The scheme of the nearest block type."""
        return gguf_plan.nearest(scheme, shape)


def _native(model: PackedModel, checkpoint: Checkpoint | None, options: ExportOptions) -> Encoder:
    assert checkpoint is not None, "native files tell of their source"
    return NativeEncoder(checkpoint)


def _outer(model: PackedModel, *, head: bool) -> frozenset[str]:
    """The embedding, and the head too, where a model has them in codes and the layout wants them in float."""
    outer = {model.arch.embedding_name.removesuffix(".weight")} | ({model.arch.head_module} if head else set())
    return frozenset(outer & set(model.schemes))


def _gptq(version: Literal[1, 2]) -> Callable[[PackedModel, Checkpoint | None, ExportOptions], Encoder]:
    def make(model: PackedModel, checkpoint: Checkpoint | None, options: ExportOptions) -> Encoder:
        return GptqEncoder(version, act_order=bool(model.scattered), floats=_outer(model, head=False))

    return make


def _ascend(model: PackedModel, checkpoint: Checkpoint | None, options: ExportOptions) -> Encoder:
    runtime = options.runtime or DEFAULT_RUNTIME
    if isinstance(checkpoint, PackedCheckpoint):
        return AscendEncoder(runtime, kv_cache=options.kv_cache, inputs=checkpoint.inputs)
    return AscendEncoder(runtime, kv_cache=options.kv_cache)


# For a model, and the source that it lies in; None before there is one.
_ENCODERS: Mapping[str, Callable[[PackedModel, Checkpoint | None, ExportOptions], Encoder]] = {
    "compressed-tensors": _native,
    "ascend": _ascend,
    "awq": lambda model, checkpoint, options: AwqEncoder(floats=_outer(model, head=True)),
    "gptq": _gptq(1),
    "gptq_v2": _gptq(2),
    "mlx": lambda model, checkpoint, options: MlxEncoder(),
}
# Name to what reads it.
LAYOUTS: Mapping[str, str] = {
    "compressed-tensors": "transformers, vLLM, SGLang, this tool (also called native)",
    "ascend": "vllm-ascend, MindIE, SGLang on NPUs (see --runtime)",
    "awq": "AutoAWQ's GEMM files: transformers, vLLM, SGLang",
    "gptq": "GPTQ version 1: vLLM, SGLang, transformers",
    "gptq_v2": "GPTQ version 2: GPTQModel, transformers",
    "mlx": "mlx-lm, on Apple's chips",
    "gguf": "llama.cpp and all that is built on it",
    "onnx": "ONNX Runtime, or CANN's atc (see --dialect)",
    "float": "a plain checkpoint of dequantized weights",
}
_DEFAULTS = ExportOptions()
_CODES = tuple(layout for layout in LAYOUTS if layout != "float")
_TAKEN_BY = {
    "regroup": _CODES,
    "requantize": _CODES,
    "dtype": ("float", "gguf", "onnx"),
    "runtime": ("ascend",),
    "dialect": ("onnx",),
    "accuracy_level": ("onnx",),
    "contrib_ops": ("onnx",),
    "soc_version": ("onnx",),
    "tokenizer": ("gguf",),
    "kv_cache": ("ascend",),
}
