"""What the section of a folder in AutoRound's own format says, by linear.

    "quantization_config": {"quant_method": "auto-round", "packing_format": …, "bits": …, "group_size": …, "sym": …,
                            "data_type": "int", "extra_config": {name or pattern: overrides}, …}

Keys of `extra_config` are a linear's whole name, or else patterns that may match anywhere in one; of names and
patterns, names win, and of patterns the first. A linear of 16 bits is stored in float.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.export.foreign_patterns import foreign_pattern
from cann_llm_quant.models.config_fields import ConfigFields
from cann_llm_quant.shown import shown, shown_name

METHOD = "auto-round"
OLD_METHOD = "intel/auto-round"
_SECTION = "quantization_config"
# From this width on AutoRound means float.
FLOAT_BITS = 16
_ROTATIONS = ("rotation_config", "spinquant_config")


@dataclass(frozen=True)
class AutoRoundConfig:
    """The section: what it says of all linears, and overrides by whole names and by patterns."""

    fields: ConfigFields
    named: Mapping[str, ConfigFields]
    patterns: tuple[tuple[re.Pattern[str], ConfigFields], ...]

    @staticmethod
    def of(checkpoint: Checkpoint) -> "AutoRoundConfig":
        """Of a model folder.

        Raises CheckpointError for what is none, UnsupportedError for codes that are no integers, quantized inputs and
        rotations.
        """
        fields = section_of(checkpoint)
        _check_numbers(fields)
        named, patterns = {}, []
        for text, own in _overrides(fields).items():
            if f"{text}.qweight" in checkpoint.tensors or f"{text}.weight" in checkpoint.tensors:
                named[text] = own
            elif own.values:  # AutoRound passes over patterns that say nothing
                patterns.append((_anywhere(text, own.where), own))
        return AutoRoundConfig(fields, named, tuple(patterns))

    def in_codes(self) -> list[ConfigFields]:
        """The overrides that leave their linears in codes."""
        everywhere = [*self.named.values(), *(own for _, own in self.patterns)]
        return [own for own in everywhere if not is_float(own)]

    def bits(self, module: str) -> int | None:
        """The width that is said of a linear; None where none is."""
        own = self._override(module)
        return own.optional_integer("bits") or self.fields.optional_integer("bits")

    def group_size(self, module: str) -> int | None:
        """The columns of a group that are said of a linear (-1: a whole row); None where none are."""
        own = self._override(module)
        return own.optional_integer("group_size", minimum=-1) or self.fields.optional_integer("group_size", minimum=-1)

    def _override(self, module: str) -> ConfigFields:
        own = self.named.get(module)
        if own is None:
            own = next((found for pattern, found in self.patterns if pattern.match(module)), None)
        return ConfigFields({}) if own is None else own


def section_of(checkpoint: Checkpoint) -> ConfigFields:
    """The section as it is. Raises CheckpointError where it is no object, UnsupportedError for rotated inputs."""
    section = ConfigFields(checkpoint.config).section(_SECTION)
    fields = ConfigFields({} if section is None else section.values, f"{checkpoint.path}/config.json: {_SECTION}")
    _check_rotation(fields)
    return fields


def is_float(own: ConfigFields) -> bool:
    """Whether an override leaves its linears in float."""
    return own.integer("bits", default=1) >= FLOAT_BITS


def _check_numbers(fields: ConfigFields) -> None:
    """That codes are integers and inputs stay as they are; `fields` is the section or one of its overrides."""
    kind = fields.text("data_type", "int")
    if kind != "int":
        raise UnsupportedError(f"{fields.where}: AutoRound's data_type {shown(kind)} is not read, only int")
    if fields.integer("act_bits", default=FLOAT_BITS) < FLOAT_BITS:
        raise UnsupportedError(f"{fields.where}: act_bits says that inputs are quantized, which is not read")
    _check_rotation(fields)


def _check_rotation(fields: ConfigFields) -> None:
    for key in _ROTATIONS:
        if fields.values.get(key):
            raise UnsupportedError(
                f"{fields.where}: {key} says that inputs are rotated, which is not read; give the float model"
            )


def _overrides(fields: ConfigFields) -> dict[str, ConfigFields]:
    extra = fields.section("extra_config")
    found = {}
    for name, values in ({} if extra is None else extra.values).items():
        where = f"{fields.where}.extra_config: {shown_name(name)}"
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{where} must be an object")
        own = ConfigFields(values, where)
        if not is_float(own):
            _check_numbers(own)
        found[name] = own
    return found


def _anywhere(text: str, where: str) -> re.Pattern[str]:
    """A pattern that matches a whole name from its start where `text` matches any part of it.

    AutoRound puts `.*` around every key; without them the pattern says the same and costs less.
    """
    bare = re.sub(r"\A(?:\.\*)+(?![?+*{])", "", text)
    bare = re.sub(r"(?<!\\)(?:\.\*)+\Z", "", bare)
    return foreign_pattern(f".*(?:{bare})", where)
