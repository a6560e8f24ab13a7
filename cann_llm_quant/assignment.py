"""Which linear gets which scheme: a recipe's rules resolved against a model's architecture map, before any work starts.

Everything that can be refused is refused here: patterns that match nothing, group sizes that do not divide a linear's
input, members of one fusion group (q/k/v, gate/up) that a runtime cannot load with different schemes.
"""

from dataclasses import dataclass, field

from cann_llm_quant.errors import UsageError
from cann_llm_quant.models.arch import Arch, LinearSpec
from cann_llm_quant.quant.scheme import Scheme, fitting_group_sizes, largest_fitting_group, scheme_for
from cann_llm_quant.recipe import Recipe, WeightScheme, compile_pattern

AUTO_GROUP = 128


@dataclass(frozen=True)
class Assignment:
    """Resolved schemes.

    `schemes` by module name for what is quantized, `kept` with the reason for what stays in float.
    """

    schemes: dict[str, Scheme]
    kept: dict[str, str]
    pattern_hits: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def assign(arch: Arch, recipe: Recipe, *, allow_empty_pattern: bool = False, tensor_parallel: int = 1) -> Assignment:
    """Resolve the recipe for every linear of the model, its head included.

    Raises UsageError for a pattern without a match, a group size that misfits (`on_misfit="error"`) or a recipe that
    leaves nothing to quantize.
    """
    linears = [spec for layer in arch.layers for spec in layer.linears]
    names = [spec.module for spec in linears] + [arch.head_module]
    wanted, hits = _apply_rules(names, recipe, allow_empty_pattern)
    kept = {arch.head_module: "output head"}
    kept |= {spec.module: "router or gate" for spec in linears if not spec.quantizable}
    kept |= {name: "skipped by a rule" for name in names if name not in kept and wanted[name] == "skip"}
    warnings = _expand_fusion_groups(arch, wanted, kept) if recipe.expand_fusion_groups else _split_groups(arch, wanted)
    schemes: dict[str, Scheme] = {}
    misfits: list[str] = []
    for spec in linears:
        scheme = wanted[spec.module]
        if spec.module in kept or scheme == "skip":
            continue
        assert isinstance(scheme, WeightScheme)
        resolved = _resolve(spec, scheme, recipe)
        if resolved is None:
            sizes = ", ".join(str(size) for size in fitting_group_sizes(spec.in_features)) or "no group size"
            kept[spec.module] = f"group size {scheme.group_size} does not divide {spec.in_features} input features"
            misfits.append(f"{spec.module} has {spec.in_features} input features ({sizes} would fit)")
        else:
            schemes[spec.module] = resolved
    if misfits and recipe.on_misfit == "error":
        raise UsageError(_misfit_message(misfits, recipe))
    if not schemes:
        raise UsageError("the rules leave nothing to quantize; every linear is skipped or does not fit")
    warnings += _tensor_parallel_warnings(arch, schemes, tensor_parallel)
    return Assignment(schemes, kept, hits, tuple(warnings))


def _apply_rules(
    names: list[str], recipe: Recipe, allow_empty: bool
) -> tuple[dict[str, WeightScheme | str], dict[str, int]]:
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


def _bits(scheme: WeightScheme | str) -> int:
    return scheme.bits if isinstance(scheme, WeightScheme) else 16


def _describe(scheme: WeightScheme | str) -> str:
    return "float" if isinstance(scheme, str) else f"int{scheme.bits}, group size {scheme.group_size}"


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


def _resolve(spec: LinearSpec, wanted: WeightScheme, recipe: Recipe) -> Scheme | None:
    """The linear's scheme; None when no allowed group size divides its input."""
    if wanted.group_size == -1:
        return scheme_for(wanted.bits, -1, wanted.symmetric)
    if wanted.group_size == "auto":
        size = largest_fitting_group(spec.in_features, AUTO_GROUP)
    elif recipe.on_misfit == "smaller":
        size = largest_fitting_group(spec.in_features, wanted.group_size)
    else:
        size = wanted.group_size if spec.in_features % wanted.group_size == 0 else None
    return None if size is None else scheme_for(wanted.bits, size, wanted.symmetric)


def _misfit_message(misfits: list[str], recipe: Recipe) -> str:
    shown = "; ".join(misfits[:4]) + (f"; and {len(misfits) - 4} more" if len(misfits) > 4 else "")
    return (
        f"group size {recipe.scheme.group_size} does not divide the input of {len(misfits)} linears: {shown}. "
        "Choose a size that fits, leave --group-size out, or pass --on-misfit smaller or skip"
    )


def _tensor_parallel_warnings(arch: Arch, schemes: dict[str, Scheme], degree: int) -> list[str]:
    """Row-parallel linears (o, down) are split along their input: each part must hold whole groups."""
    if degree == 1:
        return []
    warnings = []
    for layer in arch.layers:
        for spec in layer.linears:
            scheme = schemes.get(spec.module)
            row_parallel = spec.role == "o" or spec.role.split(".")[-1] == "down"
            if not row_parallel or scheme is None or scheme.group_size is None:
                continue
            part, rest = divmod(spec.in_features, degree)
            if rest or part % scheme.group_size:
                warnings.append(
                    f"{spec.module}: {spec.in_features} input features over {degree} devices do not hold whole "
                    f"groups of {scheme.group_size}; tensor-parallel runtimes cannot split it"
                )
    return warnings
