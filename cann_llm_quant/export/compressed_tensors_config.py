"""The `quantization_config` of compressed-tensors, read: which scheme each module of a checkpoint is stored in.

    {"quant_method": "compressed-tensors", "format": …, "version": …, "ignore": […], "kv_cache_scheme": {…} | null,
     "config_groups": {name: {"targets": […], "format": …, "weights": {…}, "input_activations": {…} | null}}}

A target is a module's full name, a class (`Linear`), or `re:` and a pattern that a name begins with. A module takes the
group that names it in full, else the one with a pattern for it (the alphabetically first pattern), else the one of its
class; `ignore` overrides them all. The order is that of compressed-tensors itself. Older files call the section
`compression_config`, older writers left out fields, so absent fields have the defaults of the format.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cann_llm_quant.errors import CheckpointError, UnsupportedError, UsageError
from cann_llm_quant.export.foreign_patterns import foreign_pattern
from cann_llm_quant.export.kv_section import KvCache, KvFormat, KvLayer
from cann_llm_quant.models.config_fields import ConfigFields
from cann_llm_quant.quant.kv import KvScheme, KvType
from cann_llm_quant.quant.scheme import (
    TILE,
    ActivationScheme,
    ActivationStrategy,
    ActivationType,
    ScaleType,
    Scheme,
    Strategy,
    WeightType,
)
from cann_llm_quant.shown import shown, shown_name

SECTION_NAMES = ("quantization_config", "compression_config")
FORMATS = (
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "nvfp4-pack-quantized",
)
# Before 0.18 a word holds whole codes only, from 0.18 on codes run on over the ends of words.
_DENSE_SINCE = (0, 18)
_TYPES: Mapping[tuple[str, int], WeightType] = {
    ("int", 2): "int2",
    ("int", 3): "int3",
    ("int", 4): "int4",
    ("int", 5): "int5",
    ("int", 6): "int6",
    ("int", 8): "int8",
    ("float", 8): "fp8_e4m3",
    ("float", 4): "fp4_e2m1",
}
_MOST_LAYERS = 100_000  # a list of as many is made
_SCALE_TYPES: Mapping[str, ScaleType] = {
    "torch.uint8": "e8m0",
    "torch.float8_e8m0fnu": "e8m0",
    "torch.float8_e4m3fn": "e4m3",
}
_STRATEGIES: Mapping[str, Strategy] = {
    "tensor": "tensor",
    "channel": "channel",
    "group": "group",
    "tensor_group": "group",
    "block": "tile",
}
_INPUT_TYPES: Mapping[str, ActivationType] = {
    "int4": "int4",
    "int8": "int8",
    "fp8_e4m3": "fp8_e4m3",
    "fp4_e2m1": "fp4_e2m1",
}
_INPUT_STRATEGIES: Mapping[str, ActivationStrategy] = {
    "token": "token",
    "tensor": "tensor",
    "group": "group",
    "tensor_group": "group",
}
_CACHE_TYPES: Mapping[str, KvType] = {"int8": "int8", "fp8_e4m3": "fp8_e4m3"}


@dataclass(frozen=True)
class Group:
    """One config group: what its modules' weights are stored in, and how their inputs are quantized.

    `act_order` says that columns are assigned to groups one by one (`weight_g_idx`).
    """

    name: str
    targets: tuple[str, ...]
    layout: str | None
    scheme: Scheme
    activations: ActivationScheme | None
    act_order: bool = False


@dataclass(frozen=True)
class CompressedTensorsConfig:
    """The section as values; `dense` whether 3-, 5- and 6-bit codes run on over words, None where no version tells."""

    groups: tuple[Group, ...]
    ignore: tuple[str, ...]
    kv_cache: KvCache
    dense: bool | None

    def group_of(self, module: str, kind: str = "Linear") -> Group | None:
        """The group of a module of the class `kind`; None where it is stored in float."""
        named, patterns = self._ignored
        if module in named or kind in named or any(pattern.match(module) for pattern in patterns):
            return None
        owner = self._owner
        if module in owner:
            return owner[module]
        found = next((owner[target] for target, pattern in self._patterns if pattern.match(module)), None)
        return found or owner.get(kind)

    @cached_property
    def _owner(self) -> dict[str, Group]:
        """The first group that has each target."""
        owner: dict[str, Group] = {}
        for group in self.groups:
            for target in group.targets:
                owner.setdefault(target, group)
        return owner

    @cached_property
    def _patterns(self) -> list[tuple[str, re.Pattern[str]]]:
        return [(target, _pattern(target)) for target in sorted(self._owner) if target.startswith("re:")]

    @cached_property
    def _ignored(self) -> tuple[frozenset[str], list[re.Pattern[str]]]:
        patterns = [target for target in self.ignore if target.startswith("re:")]
        return frozenset(self.ignore) - set(patterns), [_pattern(target) for target in patterns]


def _pattern(target: str) -> re.Pattern[str]:
    return foreign_pattern(target.removeprefix("re:"), target)


def compressed_tensors_config(config: Mapping[str, Any], where: str) -> CompressedTensorsConfig:
    """The section of a whole `config.json`; `where` names that file in messages.

    Raises CheckpointError for a section that contradicts itself, UnsupportedError for what this version cannot read:
    sparse weights, transforms of activations, quantized outputs or attention, other number formats.
    """
    fields = ConfigFields(config, where)
    found = [section for name in SECTION_NAMES if (section := fields.section(name)) is not None]
    if not found:
        raise CheckpointError(f"{where} has no quantization_config; fetch the file again")
    section = found[0]
    _refuse_whole(section)
    groups = section.section("config_groups")
    if groups is None:
        raise CheckpointError(f"{section.where} has no config_groups; fetch the file again")
    layout = section.text("format", "")
    read = [_group(groups, name, layout) for name in groups.values]
    return CompressedTensorsConfig(
        tuple(group for group in read if group is not None),
        tuple(_names(section, "ignore")),
        _kv_cache(section, fields),
        _dense(section),
    )


def _refuse_whole(section: ConfigFields) -> None:
    """What concerns the whole checkpoint and has no place in ours."""
    sparsity = section.section("sparsity_config")
    if sparsity is not None and sparsity.text("format", "dense") not in ("dense", ""):
        raise UnsupportedError(
            f"{section.where}: weights are sparse ({shown_name(sparsity.text('format'))}), which this version does not "
            "read; decompress the model with compressed-tensors first"
        )
    transforms = section.section("transform_config")
    if transforms is not None and transforms.values.get("config_groups"):
        raise UnsupportedError(
            f"{section.where}: transform_config rotates activations while the model runs (hadamard and the like), "
            "which this version does not; give a model whose rotations are folded into its weights"
        )
    if section.text("quantization_status", "compressed") != "compressed":
        raise UnsupportedError(
            f"{section.where}: quantization_status is {shown_name(section.text('quantization_status'))}, so the "
            "weights were saved before they were compressed; save the model again with save_compressed=True"
        )


def _group(groups: ConfigFields, name: str, layout: str) -> Group | None:
    """One group; None for one that says nothing about weights or inputs."""
    if isinstance(groups.values[name], list):
        raise UnsupportedError(
            f"{groups.where}: {shown_name(name)} is the name of a preset, which this version does not know; "
            "write its fields out"
        )
    group = groups.section(name)
    if group is None:
        return None
    if group.given("output_activations"):
        raise UnsupportedError(f"{group.where}: outputs of linears are quantized, which this version does not read")
    weights = group.section("weights")
    if weights is None:
        if not group.given("input_activations"):
            return None
        targets = shown_name(", ".join(_names(group, "targets")))
        raise UnsupportedError(
            f"{group.where}: inputs are quantized without weights (of {targets}), which this version does not read"
        )
    own = group.text("format", "") or layout
    if own == "mixed-precision":
        raise CheckpointError(f"{group.where} has no format, and the model's is mixed-precision; fetch the file again")
    if own and own not in FORMATS:
        raise UnsupportedError(
            f"{group.where}: format {shown(own)} is not supported; this version reads {', '.join(FORMATS)}"
        )
    inputs = group.section("input_activations")
    return Group(
        name,
        tuple(_names(group, "targets")),
        own or None,
        weight_scheme(weights),
        None if inputs is None else activation_scheme(inputs),
        weights.values.get("actorder") in ("group", "dynamic", True),
    )


def weight_scheme(arguments: ConfigFields) -> Scheme:
    """The `weights` of a group. Raises UnsupportedError for a format that `Scheme` cannot say."""
    strategy = _strategy(arguments)
    if strategy not in _STRATEGIES:
        raise UnsupportedError(
            f"{arguments.where}: weights by {shown_name(strategy)} are not supported; this version reads them by "
            + ", ".join(_STRATEGIES)
        )
    scale_type = _SCALE_TYPES.get(arguments.text("scale_dtype", ""), "float")
    if strategy == "tensor_group":
        scale_type = "e4m3"
    dtype = _dtype(arguments)
    # files of the first mxfp4 writers lack scale_dtype
    if dtype == "fp4_e2m1" and strategy == "group":
        scale_type = "e8m0"
    if arguments.values.get("dynamic") not in (None, False):
        raise UnsupportedError(f"{arguments.where}: dynamic weights are not stored in codes at all")
    group_size = arguments.optional_integer("group_size", minimum=-1)
    _check_block(arguments, strategy)
    try:
        return Scheme(
            dtype,
            arguments.flag("symmetric", True),
            _STRATEGIES[strategy],
            group_size if _STRATEGIES[strategy] == "group" else None,
            scale_type,
        )
    except UsageError as error:
        raise UnsupportedError(f"{arguments.where}: {error}") from error


def activation_scheme(arguments: ConfigFields) -> ActivationScheme:
    """The `input_activations` of a group. Raises UnsupportedError for forms that the runner lacks."""
    strategy, dtype = _strategy(arguments), _dtype(arguments)
    grouped = _INPUT_STRATEGIES.get(strategy) == "group"
    size = arguments.optional_integer("group_size", minimum=-1) if grouped else None
    dynamic = arguments.values.get("dynamic") in (True, "local")
    stored = _SCALE_TYPES.get(arguments.text("scale_dtype", ""), "float")
    # `ActivationScheme` has no scale type: groups of 32 mean power-of-two scales, groups of 16 e4m3 ones
    meant = {("fp4_e2m1", 32): "e8m0", ("fp8_e4m3", 32): "e8m0", ("fp4_e2m1", 16): "e4m3"}.get(
        (dtype, size or 0), "float"
    )
    known = dtype in _INPUT_TYPES and strategy in _INPUT_STRATEGIES
    if not known or (stored != meant and meant == "e8m0" and dtype != "fp4_e2m1"):
        raise UnsupportedError(
            f"{arguments.where}: inputs in {dtype} by {shown_name(strategy)} with {stored} scales are not supported; "
            "this version knows int4, int8, fp8 and fp4 inputs by token, tensor or group"
        )
    try:
        return ActivationScheme(
            _INPUT_TYPES[dtype],
            arguments.flag("symmetric", True),
            dynamic,
            _INPUT_STRATEGIES[strategy],
            size,
        )
    except UsageError as error:
        raise UnsupportedError(f"{arguments.where}: {error}") from error


def _strategy(arguments: ConfigFields) -> str:
    """The strategy that is named, else the one that the group size implies."""
    size = arguments.optional_integer("group_size", minimum=-1)
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    return arguments.text("strategy", implied).lower()


def _dtype(arguments: ConfigFields) -> WeightType:
    kind, bits = arguments.text("type", "int").lower(), arguments.integer("num_bits", default=8)
    if (kind, bits) not in _TYPES:
        raise UnsupportedError(
            f"{arguments.where}: {shown_name(kind)} of {bits} bits is not supported; this version reads "
            + ", ".join(f"{name}{number}" for name, number in _TYPES)
        )
    return _TYPES[kind, bits]


def _check_block(arguments: ConfigFields, strategy: str) -> None:
    shape = arguments.values.get("block_structure")
    parts = shape.split("x") if isinstance(shape, str) else shape if isinstance(shape, list) else []
    if strategy == "block" and [str(part) for part in parts] != [str(TILE)] * 2:
        raise UnsupportedError(
            f"{arguments.where}: blocks of {shown(shape)} are not supported; this version reads 128 x 128"
        )


def _kv_cache(section: ConfigFields, whole: ConfigFields) -> KvCache:
    """The cache that `kv_cache_scheme` asks for, the same in every layer."""
    arguments = section.section("kv_cache_scheme")
    if arguments is None:
        return KvCache()
    strategy, dtype = _strategy(arguments), _dtype(arguments)
    dynamic = arguments.values.get("dynamic") is True
    symmetric = arguments.flag("symmetric", True)
    if dtype not in _CACHE_TYPES or strategy != "tensor" or not symmetric:
        raise UnsupportedError(
            f"{arguments.where}: a KV cache in {dtype} by {shown_name(strategy)}, {'' if symmetric else 'a'}symmetric, "
            "is not supported; this version reads 8 bits, symmetric, one scale a tensor"
        )
    scheme = KvScheme(_CACHE_TYPES[dtype], True, "tensor", None, dynamic)
    num_layers = whole.integer("num_hidden_layers")
    if num_layers > _MOST_LAYERS:
        raise CheckpointError(f"{whole.where}: num_hidden_layers is {num_layers}, more than any model has; correct it")
    layer = KvLayer(k=scheme.label(), v=scheme.label())
    return KvCache(
        schemes={scheme.label(): KvFormat.of(scheme)},
        layers=[layer] * num_layers,
        scales=None if dynamic else "model",
    )


def _dense(section: ConfigFields) -> bool | None:
    match = re.match(r"(\d+)\.(\d+)", str(section.values.get("version") or ""))
    return None if match is None else (int(match[1]), int(match[2])) >= _DENSE_SINCE


def _names(fields: ConfigFields, name: str) -> list[str]:
    """A list of strings whose patterns are valid. Raises CheckpointError."""
    names = fields.items(name)
    for text in names:
        if not isinstance(text, str):
            raise CheckpointError(f"{fields.where}: {name} must list names, found {shown(text)}")
        if text.startswith("re:"):
            foreign_pattern(text.removeprefix("re:"), f"{fields.where}: {name}")
    return names
