"""What gets one scheme: the linears of a layer that runtimes fuse or load together, and the schemes they may get.

A unit is a site's linears (q/k/v, o, gate/up, down); sites that a fusion group joins are one unit, and all routed
experts of a layer are one, because runtimes load experts of one scheme. Its name is `layers.<index>.<kind>`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import gcd

import torch

from cann_llm_quant.models.arch import Arch, Layer, LinearSpec
from cann_llm_quant.quant.scheme import Scheme, largest_fitting_group, scheme_for
from cann_llm_quant.recipe import WeightScheme, parse_candidate, spell_candidate

EXPERTS = "experts"


@dataclass(frozen=True)
class Unit:
    """Linears that share a scheme."""

    name: str
    layer: int
    kind: str
    linears: tuple[LinearSpec, ...]

    @property
    def weights(self) -> int:
        """How many weights it has."""
        return sum(spec.out_features * spec.in_features for spec in self.linears)

    @property
    def modules(self) -> tuple[str, ...]:
        """Full names of its linears."""
        return tuple(spec.module for spec in self.linears)


@dataclass(frozen=True)
class Choice:
    """One scheme that a unit may get, under its short name; `scheme` None leaves it in float."""

    name: str
    weight: WeightScheme | None
    scheme: Scheme | None

    def stored_bits(self, unit: Unit, storage: torch.dtype) -> int:
        """Bits that the unit takes in the file, scales (of the storage's width) and zero points included."""
        width = 8 * storage.itemsize
        if self.scheme is None:
            return unit.weights * width
        scale_bits = 32 if width > 16 else 16
        return sum(
            round(self.scheme.bits_per_weight(spec.out_features, spec.in_features, scale_bits) * size)
            for spec in unit.linears
            for size in [spec.out_features * spec.in_features]
        )


def units_of(arch: Arch) -> list[Unit]:
    """All units of a model, by layer; routers and gates are in none."""
    return [unit for layer in arch.layers for unit in _layer_units(layer)]


def _layer_units(layer: Layer) -> list[Unit]:
    kind_of = {role: _kind(site.name) for site in layer.sites for role in site.linears}
    for first, *others in layer.fusion_groups:
        joined = {kind_of[role] for role in others}
        kind_of |= {role: kind_of[first] for role, kind in kind_of.items() if kind in joined}
    members: dict[str, list[LinearSpec]] = {}
    for spec in layer.linears:
        if spec.quantizable and spec.role in kind_of:
            members.setdefault(kind_of[spec.role], []).append(spec)
    return [Unit(f"layers.{layer.index}.{kind}", layer.index, kind, tuple(specs)) for kind, specs in members.items()]


def _kind(site: str) -> str:
    return EXPERTS if site.startswith(f"{EXPERTS}.") else site


def choices_of(unit: Unit, candidates: Iterable[str]) -> Mapping[str, Choice]:
    """The candidates as they fit this unit, by short name.

    A group size that does not divide the inputs becomes the largest smaller one that does, or a whole row; candidates
    that become equal are one.
    """
    columns = gcd(*(spec.in_features for spec in unit.linears))
    choices: dict[str, Choice] = {}
    for candidate in candidates:
        wanted = parse_candidate(candidate)
        if wanted is None:
            choices[candidate] = Choice(candidate, None, None)
            continue
        assert isinstance(wanted.group_size, int)
        size = -1 if wanted.group_size == -1 else largest_fitting_group(columns, wanted.group_size) or -1
        weight = wanted.model_copy(update={"group_size": size})
        name = spell_candidate(weight)
        choices[name] = Choice(name, weight, scheme_for(weight.bits, size, weight.symmetric))
    return choices
