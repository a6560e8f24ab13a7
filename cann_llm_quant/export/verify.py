"""An output examined as a stranger would: nothing that its writer knew is taken for granted.

The checks go from what is cheap and certain to what is costly, and stop where the next cannot be made any more:

    files     every header, index and name, SHA256SUMS            verify_files.py
    config    config.json and other descriptions against tensors  verify_config.py
    numbers   every code, scale and float tensor                  verify_weights.py
    weights   against the source, where one is given              verify_weights.py, verify_origin.py
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.checkpoint.files import file_names
from cann_llm_quant.checkpoint.gguf_reader import is_gguf_file
from cann_llm_quant.checkpoint.hub import locate
from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.export.kv_cache import kv_plan
from cann_llm_quant.export.packed import open_source
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.export.verify_config import (
    check_config,
    check_description,
    check_documents,
    check_ignored,
    check_layers,
    remark_unused,
)
from cann_llm_quant.export.verify_files import (
    check_entries,
    check_index,
    check_links,
    check_shards,
    check_sums,
    check_unread,
)
from cann_llm_quant.export.verify_findings import Findings, Tick
from cann_llm_quant.export.verify_json import check_json_files
from cann_llm_quant.export.verify_onnx import check_onnx, onnx_files
from cann_llm_quant.export.verify_origin import compare_architectures, compare_configs, compare_tokenizers
from cann_llm_quant.export.verify_rotation import compare_lengths, is_rotated, rotated_alike
from cann_llm_quant.export.verify_section import check_section
from cann_llm_quant.export.verify_tokens import check_token_ids, check_tokenizer_files
from cann_llm_quant.export.verify_weight_only import check_weight_only
from cann_llm_quant.export.verify_weights import WeightError, check_numbers, compare_weights
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.models.config_fields import ConfigFields


@dataclass
class Verification:
    """What was examined and what was found; `errors` are the matrices' distances from the source.

    `stages` names the checks that were made to their end.
    """

    path: Path
    findings: Findings = field(default_factory=Findings)
    layout: str = "unknown"
    tensors: int = 0
    sums: int = 0
    linears: int = 0
    schemes: dict[str, int] = field(default_factory=dict)
    source: str | None = None
    errors: list[WeightError] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether no fault was found."""
        return not self.findings.faults


def verify(
    model: str,
    against: str | None = None,
    *,
    allow_pickle: bool = False,
    tick: Tick = lambda done, total, what: None,
) -> Verification:
    """Examine a folder, GGUF file or hub id; `against` is the model that it was made from, float or quantized.

    `allow_pickle` lets `against` be read from `.bin` files.

    `tick` is told of progress. Raises InputError's kinds only where `model` or `against` cannot be found or `against`
    cannot be opened; everything else is a finding.
    """
    result = Verification(_openable(locate(model)))
    if against is None:
        _examine(result, None, tick)
    else:
        with open_source(against, allow_pickle=allow_pickle, dtype=torch.float32) as source:
            _examine(result, source, tick)
    tick(1, 1, "")
    return result


def _openable(path: Path) -> Path:
    """`path`, where it may be a model at all. Raises CheckpointError otherwise: a slip, and no damaged output."""
    model = path.is_file() and (path.suffix == ".onnx" or is_gguf_file(path))
    if not model and not path.is_dir():
        raise CheckpointError(
            f"{path} is neither a folder nor a GGUF or ONNX file; pass the folder that holds config.json"
        )
    if path.is_dir() and not file_names(path):
        raise CheckpointError(f"{path} holds no files; pass the folder that holds config.json")
    return path


def _examine(result: Verification, source: Checkpoint | None, tick: Tick) -> None:
    path, findings = result.path, result.findings
    if path.is_dir():
        result.tensors = _examine_files(result, tick)
    models = onnx_files(path)
    if models:
        _examine_onnx(result, models, source, tick)
        return
    if findings.faults and not _opens(path):
        return
    with findings.caught(str(path)), open_source(str(path), dtype=torch.float32) as ours:
        arch = _examine_config(result, ours)
        result.linears = check_numbers(ours, findings, tick)
        result.stages.append("numbers")
        if source is not None and arch is not None:
            _compare(result, ours, source, arch, tick)


def _examine_files(result: Verification, tick: Tick) -> int:
    path, findings = result.path, result.findings
    check_json_files(path, findings)
    check_entries(path, findings)
    check_links(path, findings)
    shards = check_shards(path, findings)
    check_index(path, shards, findings)
    check_unread(path, shards, findings)
    result.sums = check_sums(path, findings, tick)
    stored = {name: info for tensors in shards.values() for name, info in tensors.items()}
    check_description(path, stored, findings)
    result.stages.append("files")
    return len(stored)


def _examine_onnx(result: Verification, models: list[Path], source: Checkpoint | None, tick: Tick) -> None:
    result.layout = "onnx"
    result.tensors = sum(check_onnx(model, result.findings, tick) for model in models)
    result.stages.append("numbers")
    if source is not None:
        result.findings.remark("weights of an ONNX model are not compared with a source")


def _opens(path: Path) -> bool:
    """Whether the files can be read in spite of faults, such as a wrong digest."""
    probe = Findings()
    with probe.caught(str(path)), open_source(str(path)):
        pass
    return not probe.faults


def _examine_config(result: Verification, ours: Checkpoint) -> Arch | None:
    """The architecture map, None where config and tensors contradict each other."""
    findings, arch = result.findings, None
    inner = ours.inner if isinstance(ours, PackedCheckpoint) else ours
    result.tensors = len(inner.tensors)
    if isinstance(ours, PackedCheckpoint):
        result.layout = ours.reader.layout
        result.schemes = dict(Counter(linear.scheme.label() for linear in ours.reader.linears.values()))
        check_section(ours, findings)
        check_documents(ours, findings)
    else:
        result.layout = "float"
    if (inner.path / "config.json").is_file():
        check_config(inner, findings)
        check_tokenizer_files(inner.path, findings)
    else:
        check_layers(inner, ConfigFields(inner.config, str(inner.path)), findings)
    with findings.caught(f"{inner.path}/config.json"):
        arch = arch_from_checkpoint(ours)
        remark_unused(ours, arch, findings)
        check_ignored(inner, arch, findings)
        check_token_ids(inner, arch, findings)
        if isinstance(ours, PackedCheckpoint):
            check_weight_only(ours, arch, findings)
        kv_plan(ours)  # refuses scales that are missing, damaged or of no layer
    result.stages.append("config")
    return arch


def _compare(result: Verification, ours: Checkpoint, source: Checkpoint, arch: Arch, tick: Tick) -> None:
    result.source = source.reader.layout if isinstance(source, PackedCheckpoint) else "float"
    findings = result.findings
    with findings.caught(str(source.path)):
        other = arch_from_checkpoint(source)
        gguf = any(isinstance(one, PackedCheckpoint) and one.reader.layout == "gguf" for one in (ours, source))
        whole = not gguf and ours.path.is_dir() and source.path.is_dir()
        compare_architectures(arch, other, findings, whole=whole)
        if whole:
            compare_configs(ours.config, source.config, findings)
            compare_tokenizers(ours, source, findings)
        if is_rotated(ours, source, other):
            rotated = rotated_alike(ours, source, other)
            if rotated is None:
                findings.remark("rotated by what is recorded nowhere: only lengths of rows were compared")
                compare_lengths(ours, source, arch, findings)
                return
            findings.remark("rotated: compared with the source in the same rotation")
            source = rotated
        _check_origin(ours, source, findings)
        result.errors = compare_weights(ours, source, arch, findings, tick)
        result.stages.append("weights")


def _check_origin(ours: Checkpoint, source: Checkpoint, findings: Findings) -> None:
    """A remark where the output names another source than the given one."""
    inference: Any = getattr(getattr(ours, "reader", None), "inference", None)
    if inference is None:
        return
    said = inference.provenance
    if said.source_fingerprint and said.source_fingerprint != source.fingerprint():
        findings.remark(f"the output says that it was made from {said.source_name}, with another fingerprint")
