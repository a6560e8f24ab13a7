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
from typing import Any

import torch

from cann_llm_quant import __version__
from cann_llm_quant.checkpoint.base import TensorInfo
from cann_llm_quant.checkpoint.hashed_file import HashedFile
from cann_llm_quant.checkpoint.journal import disk_errors
from cann_llm_quant.checkpoint.output_folder import OutputFolder
from cann_llm_quant.errors import UnsupportedError, UsageError
from cann_llm_quant.export.in_order import one_thread_each
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
DIALECTS = ("ort", "cann")
# Of MatMulNBits: unset, float32, float16, bfloat16, int8. ONNX Runtime takes any other number in silence.
ACCURACY_LEVELS = range(5)


@dataclass(frozen=True)
class WrittenOnnx:
    """What was published: the folder, its number of operators, bytes of weights, the options that it was written with,
    by the names that they have in `export.json`, and warnings, a sentence each.
    """

    path: Path
    operators: int
    data_bytes: int
    options: Mapping[str, Any]
    warnings: tuple[str, ...]


def dialect_of(
    name: str, *, accuracy_level: int | None = None, contrib_ops: bool = True, soc_version: str | None = None
) -> Dialect:
    """The dialect of this name; None leaves its default.

    Raises UsageError for an unknown name, an option that the dialect does not take, and a value that it cannot have.
    """
    if name not in DIALECTS:
        raise UsageError(f"unknown ONNX dialect {name!r}; choose {' or '.join(DIALECTS)}")
    given = (
        ("--accuracy-level", accuracy_level is not None, "ort"),
        ("--no-contrib-ops", not contrib_ops, "ort"),
        ("--soc-version", soc_version is not None, "cann"),
    )
    for flag, is_given, taker in given:
        if is_given and name != taker:
            raise UsageError(f"{flag} is for --dialect {taker}, not for {name}; choose that or leave it out")
    if name == "cann":
        return CannDialect() if soc_version is None else CannDialect(soc=_full_name(soc_version))
    if accuracy_level is None:
        return OrtDialect(contrib=contrib_ops)
    if accuracy_level not in ACCURACY_LEVELS:
        raise UsageError(f"--accuracy-level is {accuracy_level}; give 0 to 4: 1 multiplies in float32, 4 in int8")
    if not contrib_ops:
        raise UsageError("--accuracy-level is for MatMulNBits, which --no-contrib-ops leaves out; give one of the two")
    return OrtDialect(accuracy=accuracy_level)


def _full_name(soc: str) -> str:
    """An NPU's name. Raises UsageError for one without the word that `npu-smi info` leaves out, or in small letters."""
    bare = soc[len("ascend") :] if soc.lower().startswith("ascend") else soc
    exact = f"Ascend{bare.upper() if bare.islower() else bare}"
    if bare[:1].isdigit() and soc != exact:
        raise UsageError(f"--soc-version {soc!r} is not how atc spells an NPU; write {exact}")
    return soc


def _options(dialect: Dialect, dtype: str) -> dict[str, Any]:
    """What decides the graph and the files beside it, apart from the source."""
    own: dict[str, Any] = {}
    if isinstance(dialect, OrtDialect):
        own = {"accuracy_level": dialect.accuracy, "contrib_ops": dialect.contrib}
    elif isinstance(dialect, CannDialect):
        own = {"soc_version": dialect.soc}
    return {"dialect": dialect.name, **own, "dtype": dtype}


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
    options = _options(way, name)
    origin = {"layout": "onnx", **options, "source_fingerprint": checkpoint.fingerprint()}
    with OutputFolder.open(out, run=origin, overwrite=overwrite, sources=[checkpoint.path]) as folder:
        with (
            disk_errors(folder.result, resumes=False),
            one_thread_each(),
            HashedFile(folder.result / DATA_FILE) as file,
        ):
            data = DataFile(file)
            graph = Graph(way.opset, data)
            build_decoder(graph, model, checkpoint, way, kind, progress)
            data.finish()
        files = checkpoint.companion_files() | way.files(graph)
        files[MODEL_FILE] = model_bytes(graph, f"{model.arch.model_type} decoder for {way.name}, {name}")
        files["config.json"] = json_bytes(output_config(model.config, model.arch, name, None))
        files[MARKER_FILE] = json_bytes({"tool": "cann-llm-quant", "tool_version": __version__} | origin)
        path = folder.publish(files | {"SHA256SUMS": _sums(files, data)})
    warnings = _warnings(model, way, checkpoint.tensors)
    if options.get("accuracy_level", 1) != 1 and not any(node.kind == "MatMulNBits" for node in graph.nodes):
        warnings.append("the accuracy level changes nothing: no linear is multiplied by MatMulNBits")
    return WrittenOnnx(path, len(graph.nodes), data.size, options, tuple(warnings))


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
