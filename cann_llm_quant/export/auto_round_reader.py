"""A folder in AutoRound's own format: GPTQ's or AWQ's tensors under a section of its own.

    "quantization_config": {"quant_method": "auto-round", "packing_format": …, "bits": …, "group_size": …, "sym": …,
                            "data_type": "int", "extra_config": {name or pattern: overrides}, …}

| `packing_format` since AutoRound 0.5                | `backend` before (method `intel/auto-round`) | tensors        |
|-----------------------------------------------------|----------------------------------------------|----------------|
| `auto_round:auto_gptq`, `auto_round:gptq`, or none  | with `gptq`, or none                         | GPTQ version 1 |
| `auto_round`, `auto_round:gptqmodel`                | `auto_round:exllamav2`, `auto_round:triton`  | GPTQ version 2 |
| `auto_round:auto_awq`, `auto_round:awq`             | with `awq`                                   | AWQ gemm       |

The section is turned into what the readers of those layouts ask of theirs, and they do the rest. Keys of `extra_config`
are a linear's whole name, or else patterns that may match anywhere in one; of names and patterns, names win. What is
not read: weights that are no integers in words of 32 bits (`mlx`, `llm_compressor`, `fp8_static`), quantized inputs,
and rotations, which the runtime would have to apply to the inputs.
"""

import re
from collections.abc import Mapping
from typing import Any

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.export.awq_reader import AwqReader
from cann_llm_quant.export.foreign_patterns import foreign_pattern
from cann_llm_quant.export.gptq_config import GptqConfig, given_group_size
from cann_llm_quant.export.gptq_reader import GptqReader
from cann_llm_quant.export.layout import Reader
from cann_llm_quant.models.config_fields import ConfigFields
from cann_llm_quant.shown import shown, shown_name

METHOD = "auto-round"
OLD_METHOD = "intel/auto-round"
_SECTION = "quantization_config"
_AWQ = 0
# The version of GPTQ that the tensors are, or AWQ.
_PACKINGS: Mapping[str, int] = {
    "auto": 1,
    "auto_round:auto_gptq": 1,
    "auto_round:gptq": 1,
    "auto_round": 2,
    "auto_round:gptqmodel": 2,
    "auto_round:auto_awq": _AWQ,
    "auto_round:awq": _AWQ,
}
_ROTATIONS = ("rotation_config", "spinquant_config")
# From this width on AutoRound means float.
_FLOAT_BITS = 16


def auto_round_reader(checkpoint: Checkpoint) -> Reader:
    """The reader of the layout whose tensors the folder has.

    Raises CheckpointError for a section that contradicts itself or the tensors, UnsupportedError for what this version
    cannot read.
    """
    section = ConfigFields(checkpoint.config).section(_SECTION)
    values = {} if section is None else section.values
    fields = ConfigFields(values, f"{checkpoint.path}/config.json: {_SECTION}")
    packing = _packing(fields)
    if packing not in _PACKINGS:
        raise UnsupportedError(
            f"{fields.where}: AutoRound's packing_format {shown(packing)} is not read, only {', '.join(_PACKINGS)}; "
            "save the model with AutoRound's format auto_gptq, auto_awq or llm_compressor"
        )
    _check_numbers(fields)
    overrides = _overrides(fields)
    version = _PACKINGS[packing]
    if version == _AWQ:
        return AwqReader(checkpoint, ConfigFields(_awq_section(fields, overrides), fields.where))
    return GptqReader(checkpoint, _gptq_config(checkpoint, fields, overrides, version))


def _packing(fields: ConfigFields) -> str:
    """`packing_format`, or what `backend` said before there was one; later a backend only asks for a kernel."""
    backend = fields.values.get("backend")
    old = fields.values.get("quant_method") == OLD_METHOD and not fields.given("packing_format")
    if not old or not isinstance(backend, str):
        return fields.text("packing_format", "auto")
    known = (("awq", "auto_round:auto_awq"), ("gptq", "auto_round:auto_gptq"), ("auto_round:", "auto_round"))
    return next((packing for part, packing in known if part in backend), backend)


def _check_numbers(fields: ConfigFields) -> None:
    """That codes are integers and inputs stay as they are; `fields` is the section or one of its overrides."""
    kind = fields.text("data_type", "int")
    if kind != "int":
        raise UnsupportedError(f"{fields.where}: AutoRound's data_type {shown(kind)} is not read, only int")
    if fields.integer("act_bits", default=_FLOAT_BITS) < _FLOAT_BITS:
        raise UnsupportedError(f"{fields.where}: act_bits says that inputs are quantized, which is not read")
    for key in _ROTATIONS:
        if fields.values.get(key):
            raise UnsupportedError(
                f"{fields.where}: {key} says that inputs are rotated, which is not read; give the float model"
            )


def _overrides(fields: ConfigFields) -> dict[str, ConfigFields]:
    """What `extra_config` says of linears in codes, by name or pattern."""
    extra = fields.section("extra_config")
    found = {}
    for name, values in ({} if extra is None else extra.values).items():
        where = f"{fields.where}.extra_config: {shown_name(name)}"
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{where} must be an object")
        own = ConfigFields(values, where)
        if own.integer("bits", default=1) < _FLOAT_BITS:
            _check_numbers(own)
            found[name] = own
    return found


def _awq_section(fields: ConfigFields, overrides: Mapping[str, ConfigFields]) -> dict[str, Any]:
    """Where overrides differ from the rest, nothing is claimed: shapes and zero points tell."""
    section: dict[str, Any] = {"version": "gemm", "bits": fields.values.get("bits")}
    for key in ("group_size", "sym"):
        if not any(own.given(key) for own in overrides.values()):
            section[key] = fields.values.get(key)
    return section


def _gptq_config(
    checkpoint: Checkpoint, fields: ConfigFields, overrides: Mapping[str, ConfigFields], version: int
) -> GptqConfig:
    """Widths are left out, as shapes tell them. AutoRound passes over patterns that say nothing."""
    named = {name: own for name, own in overrides.items() if f"{name}.qweight" in checkpoint.tensors}
    patterns = {name: own for name, own in overrides.items() if name not in named and own.values}
    return GptqConfig(
        version=version,
        group_size=given_group_size(fields),
        symmetric=fields.optional_flag("sym"),
        overrides=tuple((_anywhere(text, own.where), own) for text, own in patterns.items()),
        named=named,
    )


def _anywhere(text: str, where: str) -> re.Pattern[str]:
    """A pattern that matches a whole name from its start where `text` matches any part of it.

    AutoRound puts `.*` around every key; without them the pattern says the same and costs less.
    """
    bare = re.sub(r"\A(?:\.\*)+(?![?+*{])", "", text)
    bare = re.sub(r"(?<!\\)(?:\.\*)+\Z", "", bare)
    return foreign_pattern(f".*(?:{bare})", where)
