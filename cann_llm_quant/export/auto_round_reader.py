"""A folder in AutoRound's own format: GPTQ's or AWQ's tensors under a section of its own.

    "quantization_config": {"quant_method": "auto-round", "packing_format": …, "bits": …, "group_size": …, "sym": …,
                            "data_type": "int", "extra_config": {name or pattern: overrides}, …}

| `packing_format` of AutoRound 0.16                  | tensors                         |
|-----------------------------------------------------|---------------------------------|
| `auto_round:auto_gptq`, `auto_round:gptq`, or none  | GPTQ version 1, zero points z-1 |
| `auto_round`, `auto_round:gptqmodel`                | GPTQ version 2, zero points z   |
| `auto_round:auto_awq`, `auto_round:awq`             | AWQ gemm                        |

The section is turned into the one that those layouts have, whose readers do the rest. Keys of `extra_config` are a
linear's whole name, or else patterns that may match anywhere in one; of names and patterns, names win. What is not
read: weights that are no integers in words of 32 bits (`mlx`, `llm_compressor`, `fp8_static`), quantized inputs, and
rotations, which the runtime would have to apply to the inputs.
"""

import re
from collections.abc import Mapping
from typing import Any

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.checkpoint.view import CheckpointView
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.export.awq_reader import AwqReader
from cann_llm_quant.export.gptq_reader import GptqReader
from cann_llm_quant.export.layout import Reader
from cann_llm_quant.models.config_fields import ConfigFields
from cann_llm_quant.shown import shown, shown_name

METHOD = "auto-round"
_SECTION = "quantization_config"
_PACKINGS: Mapping[str, str] = {
    "auto": "gptq",
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
}
# From this width on AutoRound means float.
_FLOAT_BITS = 16


class _Translated(CheckpointView):
    """The folder with its section in the words of another layout."""

    def __init__(self, inner: Checkpoint, section: Mapping[str, Any]) -> None:
        super().__init__(inner)
        self._config = {**inner.config, _SECTION: dict(section)}

    @property
    def config(self) -> dict[str, Any]:
        """The config with the translated section."""
        return self._config


def auto_round_reader(checkpoint: Checkpoint) -> Reader:
    """The reader of the layout whose tensors the folder has.

    Raises CheckpointError for a section that contradicts itself or the tensors, UnsupportedError for what this version
    cannot read.
    """
    section = ConfigFields(checkpoint.config).section(_SECTION)
    values = {} if section is None else section.values
    fields = ConfigFields(values, f"{checkpoint.path}/config.json: {_SECTION}")
    packing = fields.text("packing_format", "auto")
    layout = _PACKINGS.get(packing)
    if layout is None:
        raise UnsupportedError(
            f"{fields.where}: AutoRound's packing_format {shown(packing)} is not read, only {', '.join(_PACKINGS)}; "
            "save the model with AutoRound's format auto_gptq, auto_awq or llm_compressor"
        )
    if fields.given("rotation_config"):
        raise UnsupportedError(
            f"{fields.where}: rotation_config says that inputs are rotated, which is not read; give the float model"
        )
    _check_numbers(fields)
    overrides = _overrides(fields)
    if layout == "awq":
        return AwqReader(_Translated(checkpoint, _awq_section(fields, overrides)))
    return GptqReader(_Translated(checkpoint, _gptq_section(checkpoint, fields, overrides, layout)))


def _check_numbers(fields: ConfigFields) -> None:
    """That codes are integers and inputs stay in float; `fields` is the section or one of its overrides."""
    kind = fields.text("data_type", "int")
    if kind != "int":
        raise UnsupportedError(f"{fields.where}: AutoRound's data_type {shown(kind)} is not read, only int")
    if fields.integer("act_bits", default=_FLOAT_BITS) < _FLOAT_BITS:
        raise UnsupportedError(f"{fields.where}: act_bits says that inputs are quantized, which is not read")


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
    section: dict[str, Any] = {"quant_method": "awq", "version": "gemm", "bits": fields.values.get("bits")}
    for key in ("group_size", "sym"):
        if not any(own.given(key) for own in overrides.values()):
            section[key] = fields.values.get(key)
    return section


def _gptq_section(
    checkpoint: Checkpoint, fields: ConfigFields, overrides: Mapping[str, ConfigFields], version: str
) -> dict[str, Any]:
    """Widths are left out, as shapes tell them."""
    section: dict[str, Any] = {"quant_method": "gptq", "checkpoint_format": version}
    section |= {key: fields.values.get(key) for key in ("group_size", "sym")}
    names, patterns = {}, {}
    for name, own in overrides.items():
        said = {key: own.values[key] for key in ("group_size", "sym") if own.given(key)}
        if f"{name}.qweight" in checkpoint.tensors:
            names[f"+:{re.escape(name)}$"] = said
        else:
            patterns[f"+:.*(?:{name})"] = said
    return section | {"dynamic": {**names, **patterns}}
