"""Which linear gets which scheme: a recipe's rules resolved against a model's architecture map, before any work starts.

Everything that can be refused is refused here: patterns that match nothing, group sizes that do not divide a linear's
input, members of one fusion group (q/k/v, gate/up) that a runtime cannot load with different schemes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd

from cann_llm_quant.errors import UsageError
from cann_llm_quant.loading import family_warnings, format_warnings, mixture_warnings, tensor_parallel_warnings
from cann_llm_quant.models.arch import Arch, LinearSpec
from cann_llm_quant.patterns import compile_pattern
from cann_llm_quant.quant.activations import MX_GROUP, NV_GROUP
from cann_llm_quant.quant.scheme import (
    MXFP4,
    MXFP8,
    NVFP4,
    TILE,
    ActivationScheme,
    ActivationType,
    Scheme,
    WeightType,
    fitting_group_sizes,
    largest_fitting_group,
)
from cann_llm_quant.recipe import BLOCK_COLUMNS, ActivationFormat, Recipe, WeightScheme

AUTO_GROUP = 128
TABLE_SCHEME = Scheme("int8", True, "channel", None)
_INT_TYPES: dict[int, WeightType] = {2: "int2", 3: "int3", 4: "int4", 5: "int5", 6: "int6", 8: "int8"}
_BLOCK_SCHEMES = {"mxfp8": MXFP8, "mxfp4": MXFP4, "nvfp4": NVFP4}
_GROUPED_TYPES: dict[str, tuple[ActivationType, int]] = {
    "mxfp8": ("fp8_e4m3", MX_GROUP),
    "mxfp4": ("fp4_e2m1", MX_GROUP),
    "nvfp4": ("fp4_e2m1", NV_GROUP),
}


@dataclass(frozen=True)
class Assignment:
    """Resolved schemes.

    `schemes` by module name for what is quantized, `kept` with the reason for what stays in float. `activations` has
    the linears among `schemes` whose input is quantized too, `ranges` how those of them are measured that are stored.
    `tables` has the embedding where it is among `schemes`, with the modules that read it: itself and a tied head.
    """

    schemes: dict[str, Scheme]
    kept: dict[str, str]
    pattern_hits: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    activations: dict[str, ActivationScheme] = field(default_factory=dict)
    ranges: dict[str, ActivationFormat] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)


def head_linear(arch: Arch) -> LinearSpec:
    """The output head as a linear; a tied one has no tensor of its own."""
    return LinearSpec("head", arch.head_module, arch.vocab_size, arch.hidden_size)


def assign(arch: Arch, recipe: Recipe, *, allow_empty_pattern: bool = False, tensor_parallel: int = 1) -> Assignment:
    """Resolve the recipe for every linear of the model, its head and its embedding included.

    Raises UsageError for a pattern without a match, a group size that misfits (`on_misfit="error"`) or a recipe that
    leaves nothing to quantize.
    """
    linears = [spec for layer in arch.layers for spec in layer.linears]
    if recipe.method == "none":
        kept = {spec.module: "weights are left as they are" for spec in [*linears, head_linear(arch)]}
        return Assignment({}, kept)
    tables = _tables(arch, recipe)
    shared_head = any(arch.head_module in readers for readers in tables.values())
    names = [spec.module for spec in linears] + ([] if shared_head else [arch.head_module])
    kept = {spec.module: "router or gate" for spec in linears if not spec.quantizable}
    if recipe.head is None and not shared_head:
        kept[arch.head_module] = "output head"
    never = kept | {arch.head_module: "output head; see --head-bits"}
    wanted, hits = _apply_rules(names, never, recipe, allow_empty_pattern)
    if recipe.head is not None and not shared_head:
        linears.append(head_linear(arch))
        if wanted[arch.head_module] != "skip":
            wanted[arch.head_module] = recipe.head
    kept |= {name: "skipped by a rule" for name in names if name not in kept and wanted[name] == "skip"}
    warnings = _expand_fusion_groups(arch, wanted, kept) if recipe.expand_fusion_groups else _split_groups(arch, wanted)
    schemes, misfits, rows = _fit(linears, wanted, kept, recipe)
    if misfits and recipe.on_misfit == "error":
        raise UsageError(_misfit_message(misfits))
    schemes |= dict.fromkeys(tables, TABLE_SCHEME)
    if not schemes:
        raise UsageError("the rules leave nothing to quantize; every linear is skipped or does not fit")
    if rows:
        warnings.append(
            f"no group size fits {len(rows)} linears, they get one scale a row: {rows[0]}{' …' if rows[1:] else ''}"
        )
    warnings += family_warnings(arch) + mixture_warnings(schemes, kept, linears) + _table_warnings(tables)
    warnings += tensor_parallel_warnings(arch, schemes, tensor_parallel)
    activations, ranges = _inputs(linears, wanted, schemes)
    warnings += format_warnings(schemes, activations, linears)
    return Assignment(schemes, kept, hits, tuple(warnings), activations, ranges, tables)


def _tables(arch: Arch, recipe: Recipe) -> dict[str, tuple[str, ...]]:
    """The embedding with its readers, where it is to be quantized; a tied head goes with it.

    Raises UsageError for a tied head in another scheme than the embedding can have (C21).
    """
    embedding = arch.embedding_name.removesuffix(".weight")
    if not arch.tied_head:
        return {} if recipe.embedding is None else {embedding: (embedding,)}
    head = recipe.head
    if head is not None and (head.bits, head.group_size, head.symmetric) != (8, -1, True):
        raise UsageError(
            f"{arch.head_module} is tied to {embedding}, whose matrix is stored as symmetric int8 with one scale a row "
            "or in float; use --head-bits 8, or leave the head in float"
        )
    return {} if head is None and recipe.embedding is None else {embedding: (embedding, arch.head_module)}


def _table_warnings(tables: Mapping[str, tuple[str, ...]]) -> list[str]:
    """What becomes of a quantized embedding: it is shared with a tied head, and few readers know it."""
    warnings = []
    for table, readers in tables.items():
        if len(readers) > 1:
            warnings.append(f"{readers[1]} is tied to {table}: one int8 matrix serves both")
        warnings.append(
            f"{table} is quantized: transformers 5.24 loads it (not with dequantize=True), vLLM and SGLang do not"
        )
    return warnings


def _apply_rules(
    names: list[str], never: Mapping[str, str], recipe: Recipe, allow_empty: bool
) -> tuple[dict[str, WeightScheme | str], dict[str, int]]:
    """What the recipe wants for each name, and how many each pattern matched; `never` stay in float in any case."""
    wanted: dict[str, WeightScheme | str] = dict.fromkeys(names, recipe.scheme)
    hits: dict[str, int] = {}
    for rule in recipe.rules:
        for pattern in rule.match:
            matches = compile_pattern(pattern)
            matched = [name for name in names if matches(name)]
            hits[pattern] = len(matched)
            wanted.update(dict.fromkeys(matched, rule.scheme))
            if not matched and not allow_empty:
                raise UsageError(
                    f"pattern {pattern!r} matches none of the {len(names)} linears, such as {names[0]}; write the full "
                    "name, glob:… or re:… (whole name), or allow it with --allow-empty-pattern"
                )
            if matched and rule.scheme != "skip" and all(name in never for name in matched):
                raise UsageError(
                    f"pattern {pattern!r} asks to quantize {matched[0]}, which rules cannot "
                    f"({never[matched[0]]}); drop the rule"
                )
    return wanted, hits


def _expand_fusion_groups(arch: Arch, wanted: dict[str, WeightScheme | str], kept: dict[str, str]) -> list[str]:
    """Give every fusion group one scheme: skipping one member skips all; else the first differing member's is taken."""
    warnings = []
    for members in _fusion_groups(arch):
        schemes = [wanted[name] for name in members]
        if all(scheme == schemes[0] for scheme in schemes):
            continue
        choice = "skip" if "skip" in schemes else max(schemes, key=_bits)
        for name in members:
            wanted[name] = choice
            if choice == "skip":
                kept[name] = "fused at run time with a skipped linear"
        warnings.append(f"{', '.join(members)} are fused by runtimes and were given one scheme ({_describe(choice)})")
    return warnings


def _bits(scheme: WeightScheme | str) -> tuple[int, int]:
    """Bits of weights, then of activations."""
    if isinstance(scheme, str):
        return 16, 16
    wanted = scheme.activations
    return scheme.bits, 16 if wanted is None else 4 if wanted.type.endswith("4") else 8


def _describe(scheme: WeightScheme | str) -> str:
    if isinstance(scheme, str):
        return "float"
    inputs = "" if scheme.activations is None else f", {scheme.activations.type} activations"
    if scheme.type != "int":
        return f"{scheme.type}{'' if scheme.group_size == 'auto' else f', group size {scheme.group_size}'}{inputs}"
    return f"int{scheme.bits}, group size {scheme.group_size}{inputs}"


def _split_groups(arch: Arch, wanted: dict[str, WeightScheme | str]) -> list[str]:
    return [
        f"{', '.join(members)} have different schemes: vLLM, SGLang and MindIE fuse them and cannot load this"
        for members in _fusion_groups(arch)
        if any(wanted[name] != wanted[members[0]] for name in members)
    ]


def _fusion_groups(arch: Arch) -> list[tuple[str, ...]]:
    return [
        tuple(layer.linear(role).module for role in group) for layer in arch.layers for group in layer.fusion_groups
    ]


def _fit(
    linears: list[LinearSpec], wanted: Mapping[str, WeightScheme | str], kept: dict[str, str], recipe: Recipe
) -> tuple[dict[str, Scheme], list[str], list[str]]:
    """Schemes by module; what misfits and is refused, or left in float (`kept`); what fell back to whole rows."""
    common = _common_inputs(linears, wanted, kept)
    schemes: dict[str, Scheme] = {}
    misfits, rows = [], []
    for spec in linears:
        asked = wanted[spec.module]
        if spec.module in kept or isinstance(asked, str):
            continue
        scheme = _scheme(spec, asked, recipe, common[spec.module])
        if scheme is not None:
            schemes[spec.module] = scheme
            if scheme.is_integer and scheme.strategy == "channel" and asked.group_size == "auto":
                rows.append(f"{spec.module} ({spec.in_features} columns)")
            continue
        wanted_size, hint = _misfit(spec, asked)
        kept[spec.module] = f"{wanted_size} does not divide {spec.in_features} input features"
        misfits.append(
            f"{spec.module} has {spec.in_features} input features, {wanted_size} does not divide them ({hint})"
        )
    return schemes, misfits, rows


def _scheme(spec: LinearSpec, asked: WeightScheme, recipe: Recipe, common: int) -> Scheme | None:
    """The scheme of one linear; None when its groups do not divide the input."""
    if asked.type in _BLOCK_SCHEMES:
        return None if spec.in_features % BLOCK_COLUMNS[asked.type] else _BLOCK_SCHEMES[asked.type]
    dtype: WeightType = "fp8_e4m3" if asked.type == "fp8" else _INT_TYPES[asked.bits]
    if asked.group_size == "tensor":
        return Scheme(dtype, asked.symmetric, "tensor", None)
    if asked.group_size == "block":
        return Scheme(dtype, asked.symmetric, "tile", None)
    size = -1 if asked.type == "fp8" and asked.group_size == "auto" else _group_size(spec, asked, recipe, common)
    if size is None:
        return None
    return Scheme(dtype, asked.symmetric, *(("channel", None) if size == -1 else ("group", size)))


def _misfit(spec: LinearSpec, asked: WeightScheme) -> tuple[str, str]:
    """What does not divide a linear's input, and what would."""
    if asked.type in BLOCK_COLUMNS:
        return f"{asked.type}'s group of {BLOCK_COLUMNS[asked.type]}", "int and fp8 weights would fit"
    sizes = ", ".join(str(n) for n in fitting_group_sizes(spec.in_features)) or "only -1, a whole row,"
    return f"group size {asked.group_size}", f"{sizes} would fit"


def _common_inputs(
    linears: list[LinearSpec], wanted: Mapping[str, WeightScheme | str], kept: Mapping[str, str]
) -> dict[str, int]:
    """For each linear the width that an automatic group size must divide.

    Its own, except where transformers can load only one size: among all routed experts, and among all linears that are
    asymmetric. There it is the greatest common divisor.
    """
    shared: dict[str, int] = {}
    for spec in linears:
        asked = wanted[spec.module]
        if spec.module not in kept and isinstance(asked, WeightScheme) and asked.group_size == "auto":
            for kind in _load_kinds(spec, asked):
                shared[kind] = gcd(shared.get(kind, 0), spec.in_features)
    widths = {}
    for spec in linears:
        asked = wanted[spec.module]
        kinds = _load_kinds(spec, asked) if isinstance(asked, WeightScheme) else []
        widths[spec.module] = gcd(spec.in_features, *(shared.get(kind, 0) for kind in kinds))
    return widths


def _load_kinds(spec: LinearSpec, scheme: WeightScheme) -> list[str]:
    expert = ["experts"] if spec.role.startswith("experts.") else []
    return expert + ([] if scheme.symmetric else ["asymmetric"])


def _group_size(spec: LinearSpec, asked: WeightScheme, recipe: Recipe, common: int) -> int | None:
    """Columns that share a scale, -1 for a whole row; None when the size asked for does not divide the input."""
    if asked.group_size == -1:
        return -1
    if isinstance(asked.group_size, str):  # auto
        size = largest_fitting_group(common, AUTO_GROUP) or largest_fitting_group(spec.in_features, AUTO_GROUP)
        return size or -1
    if recipe.on_misfit == "smaller":
        return largest_fitting_group(spec.in_features, asked.group_size)
    return asked.group_size if spec.in_features % asked.group_size == 0 else None


def _inputs(
    linears: list[LinearSpec], wanted: Mapping[str, WeightScheme | str], schemes: Mapping[str, Scheme]
) -> tuple[dict[str, ActivationScheme], dict[str, ActivationFormat]]:
    """Schemes of inputs by module, and how the stored ones among them are measured.

    Raises UsageError for groups that do not divide a linear's input.
    """
    activations: dict[str, ActivationScheme] = {}
    ranges: dict[str, ActivationFormat] = {}
    for spec in linears:
        asked = wanted[spec.module]
        if spec.module not in schemes or isinstance(asked, str) or asked.activations is None:
            continue
        scheme = activation_scheme(asked.activations, tiled=asked.group_size == "block")
        if scheme.group_size is not None and spec.in_features % scheme.group_size:
            tiled = asked.group_size == "block" and asked.activations.type == "fp8"
            what = "fp8 activations beside tiles of 128 x 128" if tiled else f"{asked.activations.type} activations"
            other = "choose FP8, whose weights have one scale a row" if tiled else "choose int8 or fp8 activations"
            raise UsageError(
                f"{spec.module} has {spec.in_features} input features, {what} need a multiple of {scheme.group_size}; "
                f"skip the linear or {other}"
            )
        activations[spec.module] = scheme
        if asked.activations.needs_range:
            ranges[spec.module] = asked.activations
    return activations, ranges


def activation_scheme(wanted: ActivationFormat, *, tiled: bool = False) -> ActivationScheme:
    """The scheme that a recipe's format means; beside `tiled` weights fp8 inputs take a range for every 128 columns."""
    if wanted.type in _GROUPED_TYPES:
        dtype, size = _GROUPED_TYPES[wanted.type]
        return ActivationScheme(dtype, True, True, "group", size)
    names: dict[str, ActivationType] = {"int4": "int4", "int8": "int8", "fp8": "fp8_e4m3"}
    dtype = names[wanted.type]
    if not wanted.dynamic:
        return ActivationScheme(dtype, wanted.symmetric, False, "tensor")
    if tiled and wanted.type == "fp8":
        return ActivationScheme(dtype, True, True, "group", TILE)
    return ActivationScheme(dtype, wanted.symmetric, True, "token")


def _misfit_message(misfits: list[str]) -> str:
    shown = "; ".join(misfits[:4]) + (f"; and {len(misfits) - 4} more" if len(misfits) > 4 else "")
    return f"{shown}. Choose a size that fits, leave the group size out, or pass --on-misfit smaller or skip"
