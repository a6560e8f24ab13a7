"""`auto` within a number of bits: an explicit SPEC for the KV cache from a budget per value, by measured KL.

    minimize  sum of damage[layer, side][format]     such that     mean of bits[layer, side][format] <= bits

Damages of single layers and sides need not add up, so the mix is then run as a whole, and beside it every format within
the budget that treats all layers alike: each candidate by its name, and the pair of least summed damage. Of all these
the least measured KL is taken, so that a mix never costs more than what could be had without measuring. What comes out
repeats without measuring again: it is the recipe that the output stores. Sinks, recent and sensitive pages are kept in
float as the recipe says while all this is measured; the budget is that of the other pages.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.errors import UsageError
from cann_llm_quant.export.model_config import json_bytes
from cann_llm_quant.kv_recipe import KvRecipe, parse_rules
from cann_llm_quant.kv_spec import parse_kv_spec
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.pipeline.kv_candidates import (
    SIDES,
    Candidates,
    candidates_of,
    layer_ranges,
    named_pairs,
    page_bits,
    spec_text,
)
from cann_llm_quant.pipeline.kv_sensitivity import (
    DEFAULT_SAMPLES,
    KvSensitivityRequest,
    measure_joint,
    measure_kv_sensitivity,
    open_work,
)
from cann_llm_quant.pipeline.kv_sensitivity_file import (
    RULES,
    FormatDamage,
    JointDamage,
    KvChoiceReport,
    KvSensitivity,
    load_kv_sensitivity,
)
from cann_llm_quant.pipeline.request import Event, RunOptions
from cann_llm_quant.quant.allocation import allocate
from cann_llm_quant.quant.kv import LayerKv
from cann_llm_quant.recipe import Recipe

CHOICE_FILE = "kv_cache/choice.json"

Tell = Callable[[Event], None]


@dataclass(frozen=True)
class KvMix:
    """A choice: the label of every layer's K and V, and the offered formats with what they cost."""

    offered: tuple[Mapping[str, FormatDamage], ...]
    chosen: tuple[str, ...]

    @property
    def damage(self) -> float:
        """Sum of the chosen formats' damage, in nats per token."""
        return sum(formats[label].damage for formats, label in zip(self.offered, self.chosen, strict=True))

    @property
    def bits(self) -> float:
        """Stored bits per value."""
        stored = (formats[label].bits for formats, label in zip(self.offered, self.chosen, strict=True))
        return sum(stored) / len(self.chosen)

    @property
    def spec(self) -> str:
        """The SPEC that means it."""
        return spec_text(self.layers())

    def layers(self) -> tuple[LayerKv, ...]:
        """The schemes by layer."""
        pairs = zip(self.chosen[::2], self.chosen[1::2], strict=True)
        return tuple(parse_kv_spec(f"k={k} v={v}", 1)[0] for k, v in pairs)


def resolve_kv_bits(
    source: Checkpoint, name: str, recipe: Recipe, options: RunOptions, tell: Tell
) -> tuple[Recipe, KvChoiceReport | None]:
    """The recipe with `auto` of the KV cache replaced by formats, and the report; unchanged where formats are named.

    The measurement comes from `options.kv_sensitivity` or is made here. Raises UsageError for a budget that the
    candidates cannot keep and for a file that does not fit the model and the recipe.
    """
    wanted = recipe.kv_cache
    if wanted is None or wanted.budget is None:
        return recipe, None
    arch, bits = arch_from_checkpoint(source), wanted.budget
    offered = candidates_of(wanted.candidates, arch)
    _require_reachable(offered, arch, wanted, bits)
    calibration = recipe.calibration
    few = calibration.model_copy(update={"samples": min(calibration.samples, DEFAULT_SAMPLES)})
    request = KvSensitivityRequest(few, wanted, wanted.candidates)
    if options.kv_sensitivity is None:
        found = measure_kv_sensitivity(source, name, request, options, tell)
    else:
        found = load_kv_sensitivity(options.kv_sensitivity)
        _require_fitting(options.kv_sensitivity, found, source, arch, wanted, offered)
    mix = choose(found, arch, wanted, offered, bits)
    mixes = [mix, *uniform_mixes(mix, named_pairs(wanted.candidates, offered), bits)]
    silent = replace(options, allow_fewer_samples=True)
    work = open_work(source, request, silent, _steps_of(tell)).work
    compared = [
        JointDamage(spec=one.spec, bits=one.bits, predicted_kl=one.damage, measured_kl=kl)
        for one, kl in zip(mixes, measure_joint(work, [one.layers() for one in mixes]), strict=True)
    ]
    best = min(range(len(mixes)), key=lambda number: compared[number].measured_kl)
    report = KvChoiceReport(
        **compared[best].model_dump(), bits_wanted=bits, compared=tuple(compared), sensitivity=found
    )
    for sentence in description(mixes[best], report):
        tell(Event("prepare", message=sentence))
    return recipe.model_copy(update={"kv_cache": _explicit(wanted, report.spec)}), report


def choice_files(report: KvChoiceReport | None) -> dict[str, bytes]:
    """The output's file that says how formats were chosen."""
    return {} if report is None else {CHOICE_FILE: json_bytes(report.document())}


def _steps_of(tell: Tell) -> Tell:
    """Progress without the sentences that the first measurement has told."""
    return lambda event: None if event.message else tell(event)


def _explicit(wanted: KvRecipe, spec: str) -> KvRecipe:
    """The section with `spec`; details of stored scales go where there are none."""
    unused = {} if parse_rules(spec).calibrated else {"headroom": 1.0, "percentile": 100.0}
    return wanted.model_copy(update={"scheme": spec, "bits": None, "candidates": None, **unused})


def _require_reachable(offered: Candidates, arch: Arch, wanted: KvRecipe, bits: float) -> None:
    """Refuse a budget that nothing keeps before anything is measured."""
    values = arch.num_kv_heads * wanted.page_size * arch.head_dim
    least = sum(
        min(page_bits(scheme, arch, wanted.page_size) for scheme in offered[side].values()) / values for side in SIDES
    )
    if least / len(SIDES) > bits:
        raise UsageError(
            f"--kv-bits {bits:g} is less than the {least / len(SIDES):.3f} bits per value of the smallest candidates; "
            "raise it or add smaller --kv-candidates"
        )


def _require_fitting(
    path: Path, found: KvSensitivity, source: Checkpoint, arch: Arch, wanted: KvRecipe, offered: Candidates
) -> None:
    """The file must be of this model, of a cache kept alike, and hold what is offered. Raises UsageError."""
    again = "measure again with cann-llm-quant sensitivity --kv-cache"
    if found.fingerprint != source.fingerprint():
        raise UsageError(f"{path} was measured on another model ({found.model}); {again}")
    for field in RULES:
        theirs, ours = getattr(found.settings, field), getattr(wanted, field)
        if theirs != ours:
            raise UsageError(f"{path} was measured with {field} {theirs}, the recipe has {ours}; {again}")
    sides = [(entry.layer, entry.side) for entry in found.sides]
    if sides != [(layer, side) for layer in range(arch.num_layers) for side in SIDES]:
        raise UsageError(f"{path} holds other layers than the model has; {again}")
    for entry in found.sides:
        for label, scheme in offered[entry.side].items():
            if label not in entry.formats:
                raise UsageError(f"{path} has no {label} for {entry.side}; name other --kv-candidates or {again}")
            values = arch.num_kv_heads * wanted.page_size * arch.head_dim
            if entry.formats[label].bits != page_bits(scheme, arch, wanted.page_size) / values:
                raise UsageError(f"{path} gives {label} other bits than it stores; {again}")


def choose(found: KvSensitivity, arch: Arch, wanted: KvRecipe, offered: Candidates, bits: float) -> KvMix:
    """The formats of least summed damage whose mean is at most `bits` per value."""
    values = arch.num_kv_heads * wanted.page_size * arch.head_dim
    measured = tuple({label: entry.formats[label] for label in offered[entry.side]} for entry in found.sides)
    sizes = [
        [page_bits(scheme, arch, wanted.page_size) for scheme in offered[entry.side].values()] for entry in found.sides
    ]
    indices = allocate(
        [[one.damage for one in formats.values()] for formats in measured], sizes, int(bits * values * len(sizes))
    )
    return KvMix(measured, tuple(list(formats)[i] for formats, i in zip(measured, indices, strict=True)))


def uniform_mixes(mix: KvMix, named: Sequence[tuple[str, str]], bits: float) -> list[KvMix]:
    """Other choices within the budget that give all layers the same labels of K and V: `named` ones, and the best."""
    layers = len(mix.offered) // len(SIDES)
    pairs = itertools.product(mix.offered[0], mix.offered[1])
    fitting = [one for pair in pairs if (one := KvMix(mix.offered, pair * layers)).bits <= bits]
    least = min(fitting, key=lambda one: one.damage, default=mix)
    return [one for one in fitting if one.chosen != mix.chosen and (one == least or one.chosen[: len(SIDES)] in named)]


def description(mix: KvMix, report: KvChoiceReport) -> list[str]:
    """What was chosen, for the user."""
    sentences = [f"KV cache of {report.bits:.3f} bits per value"]
    for number, side in enumerate(SIDES):
        layers: dict[str, list[int]] = {}
        for layer, label in enumerate(mix.chosen[number::2]):
            layers.setdefault(label, []).append(layer)
        sentences.append(f"{side}: {'; '.join(f'{label} in {layer_ranges(found)}' for label, found in layers.items())}")
    sentences.append(
        f"predicted KL {report.predicted_kl:.3g} nats per token, the sum of layers and sides alone; "
        f"all together measure {report.measured_kl:.3g}"
    )
    mixed, *alike = report.compared
    if report.spec != mixed.spec:
        sentences.append(f"the mix of least predicted KL measures {mixed.measured_kl:.3g}, more than the same for all")
    if alike:
        costs = "; ".join(f"{one.spec} {one.measured_kl:.3g}" for one in alike)
        sentences.append(f"measured KL of one format for all within the budget: {costs}")
    return sentences
