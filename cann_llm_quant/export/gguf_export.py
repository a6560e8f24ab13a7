"""A quantized model as one GGUF file, `model-<TYPE>.gguf`, with the tokenizer's files beside it.

Codes are stored as they are (`gguf_blocks`), everything else in `float_type`. A few matrices are in memory at a time;
of what is made of a large one, such as an embedding, some rows. `export.json` beside the file says where it comes from,
and that `--overwrite` may replace the folder.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from gguf import GGMLQuantizationType as Kind
from jaxtyping import Shaped
from torch import Tensor

from cann_llm_quant import __version__
from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.checkpoint.companion_tokenizer import tokenizer_of
from cann_llm_quant.checkpoint.files import parse_json_object
from cann_llm_quant.checkpoint.gguf_writer import GgufWriter, TensorEntry, WrittenFile
from cann_llm_quant.checkpoint.journal import disk_errors
from cann_llm_quant.checkpoint.output_folder import OutputFolder
from cann_llm_quant.checkpoint.output_place import check_output
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.export.gguf_blocks import SCHEMES, encode
from cann_llm_quant.export.gguf_metadata import architecture_metadata, main_kind
from cann_llm_quant.export.gguf_plan import FLOAT_KINDS, Planned, check, plan_tensors, refusal
from cann_llm_quant.export.gguf_tokenizer import harmless_name, no_tokenizer, tokenizer_metadata
from cann_llm_quant.export.in_order import Job, in_order
from cann_llm_quant.export.layout import PackedModel
from cann_llm_quant.models.arch_reader import unclaimed
from cann_llm_quant.models.config_fields import token_ids
from cann_llm_quant.quant.number_formats import all_finite
from cann_llm_quant.quant.scheme import QuantizedTensor

FloatType = Literal["F16", "BF16", "F32"]
MARKER = "export.json"
ROWS = 8192
BLOCK_CODES = 1 << 20  # what is computed of so many stays in a core's cache
STREAMED_BYTES = 128 << 20
_DTYPES = {kind: dtype for dtype, kind in FLOAT_KINDS.items()}


@runtime_checkable
class PackedSource(Protocol):
    """What a checkpoint with linears in codes offers beside its float view."""

    def quantized(self, module: str) -> QuantizedTensor | None:
        """A linear in its stored codes, None when it is stored in float."""
        ...


@dataclass(frozen=True)
class WrittenGguf:
    """What was published: the folder, its GGUF file, bytes and number of tensors, what the user should know."""

    path: Path
    file: Path
    nbytes: int
    tensors: int
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class GgufPlan:
    """A file that can be written: its tensors, its metadata, and warnings."""

    tensors: list[Planned]
    metadata: dict[str, Any]
    warnings: list[str]

    @property
    def entries(self) -> list[TensorEntry]:
        """The table of tensors."""
        return [planned.entry for planned in self.tensors]

    @property
    def file_name(self) -> str:
        """Name of the file, after the type of most weights."""
        return f"model-{main_kind(self.entries).name}.gguf"


def export_gguf(
    checkpoint: Checkpoint,
    model: PackedModel,
    out: Path,
    *,
    float_type: FloatType | None = None,
    tokenizer: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
    overwrite: bool = False,
) -> WrittenGguf:
    """Write `model`, whose tensors `checkpoint` holds (a `PackedSource` where any are in codes), to the folder `out`.

    `float_type` is that of matrices in float, by default each one's own; `tokenizer` false leaves the vocabulary out.
    Raises UnsupportedError for what GGUF cannot hold, before any work; UsageError and ResumeError as `OutputFolder`
    does; CheckpointError for numbers that the file's types cannot hold.
    """
    check_output(out, overwrite=overwrite, sources=[checkpoint.path])
    plan = plan_gguf(checkpoint, model, float_type, tokenizer=tokenizer)
    asked = {"float_type": float_type, "tokenizer": tokenizer}
    origin = {"layout": "gguf", "source_fingerprint": checkpoint.fingerprint(), **asked}
    with OutputFolder.open(out, run=origin, overwrite=overwrite, sources=[checkpoint.path]) as folder:
        with disk_errors(folder.result, resumes=False):
            written = _write(plan, checkpoint, folder.result, progress)
        marker = {"tool": "cann-llm-quant", "tool_version": __version__, "source_name": checkpoint.path.name} | origin
        files = checkpoint.companion_files() | {MARKER: (json.dumps(marker, indent=2) + "\n").encode("utf-8")}
        path = folder.publish(files | {"SHA256SUMS": _sums(files, written)})
    return WrittenGguf(path, path / plan.file_name, written.nbytes, len(plan.tensors), tuple(plan.warnings))


def plan_gguf(
    checkpoint: Checkpoint, model: PackedModel, float_type: FloatType | None = None, *, tokenizer: bool = True
) -> GgufPlan:
    """What would be written, without reading a weight. Raises UnsupportedError for what GGUF cannot hold."""
    _refuse(model)
    warnings = check(model)
    left_out = [
        name for name in unclaimed(model.arch, checkpoint.tensors) if name != f"{model.arch.head_module}.weight"
    ]
    if left_out:
        warnings.append(f"{len(left_out)} tensors that the decoder does not read are left out: {left_out[0]}, ...")
    tensors = checkpoint.tensors

    def float_kind(name: str) -> Kind:
        return FLOAT_KINDS.get(tensors[name].dtype, Kind.F32) if float_type is None else Kind[float_type]

    planned = plan_tensors(model, float_kind)
    entries = [each.entry for each in planned]
    path = checkpoint.path
    name = path.stem if path.suffix == ".gguf" else path.name
    metadata = architecture_metadata(model.arch, entries, name)
    if tokenizer:
        words, notes = vocabulary(checkpoint, model.arch.vocab_size)
        metadata |= words | {"general.name": harmless_name(name, words["tokenizer.ggml.tokens"])}
        warnings += notes
    else:
        metadata |= no_tokenizer()
        warnings.append("the file has no vocabulary: only programs that hand llama.cpp token ids can run it, no server")
    return GgufPlan(planned, metadata, warnings)


def vocabulary(checkpoint: Checkpoint, rows: int) -> tuple[dict[str, Any], list[str]]:
    """The file's tokenizer for an embedding of `rows`, and warnings. Raises as `tokenizer_metadata` does."""
    return tokenizer_metadata(tokenizer_of(checkpoint), rows, _end_ids(checkpoint))


def _refuse(model: PackedModel) -> None:
    refused = {
        module: reason
        for module, scheme in model.schemes.items()
        if (reason := refusal(module, scheme, model.activations.get(module), model.shapes[module]))
    }
    if refused:
        module, reason = next(iter(refused.items()))
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise UnsupportedError(
            f"GGUF cannot hold {len(refused)} linears as they are: {module} {reason}{more}; add --requantize"
        )


def _end_ids(checkpoint: Checkpoint) -> list[int]:
    """Tokens that end a text, by the generation config where it says so, else by the model's."""
    content = checkpoint.companion_files().get("generation_config.json")
    where = f"{checkpoint.path}/generation_config.json"
    said = token_ids(parse_json_object(content, Path(where)), "eos_token_id", where) if content is not None else []
    return said or token_ids(checkpoint.config, "eos_token_id", f"{checkpoint.path}/config.json")


def _write(plan: GgufPlan, checkpoint: Checkpoint, folder: Path, progress: Callable[[int, int], None]) -> WrittenFile:
    jobs = (_job(planned, source, checkpoint) for planned in plan.tensors for source in planned.sources)
    with in_order(jobs) as made, GgufWriter(folder / plan.file_name, plan.metadata, plan.entries) as writer:
        for done, planned in enumerate(plan.tensors):
            value = [] if planned.value is None else [planned.value]
            sources = chain.from_iterable(islice(made, len(planned.sources)))
            writer.append(planned.entry, chain(value, sources))
            progress(done + 1, len(plan.tensors))
        return writer.finish()


def _job(planned: Planned, source: str, checkpoint: Checkpoint) -> Job[Iterable[Tensor]]:
    """What makes one source's part of a tensor; of a large one it is made as it is written, some rows at a time."""
    nbytes = checkpoint.tensors[source].nbytes

    def make() -> Iterable[Tensor]:
        blocks = _encoded(source, checkpoint, planned.entry.kind)
        if planned.interleaved_heads is not None:
            return [interleaved(torch.cat(list(blocks)), planned.interleaved_heads)]
        return blocks if nbytes > STREAMED_BYTES else list(blocks)

    return Job(nbytes, make)


def _encoded(source: str, checkpoint: Checkpoint, kind: Kind) -> Iterator[Shaped[Tensor, "..."]]:
    """One stored tensor in the file's type, in blocks of rows: an embedding and what is made of it are large."""
    if kind not in SCHEMES:
        for rows in torch.split(checkpoint.load(source), ROWS):
            yield _cast(source, rows, _DTYPES[kind]).contiguous()
        return
    module = source.removesuffix(".weight")
    weight = checkpoint.quantized(module) if isinstance(checkpoint, PackedSource) else None
    assert weight is not None, f"{module} is planned in codes"
    step = max(8, BLOCK_CODES // weight.shape[1] // 8 * 8)
    for start in range(0, weight.shape[0], step):
        yield encode(module, weight.rows(start, start + step))


def interleaved(data: Shaped[Tensor, "out *rest"], heads: int) -> Shaped[Tensor, "out *rest"]:
    """Rows (head, half, i) of a matrix or vector put at (head, i, half)."""
    return data.view(heads, 2, len(data) // heads // 2, -1).transpose(1, 2).reshape(data.shape)


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    cast = tensor.to(dtype)
    if not all_finite(cast):
        kind = str(dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{name} has numbers that {kind} cannot hold; choose another type for floats, such as F32"
        )
    return cast


def _sums(files: Mapping[str, bytes], written: WrittenFile) -> bytes:
    """What `sha256sum` would print of the folder's files."""
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    sums[written.path.name] = written.sha256
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())).encode("utf-8")
