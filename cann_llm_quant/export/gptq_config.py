"""What GPTQ's config says, written and read.

`config.json` has the section `quantization_config`, `quantize_config.json` the same one for older tools:

    {"quant_method": "gptq", "bits": …, "group_size": … (-1: a whole row), "sym": …, "desc_act": …, "lm_head": …,
     "checkpoint_format": "gptq" | "gptq_v2", "pack_dtype": "int32", "dynamic": {pattern: overrides}, "meta": {…}}

`dynamic` says by pattern, which a full name must begin with, what differs from the rest: an object of overrides (after
`+:` or nothing), or a linear left in float (after `-:`). Fused names (`qkv_proj`, `gate_up_proj`) are written among the
patterns because vLLM asks for those. transformers reads no `dynamic`, only `modules_in_block_to_quantize`, the names of
the quantized linears of every layer, so that is written as well where all layers agree.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cann_llm_quant import __version__
from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.checkpoint.files import file_names, parse_json_object, read_bytes
from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.export.foreign_patterns import foreign_pattern
from cann_llm_quant.export.layout import PackedModel
from cann_llm_quant.export.weight_only import most_common
from cann_llm_quant.models.arch import Layer
from cann_llm_quant.models.config_fields import ConfigFields
from cann_llm_quant.quant.scheme import Scheme
from cann_llm_quant.shown import shown

SIDE_FILE = "quantize_config.json"
_SECTION = "quantization_config"
_FUSED_NAMES = {("q", "k", "v"): "qkv_proj", ("gate", "up"): "gate_up_proj"}


def gptq_section(model: PackedModel, layout: str) -> dict[str, Any]:
    """The section for a model in `layout`, `gptq` or `gptq_v2`."""
    base = most_common(dict(model.schemes))
    section: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": base.bits,
        "group_size": _group_size(base),
        "desc_act": not model.scattered.isdisjoint(model.schemes),
        "sym": base.symmetric,
        "lm_head": model.arch.head_module in model.schemes,
        "checkpoint_format": layout,
        "pack_dtype": "int32",
        "dynamic": _dynamic(model, base),
        "meta": {"quantizer": [f"cann-llm-quant:{__version__}"]},
    }
    names = same_in_all_layers(model) if float_in_layers(model) else None
    return section if names is None else section | {"modules_in_block_to_quantize": [names]}


def _dynamic(model: PackedModel, base: Scheme) -> dict[str, dict[str, Any]]:
    """Patterns of what differs from `base`."""
    schemes: dict[str, Scheme | None] = {module: model.schemes.get(module) for module in _linears(model)}
    for layer in model.arch.layers:
        for group, name in _fused_names(layer).items():
            members = {schemes[module] for module in group}
            if len(members) == 1:
                schemes[name] = members.pop()
    if model.arch.head_module in model.schemes:
        schemes[model.arch.head_module] = model.schemes[model.arch.head_module]
    overrides: dict[str, dict[str, Any]] = {}
    for module, scheme in schemes.items():
        if scheme is None:
            overrides[f"-:^{re.escape(module)}$"] = {}
        elif scheme != base:
            overrides[f"+:^{re.escape(module)}$"] = {
                "bits": scheme.bits,
                "group_size": _group_size(scheme),
                "sym": scheme.symmetric,
            }
    return overrides


def _fused_names(layer: Layer) -> dict[tuple[str, ...], str]:
    """The name under which vLLM loads each fusion group's modules as one."""
    names = {}
    for group in layer.fusion_groups:
        fused = _FUSED_NAMES.get(tuple(role.rpartition(".")[2] for role in group))
        modules = tuple(layer.linear(role).module for role in group)
        if fused is not None:
            names[modules] = f"{modules[0].rpartition('.')[0]}.{fused}"
    return names


def _linears(model: PackedModel) -> list[str]:
    return [spec.module for layer in model.arch.layers for spec in layer.linears]


def float_in_layers(model: PackedModel) -> bool:
    """Whether any linear of the layers is stored in float."""
    return any(module not in model.schemes for module in _linears(model))


def same_in_all_layers(model: PackedModel) -> list[str] | None:
    """Names, below a layer's, of its quantized linears where every layer has the same ones in codes; else None."""
    names = [
        [spec.module.partition(f".{layer.index}.")[2] for spec in layer.linears if spec.module in model.schemes]
        for layer in model.arch.layers
    ]
    return names[0] if all(own == names[0] for own in names) else None


def _group_size(scheme: Scheme) -> int:
    return -1 if scheme.group_size is None else scheme.group_size


@dataclass(frozen=True)
class GptqConfig:
    """The section as far as tensors do not tell it: `version` of zero points, symmetry, group sizes, by module.

    None is what the section does not say. `named` are overrides by a linear's whole name, before those by pattern.
    """

    version: int
    group_size: int | None
    symmetric: bool | None
    overrides: tuple[tuple[re.Pattern[str], ConfigFields], ...]
    named: Mapping[str, ConfigFields] = field(default_factory=dict)

    @staticmethod
    def of(checkpoint: Checkpoint) -> "GptqConfig":
        """Of a model folder. Raises CheckpointError for contradictions, UnsupportedError for forms we cannot read."""
        fields = _fields(checkpoint)
        return GptqConfig(
            version=_version(fields),
            group_size=given_group_size(fields),
            symmetric=fields.optional_flag("sym"),
            overrides=_overrides(fields),
        )

    def for_module(self, module: str) -> tuple[int | None, bool | None]:
        """Group size and symmetry of one linear: by its whole name, else by the first pattern that it begins with."""
        fields = self.named.get(module)
        if fields is None:
            fields = next((own for pattern, own in self.overrides if pattern.match(module)), None)
        if fields is None:
            return self.group_size, self.symmetric
        symmetric = fields.optional_flag("sym")
        return given_group_size(fields) or self.group_size, self.symmetric if symmetric is None else symmetric


def _fields(checkpoint: Checkpoint) -> ConfigFields:
    """The section of `config.json`, and what only `quantize_config.json` says; they may not contradict each other."""
    where = f"{checkpoint.path}/config.json: {_SECTION}"
    section = ConfigFields(checkpoint.config).section(_SECTION)
    values = {} if section is None else dict(section.values)
    if SIDE_FILE in file_names(checkpoint.path):
        path = checkpoint.path / SIDE_FILE
        beside = parse_json_object(read_bytes(path), path)
        for key in ("checkpoint_format", "sym"):
            if key in beside and key in values and beside[key] != values[key]:
                raise CheckpointError(
                    f"{where}.{key} is {shown(values[key])}, but {SIDE_FILE} says {shown(beside[key])}"
                )
        values = beside | values
    return ConfigFields(values, where)


def _version(fields: ConfigFields) -> int:
    """1 or 2; files without the field are from before there was a second version."""
    if fields.flag("is_marlin_format"):
        raise UnsupportedError(f"{fields.where}: is_marlin_format is true; Marlin's layout is not read, only gptq's")
    form = fields.text("checkpoint_format", fields.text("format", "gptq"))
    if form not in ("gptq", "gptq_v2"):
        raise UnsupportedError(f"{fields.where}: checkpoint_format {shown(form)} is not read, only gptq and gptq_v2")
    if fields.text("pack_dtype", "int32") != "int32":
        raise UnsupportedError(f"{fields.where}: pack_dtype is {shown(fields.text('pack_dtype'))}; only int32 is read")
    return 2 if form == "gptq_v2" else 1


def given_group_size(fields: ConfigFields) -> int | None:
    """The columns of a group, -1 for whole rows; None where it is not said. Raises CheckpointError for other values."""
    size = fields.optional_integer("group_size", minimum=-1)
    if size == 0:
        raise CheckpointError(f"{fields.where}: group_size is 0; it must be positive, or -1 for whole rows")
    return size


def _overrides(fields: ConfigFields) -> tuple[tuple[re.Pattern[str], ConfigFields], ...]:
    """Overrides in order, without those for linears in float, which have no tensors to read."""
    dynamic = fields.section("dynamic")
    found = []
    for text, values in ({} if dynamic is None else dynamic.values).items():
        if text.startswith("-:"):
            continue
        where = f"{fields.where}.dynamic"
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{where}: {shown(text)} must be an object, found {shown(values)}")
        found.append((foreign_pattern(text.removeprefix("+:"), where), ConfigFields(values, where)))
    return tuple(found)
