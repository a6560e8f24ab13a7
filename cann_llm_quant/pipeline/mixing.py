"""A recipe that names a preset or a bit target, turned into one whose rules say the scheme of every linear.

`target_bits` is what all linears in play may store on average, scales and zero points included. Linears that the rules
skip are not in play; those that a rule gives a scheme keep it and count. The others get the candidates that
`quant/allocation.py` chooses by their damage, one scheme a unit; of a unit that the rules skip in part
the rest keeps the recipe's scheme and counts. Formats of inputs are the recipe's throughout. The result repeats without
measuring again: it is the recipe that the output stores.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cann_llm_quant.assignment import Assignment, assign
from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.errors import UsageError
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.patterns import compile_pattern
from cann_llm_quant.pipeline.damage import Solver
from cann_llm_quant.pipeline.presets import preset_rules
from cann_llm_quant.pipeline.request import Event, RunOptions
from cann_llm_quant.pipeline.sensitivity import SensitivityRequest, measure_sensitivity
from cann_llm_quant.pipeline.sensitivity_file import ChoiceDamage, Sensitivity, UnitEntry, load_sensitivity
from cann_llm_quant.pipeline.units import Unit, choices_of, units_of
from cann_llm_quant.quant.allocation import allocate
from cann_llm_quant.recipe import DEFAULT_CANDIDATES, Recipe, Rule, WeightScheme, parse_candidate

MEASURED_SAMPLES = 8

Tell = Callable[[Event], None]


@dataclass(frozen=True)
class Mix:
    """An allocation: the chosen scheme's name by unit, among the units that were free, within `budget` bits."""

    units: tuple[UnitEntry, ...]
    chosen: tuple[str, ...]
    budget: int

    @property
    def damage(self) -> float:
        """Sum of the units' damage, in nats per token."""
        return sum(unit.choices[name].damage for unit, name in zip(self.units, self.chosen, strict=True))

    @property
    def bits(self) -> int:
        """Bits that the free units store."""
        return sum(unit.choices[name].bits for unit, name in zip(self.units, self.chosen, strict=True))

    @property
    def weights(self) -> int:
        """Weights of the free units."""
        return sum(unit.weights for unit in self.units)

    def rules(self) -> tuple[Rule, ...]:
        """One rule for each scheme, with full names."""
        modules: dict[str, list[str]] = {}
        for unit, name in zip(self.units, self.chosen, strict=True):
            modules.setdefault(name, []).extend(unit.modules)
        return tuple(
            Rule(match=tuple(names), scheme=parse_candidate(name) or "skip") for name, names in sorted(modules.items())
        )


def _with_inputs_of(scheme: WeightScheme, rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Rules that say weights alone, with the integer inputs of the recipe's scheme."""
    if scheme.type != "int" or scheme.activations is None:
        return tuple(rules)
    inputs = {"activations": scheme.activations}
    return tuple(
        rule if rule.scheme == "skip" else rule.model_copy(update={"scheme": rule.scheme.model_copy(update=inputs)})
        for rule in rules
    )


def resolve_mix(source: Checkpoint, name: str, recipe: Recipe, options: RunOptions, tell: Tell) -> Recipe:
    """The recipe with `preset`, `target_bits` and `candidates` replaced by rules; unchanged where it has none.

    Sensitivity comes from `options.sensitivity` or is measured here. Raises UsageError for a target that the
    candidates cannot reach, for a scheme that is none of integers, and for a sensitivity file of another model.
    """
    if recipe.preset is None and recipe.target_bits is None:
        return recipe
    arch, target = arch_from_checkpoint(source), recipe.target_bits
    if target is not None and recipe.scheme.type != "int":
        raise UsageError(
            f"--target-bits chooses among integer schemes, not {recipe.scheme.type}; leave out --scheme, or choose one "
            "that only says how inputs are quantized, such as W4A8"
        )
    first = () if recipe.preset is None else _with_inputs_of(recipe.scheme, preset_rules(arch, recipe.preset))
    recipe = recipe.model_copy(update={"rules": first + recipe.rules, "preset": None, "target_bits": None})
    if target is None:
        return recipe
    found = _sensitivity(source, arch, name, recipe, options, tell)
    assignment = assign(arch, recipe, allow_empty_pattern=options.allow_empty_pattern)
    mix = _allocate(arch, recipe, found, assignment, target)
    for sentence in _description(mix, found):
        tell(Event("prepare", message=sentence))
    return recipe.model_copy(
        update={"rules": _with_inputs_of(recipe.scheme, mix.rules()) + recipe.rules, "candidates": None}
    )


def _sensitivity(
    source: Checkpoint, arch: Arch, name: str, recipe: Recipe, options: RunOptions, tell: Tell
) -> Sensitivity:
    solver: Solver = "feedback" if recipe.feedback else "rounding"
    if options.sensitivity is None:
        calibration = recipe.calibration
        few = calibration.model_copy(update={"samples": min(calibration.samples, MEASURED_SAMPLES)})
        request = SensitivityRequest(
            calibration=few,
            candidates=recipe.candidates or DEFAULT_CANDIDATES,
            solver=solver,
        )
        return measure_sensitivity(source, name, request, options, tell)
    found = load_sensitivity(options.sensitivity)
    if found.fingerprint != source.fingerprint():
        rotated = "; it knows no rotation: with --rotate, leave out --sensitivity" if recipe.rotate else ""
        raise UsageError(
            f"sensitivity file {options.sensitivity} was measured on another model ({found.model}); measure this one "
            f"with cann-llm-quant sensitivity{rotated}"
        )
    _require_whole(options.sensitivity, found, source, arch)
    if found.settings.solver != solver:
        message = (
            f"{options.sensitivity} holds damages of {found.settings.solver}, but {recipe.method} works by {solver}"
        )
        tell(Event("prepare", message=message, warning=True))
    return found


def _require_whole(path: Path, found: Sensitivity, source: Checkpoint, arch: Arch) -> None:
    """The file must speak of this model's units, all of them, by schemes that exist. Raises UsageError."""
    expected = {unit.name: unit for unit in units_of(arch)}
    names = [entry.name for entry in found.units]
    wrong = "" if sorted(names) == sorted(expected) else "other units than the model has"
    for entry in found.units if not wrong else ():
        unit = expected[entry.name]
        storage = source.tensors[f"{unit.modules[0]}.weight"].dtype
        if entry.modules != unit.modules or entry.weights != unit.weights:
            wrong = f"a unit {entry.name} that is not the model's"
        elif not _is_stored(unit, entry, storage):
            wrong = f"schemes of {entry.name} that do not exist or do not take the bits that it says"
    if wrong:
        raise UsageError(f"sensitivity file {path} holds {wrong}; measure again with cann-llm-quant sensitivity")


def _is_stored(unit: Unit, entry: UnitEntry, storage: torch.dtype) -> bool:
    """Whether the entry has schemes, and each takes the bits that it gives."""
    try:
        choices = choices_of(unit, entry.choices)
    except ValueError:
        return False
    bits = {name: choice.stored_bits(unit, storage) for name, choice in choices.items()}
    told = {name: choice.bits for name, choice in entry.choices.items()}
    return bool(told) and bits == told and entry.float_bits == unit.weights * storage.itemsize * 8


def _allocate(arch: Arch, recipe: Recipe, found: Sensitivity, assignment: Assignment, target: float) -> Mix:
    free, budget = _in_play(arch, recipe, found, assignment, target)
    units = {unit.name: unit for unit in units_of(arch)}
    options = [_offered(units[entry.name], entry, recipe.candidates) for entry in free]
    least = sum(min(choice.bits for choice in offered.values()) for offered in options)
    if not free or least > budget:
        raise UsageError(_unreachable(target, free, least, budget))
    indices = allocate(
        [[choice.damage for choice in offered.values()] for offered in options],
        [[choice.bits for choice in offered.values()] for offered in options],
        budget,
    )
    chosen = tuple(list(offered)[i] for offered, i in zip(options, indices, strict=True))
    return Mix(tuple(free), chosen, budget)


def _in_play(
    arch: Arch, recipe: Recipe, found: Sensitivity, assignment: Assignment, target: float
) -> tuple[list[UnitEntry], int]:
    """The units that are free, and the bits that the target leaves to them."""
    ruled = [compile_pattern(pattern) for rule in recipe.rules for pattern in rule.match]
    sizes = {spec.module: (spec.out_features, spec.in_features) for layer in arch.layers for spec in layer.linears}
    free: list[UnitEntry] = []
    budget = 0.0
    for unit in found.units:
        modules = [module for module in unit.modules if module not in assignment.kept]
        budget += target * sum(math.prod(sizes[module]) for module in modules)
        if len(modules) == len(unit.modules) and not any(matches(m) for matches in ruled for m in modules):
            free.append(unit)
            continue
        scale_bits = 32 if unit.float_bits > 16 * unit.weights else 16
        for module in modules:
            bits = assignment.schemes[module].bits_per_weight(*sizes[module], scale_bits)
            budget -= bits * math.prod(sizes[module])
    return free, int(budget)


def _offered(unit: Unit, entry: UnitEntry, candidates: Sequence[str] | None) -> Mapping[str, ChoiceDamage]:
    """The measured choices that the recipe admits; all where it names none."""
    if candidates is None:
        return entry.choices
    names = list(choices_of(unit, candidates))
    missing = [name for name in names if name not in entry.choices]
    if missing:
        raise UsageError(
            f"candidate {missing[0]} was not measured for {unit.name}; add it to --schemes of the sensitivity command"
        )
    return {name: entry.choices[name] for name in names}


def _unreachable(target: float, free: Sequence[UnitEntry], least: int, budget: int) -> str:
    if not free:
        return f"--target-bits {target:g} has nothing to choose: the rules decide every linear; drop one of the two"
    weights = sum(unit.weights for unit in free)
    return (
        f"--target-bits {target:g} leaves {budget / weights:.3f} bits per weight to linears whose smallest candidates "
        f"store {least / weights:.3f}; raise it or add smaller --candidates"
    )


def _description(mix: Mix, found: Sensitivity) -> list[str]:
    """What was chosen, for the user."""
    pairs = list(zip(mix.units, mix.chosen, strict=True))
    weights: Counter[str] = Counter()
    for unit, name in pairs:
        weights[name] += unit.weights
    shares = ", ".join(f"{name} {count / mix.weights:.1%}" for name, count in weights.most_common())
    sentences = [f"mix of {mix.bits / mix.weights:.3f} bits per weight: {shares} of the weights"]
    top = max(weights, key=lambda name: max(unit.choices[name].bits / unit.weights for unit, n in pairs if n == name))
    favoured = [unit.name for unit, name in pairs if name == top]
    sentences.append(
        f"{top} went to {', '.join(favoured[:8])}{f' and {len(favoured) - 8} more' if favoured[8:] else ''}"
    )
    uniform = [n for n in found.settings.candidates if all(n in unit.choices for unit in mix.units)]
    fitting = [
        (sum(unit.choices[n].damage for unit in mix.units), n)
        for n in uniform
        if sum(unit.choices[n].bits for unit in mix.units) <= mix.budget
    ]
    if fitting:
        damage, name = min(fitting)
        sentences.append(f"summed damage {mix.damage:.4g} nats per token, where {name} for all gives {damage:.4g}")
    return sentences
