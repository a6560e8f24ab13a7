"""A quantized model as ONNX, one matrix in memory at a time.

model.onnx           the graph, without weights
model.onnx.data      all weights, each at a multiple of 4096 bytes
config.json          the source's, without its quantization section
tokenizer, template  byte for byte
SHA256SUMS           of all of these, as sha256sum checks them
atc_command.sh       for CANN, the command that compiles the graph
export.json          what wrote the folder, from what; `--overwrite` may replace a folder that has one
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from cann_llm_quant import __version__
from cann_llm_quant.checkpoint.base import TensorInfo
from cann_llm_quant.checkpoint.hashed_file import HashedFile
from cann_llm_quant.checkpoint.journal import disk_errors
from cann_llm_quant.checkpoint.output_folder import OutputFolder
from cann_llm_quant.errors import UnsupportedError, UsageError
from cann_llm_quant.export.layout import PackedModel
from cann_llm_quant.export.model_config import json_bytes, output_config
from cann_llm_quant.export.onnx_cann import CannDialect
from cann_llm_quant.export.onnx_decoder import build_decoder
from cann_llm_quant.export.onnx_dialect import DTYPES, Dialect
from cann_llm_quant.export.onnx_file import model_bytes, require_onnx
from cann_llm_quant.export.onnx_graph import DATA_FILE, DataFile, Graph
from cann_llm_quant.export.onnx_linears import Quantized
from cann_llm_quant.export.onnx_ort import OrtDialect
from cann_llm_quant.models.arch_reader import unclaimed

MODEL_FILE = "model.onnx"
MARKER_FILE = "export.json"
DIALECTS: Mapping[str, Callable[[], Dialect]] = {"ort": OrtDialect, "cann": CannDialect}


@dataclass(frozen=True)
class WrittenOnnx:
    """What was published: the folder, its number of operators, bytes of weights, and warnings, a sentence each."""

    path: Path
    operators: int
    data_bytes: int
    warnings: tuple[str, ...]


def dialect_of(name: str) -> Dialect:
    """The dialect with its default options. Raises UsageError for an unknown name."""
    if name not in DIALECTS:
        raise UsageError(f"unknown ONNX dialect {name!r}; choose {' or '.join(DIALECTS)}")
    return DIALECTS[name]()


def export_onnx(
    checkpoint: Quantized,
    model: PackedModel,
    out: Path,
    *,
    dialect: str | Dialect = "ort",
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> WrittenOnnx:
    """Write `model`, whose tensors `checkpoint` gives, to `out`; `progress` is told of the layers done.

    `dtype` is that of float weights, activations and caches: fp32, fp16 or bf16, as the dialect takes them; None is its
    first. Raises UsageError for options or an `out` that cannot be, UnsupportedError for a linear that the dialect
    refuses, CheckpointError for numbers beyond `dtype`.
    """
    require_onnx()
    way = dialect_of(dialect) if isinstance(dialect, str) else dialect
    kind = _dtype(way, dtype)
    check_linears(model, way)
    name = str(kind).removeprefix("torch.")
    origin = {"layout": "onnx", "dialect": way.name, "dtype": name, "source": checkpoint.fingerprint()}
    with OutputFolder.open(out, run=origin, overwrite=overwrite, sources=[checkpoint.path]) as folder:
        with disk_errors(folder.result), HashedFile(folder.result / DATA_FILE) as file:
            data = DataFile(file)
            graph = Graph(way.opset, data)
            build_decoder(graph, model, checkpoint, way, kind, progress)
            data.finish()
        files = checkpoint.companion_files() | way.files(graph)
        files[MODEL_FILE] = model_bytes(graph, f"{model.arch.model_type} decoder for {way.name}, {name}")
        files["config.json"] = json_bytes(output_config(model.config, model.arch, name, None))
        files[MARKER_FILE] = json_bytes({"tool": "cann-llm-quant", "tool_version": __version__} | origin)
        path = folder.publish(files | {"SHA256SUMS": _sums(files, data)})
    return WrittenOnnx(path, len(graph.nodes), data.size, tuple(_warnings(model, way, checkpoint.tensors)))


def check_linears(model: PackedModel, dialect: Dialect) -> None:
    """Raise UnsupportedError for the first linear that the dialect cannot hold, saying how many there are."""
    refused: list[str] = []
    for module, scheme in model.schemes.items():
        reason = dialect.refusal(module, scheme, model.activations.get(module), model.shapes[module])
        if reason is not None:
            refused.append(f"{module} ({scheme.label()}) {reason}")
    if refused:
        more = f" (and {len(refused) - 1} more linears)" if len(refused) > 1 else ""
        raise UnsupportedError(f"{refused[0]}{more}: pass --requantize to round what {dialect.name} cannot hold")


def _dtype(dialect: Dialect, name: str | None) -> torch.dtype:
    name = name or dialect.dtypes[0]
    if name not in dialect.dtypes:
        raise UsageError(f"the {dialect.name} dialect computes in {' or '.join(dialect.dtypes)}, not in {name!r}")
    return DTYPES[name]


def _warnings(model: PackedModel, dialect: Dialect, names: Mapping[str, TensorInfo]) -> list[str]:
    found = dialect.check(model)
    left_out = [name for name in unclaimed(model.arch, names) if name != f"{model.arch.head_module}.weight"]
    if left_out:
        found.append(f"{len(left_out)} tensors that the decoder does not read are left out: {left_out[0]}, ...")
    if model.kv_cache.layers:
        found.append("the cache is of floats: ONNX graphs take and give keys and values as they are multiplied")
    return found


def _sums(files: Mapping[str, bytes], data: DataFile) -> bytes:
    """What `sha256sum` would print of the folder's files."""
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()} | {DATA_FILE: data.sha256}
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())).encode("utf-8")
