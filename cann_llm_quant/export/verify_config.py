"""Whether what describes an output's tensors tells the truth about them: config.json, inference_config.json,
quant_model_description.json.
"""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cann_llm_quant.checkpoint.base import Checkpoint, TensorInfo
from cann_llm_quant.checkpoint.files import file_names, parse_json_object, read_bytes
from cann_llm_quant.export.compressed_tensors_config import SECTION_NAMES, compressed_tensors_config
from cann_llm_quant.export.compressed_tensors_reader import CompressedTensorsReader
from cann_llm_quant.export.kv_scales import is_kv_scale
from cann_llm_quant.export.mlx_folder import is_mlx
from cann_llm_quant.export.native_reader import NativeReader
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.export.verify_files import is_inside
from cann_llm_quant.export.verify_findings import Findings, listed
from cann_llm_quant.models import unclaimed
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.models.config_fields import ConfigFields
from cann_llm_quant.models.rope_config import rope_from_config
from cann_llm_quant.quant.ranges import SCALE_DTYPES
from cann_llm_quant.quant.scheme import Scheme
from cann_llm_quant.shown import shown, shown_name

_LAYER = re.compile(r"(?:^|.*\.)(?:layers|h|blocks)\.(\d{1,9})\.")
_DESCRIPTION = "quant_model_description"
_METHOD = "compressed-tensors"
_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_PREDICTION = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


def check_config(inner: Checkpoint, findings: Findings) -> None:
    """`config.json` against the stored tensors: rope and dtype in both spellings, layers, extra layers, ties."""
    where = f"{inner.path}/config.json"
    fields = ConfigFields(inner.config, where)
    with findings.caught(where):
        positions = fields.integer("max_position_embeddings", default=2048)
        # families that turn a part of each head know the field, the others refuse it elsewhere
        rope_from_config(fields, 10000.0, positions, partial_rotary=True)
    with findings.caught(where):
        fields.text("dtype", fields.text("torch_dtype", ""))
    _check_dtype(inner, fields, findings)
    _check_spellings(inner.config, findings)
    check_layers(inner, fields, findings)


def _check_spellings(config: Mapping[str, Any], findings: Findings) -> None:
    """Readers that know one spelling only take a default in silence where it is missing (C30)."""
    pairs = (("rope_theta", "rope_parameters"), ("torch_dtype", "dtype"))
    for old, new in pairs:
        present = [name for name in (old, new) if config.get(name) is not None]
        if len(present) == 1:
            absent = new if present == [old] else old
            findings.remark(f"config.json has {present[0]} but not {absent}: readers of the other take their default")


def _check_dtype(inner: Checkpoint, fields: ConfigFields, findings: Findings) -> None:
    said = {name: fields.values[name] for name in ("dtype", "torch_dtype") if fields.given(name)}
    if len(set(map(str, said.values()))) > 1:
        findings.add(
            fields.where,
            f"dtype={shown_name(str(said['dtype']))} contradicts torch_dtype={shown_name(str(said['torch_dtype']))}",
            "keep one",
        )
        return
    sizes: Counter[torch.dtype] = Counter()
    for info in inner.tensors.values():
        if info.dtype in SCALE_DTYPES and info.name.endswith("weight") and not is_kv_scale(info.name):
            sizes[info.dtype] += info.nbytes
    stored = str(sizes.most_common(1)[0][0]).removeprefix("torch.") if sizes else ""
    for name, value in said.items():
        if stored and str(value).removeprefix("torch.") != stored:
            findings.add(
                fields.where,
                f"{name}={shown_name(str(value))}, but most float weights are {stored}",
                "correct the field",
            )


def check_layers(inner: Checkpoint, fields: ConfigFields, findings: Findings) -> None:
    """The number of layers, and those that predict further tokens, against the tensors' names."""
    stored = {int(match[1]) for name in inner.tensors if (match := _LAYER.match(name))}
    with findings.caught(fields.where):
        said = fields.optional_integer("num_hidden_layers", "n_layer", "num_layers")
        extra = max((fields.optional_integer(name, minimum=0) or 0 for name in _PREDICTION), default=0)
        missing = next((layer for layer in range(said or 0) if layer not in stored), None)
        if missing is not None:
            findings.add(
                fields.where, f"says {said} layers, but no tensor is of layer {missing}", "one of the files is wrong"
            )
        beyond = [name for name in inner.tensors if "mtp" in name or _layer_of(name) >= (said or 1 << 30)]
        if extra and not beyond:
            findings.add(
                fields.where,
                f"announces {extra} layers that predict further tokens, of which no tensor is stored",
                "set the field to 0, or add the tensors",
            )
        unannounced = [name for name in beyond if not extra and "mtp" not in name]
        if unannounced:
            findings.add(
                fields.where, f"says {said} layers, but files hold {listed(unannounced)}", "one of the files is wrong"
            )


def _layer_of(name: str) -> int:
    match = _LAYER.match(name)
    return int(match[1]) if match else -1


def remark_unused(checkpoint: Checkpoint, arch: Arch, findings: Findings) -> None:
    """Tensors that the architecture has no place for, such as misspelt ones, and pickled weights beside the others."""
    head = f"{arch.head_module}.weight"
    names = [
        name
        for name in unclaimed(arch, checkpoint.tensors)
        if not is_kv_scale(name) and not name.endswith("rotary_emb.inv_freq") and not (arch.tied_head and name == head)
    ]
    if names:
        findings.remark(f"{len(names)} tensors have no place in the architecture: {listed(names)}")
    pickled = [n for n in file_names(checkpoint.path) if n.endswith(_PICKLED)] if checkpoint.path.is_dir() else []
    if pickled:
        findings.remark(
            f"pickled files, which may run code where they are loaded, were not looked into: {listed(pickled)}"
        )


def check_ignored(inner: Checkpoint, arch: Arch, findings: Findings) -> None:
    """Whether a compressed-tensors config knows every linear that is stored in float (C22).

    A runtime builds a quantized linear for each that a target matches, and then misses its scales.
    """
    where = f"{inner.path}/config.json"
    section = next((inner.config[name] for name in SECTION_NAMES if name in inner.config), None)
    # MLX writes a section of the same name without a method; it has no groups that could match anything
    if not isinstance(section, Mapping) or section.get("quant_method", _METHOD) != _METHOD or is_mlx(inner.config):
        return
    with findings.caught(where):
        config = compressed_tensors_config(inner.config, where)
        linears = [spec.module for layer in arch.layers for spec in layer.linears if spec.quantizable]
        linears += [] if arch.tied_head else [arch.head_module]
        in_float = [m for m in linears if _is_float(inner.tensors.get(f"{m}.weight")) and config.group_of(m)]
        if in_float:
            findings.add(
                where,
                f"config_groups match {len(in_float)} linears that are stored in float: {listed(in_float)}",
                "list their names in ignore",
            )


def _is_float(info: TensorInfo | None) -> bool:
    return info is not None and info.dtype in (*SCALE_DTYPES, torch.float64)


def check_documents(checkpoint: PackedCheckpoint[Any], findings: Findings) -> None:
    """`inference_config.json` against `quantization_config`: the same linears in the same schemes."""
    reader, inner = checkpoint.reader, checkpoint.inner
    if not isinstance(reader, NativeReader) or not any(name in inner.config for name in SECTION_NAMES):
        return
    where = f"{inner.path}/inference_config.json"
    with findings.caught(f"{inner.path}/config.json"):
        other = CompressedTensorsReader(inner)
        for module in sorted(reader.linears.keys() ^ other.linears.keys()):
            side = "inference_config.json" if module in reader.linears else "quantization_config"
            findings.add(where, f"{module} is quantized by {side} alone", "one of the two files is stale")
        for module in reader.linears.keys() & other.linears.keys():
            mine, theirs = reader.linears[module], other.linears[module]
            if _as_stored(mine.scheme) != _as_stored(theirs.scheme) or mine.activations != theirs.activations:
                findings.add(
                    where,
                    f"{module} is {mine.scheme.label()} there and {theirs.scheme.label()} in quantization_config, or "
                    "inputs differ",
                    "one of the two files is stale",
                )


def _as_stored(scheme: Scheme) -> Scheme:
    """Packed files show one scale a tensor as one a row."""
    return Scheme(scheme.dtype, scheme.symmetric, "channel", None) if scheme.strategy == "tensor" else scheme


def check_description(folder: Path, tensors: Mapping[str, TensorInfo], findings: Findings) -> None:
    """An Ascend model's description against the tensors, both ways (C25), and the paths in it."""
    for path in (folder / name for name in file_names(folder) if name.startswith(_DESCRIPTION)):
        document: dict[str, Any] = {}
        with findings.caught(str(path)):
            document = parse_json_object(read_bytes(path), path)
        lacking = [name for name in tensors if name not in document]
        if lacking:
            findings.add(
                str(path),
                f"lacks {len(lacking)} stored tensors: {listed(lacking)}",
                "runtimes fail on a linear that it does not name; write the model again",
            )
        named = [name for name, value in document.items() if "." in name and isinstance(value, str)]
        # a head that is tied is named without being stored, and attention modules have a type of their own
        absent = [n for n in named if n not in tensors and not n.endswith((".quant_type", "lm_head.weight"))]
        if absent:
            findings.add(str(path), f"names {len(absent)} tensors that no file holds: {listed(absent)}", "fetch them")
        for name in _paths(document.get("optional")):
            if not is_inside(name):
                findings.add(str(path), f"names the file {shown(name)}, which leads out of the folder", "remove it")


def _paths(value: Any) -> list[str]:
    """The strings at the ends of nested objects."""
    if isinstance(value, Mapping):
        return [text for part in value.values() for text in _paths(part)]
    return [value] if isinstance(value, str) and value.endswith(".safetensors") else []
