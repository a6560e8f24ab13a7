"""Sensitivity: what quantizing each unit, alone, would cost in KL of the model's output.

Estimates of second order for every unit and candidate scheme come from one forward and one backward pass
(`calibrate/backward.py`, `damage.py`); a few units are then really quantized one at a time (`one_at_a_time.py`), which
says how far the estimates can be trusted and corrects them (`agreement.py`).
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cann_llm_quant import __version__
from cann_llm_quant.calibrate.backward import Contribution, StreamedBackward
from cann_llm_quant.calibrate.state_store import StateStore
from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.device import resolve_device, resolve_dtype
from cann_llm_quant.errors import UsageError
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.models.weights import load_layer
from cann_llm_quant.pipeline.agreement import corrections, log_correlation, rank_correlation, units_to_measure
from cann_llm_quant.pipeline.calibration_text import calibration_windows
from cann_llm_quant.pipeline.damage import Solver, unit_damages
from cann_llm_quant.pipeline.one_at_a_time import Variant, measure_variants
from cann_llm_quant.pipeline.request import Event, RunOptions, Stage
from cann_llm_quant.pipeline.sensitivity_file import (
    Agreement,
    ChoiceDamage,
    LayerEntry,
    Sensitivity,
    Settings,
    UnitEntry,
)
from cann_llm_quant.pipeline.units import Choice, Unit, choices_of, units_of
from cann_llm_quant.recipe import DEFAULT_CANDIDATES, FLOAT, Calibration

Tell = Callable[[Event], None]


@dataclass(frozen=True)
class SensitivityRequest:
    """What to measure: candidate schemes (the first one that is not float ranks and is measured), text, and how many
    units to measure truly, on how many windows.
    """

    calibration: Calibration
    candidates: tuple[str, ...] = DEFAULT_CANDIDATES
    solver: Solver = "feedback"
    measured: int = 8
    measured_windows: int = 4


@dataclass(frozen=True)
class _Work:
    """One measurement, resolved."""

    source: Checkpoint
    arch: Arch
    units: list[Unit]
    choices: dict[str, Mapping[str, Choice]]
    request: SensitivityRequest
    ids: torch.Tensor
    device: torch.device
    dtype: torch.dtype
    tell: Tell

    def storage(self, unit: Unit) -> torch.dtype:
        return self.source.tensors[f"{unit.modules[0]}.weight"].dtype

    def first_choice(self, unit: Unit) -> Choice:
        return next(iter(self.choices[unit.name].values()))

    def step(self, stage: Stage, layer: int, done: int, total: int) -> None:
        self.tell(Event(stage, done, total, f"layer {layer + 1}/{self.arch.num_layers}"))


def measure_sensitivity(
    source: Checkpoint, name: str, request: SensitivityRequest, options: RunOptions, tell: Tell = lambda event: None
) -> Sensitivity:
    """Measure every unit of a float checkpoint; `name` is what the document calls the model.

    Raises InputError's kinds before work starts, NumericError when the model gives NaN or infinity.
    """
    if set(request.candidates) == {FLOAT}:
        raise UsageError("float alone loses nothing, so there is nothing to measure; name a scheme such as W4g64")
    # Float, which costs nothing, can neither rank units nor be held against a measurement.
    request = replace(request, candidates=tuple(sorted(request.candidates, key=lambda name: name == FLOAT)))
    arch = arch_from_checkpoint(source)
    ids, corpus = calibration_windows(
        source, arch, request.calibration, allow_fewer=options.allow_fewer_samples, tell=tell
    )
    units = units_of(arch)
    choices = {unit.name: choices_of(unit, request.candidates) for unit in units}
    device, dtype = resolve_device(options.device), resolve_dtype(options.dtype)
    work = _Work(source, arch, units, choices, request, ids, device, dtype, tell)
    with tempfile.TemporaryDirectory(prefix="cann-llm-quant-") as scratch:
        store = StateStore(len(ids), budget=options.activation_budget, scratch=Path(scratch), device=device)
        contributions, estimates = _estimate(work, store)
        measured = _measure(work, store, estimates)
    agreement = _agreement(work, estimates, measured)
    entries = tuple(_entry(work, unit, estimates[unit.name], measured, agreement.corrections) for unit in units)
    settings = Settings(
        candidates=request.candidates,
        solver=request.solver,
        dtype=options.dtype,
        device=device.type,
        seed=request.calibration.seed,
        measured_windows=min(request.measured_windows, len(ids)) if measured else 0,
        calibration=corpus,
    )
    return Sensitivity(
        tool_version=__version__,
        model=name,
        fingerprint=source.fingerprint(),
        settings=settings,
        agreement=agreement,
        units=entries,
        layers=tuple(_layer_entry(index, entries, found) for index, found in enumerate(contributions)),
    )


def _estimate(work: _Work, store: StateStore) -> tuple[list[Contribution], dict[str, dict[str, float]]]:
    """What layers contribute, and estimates by unit and choice."""
    count, windows = work.arch.num_layers, len(work.ids)
    passes = StreamedBackward(
        work.source,
        work.arch,
        work.ids,
        store,
        device=work.device,
        dtype=work.dtype,
        step=lambda layer, done: work.step("forward", layer, layer * windows + done, count * windows),
    )
    contributions = passes.forward()
    passes.step = lambda layer, done: work.step(
        "backward", layer, (count - 1 - layer) * windows + done, count * windows
    )
    passes.output_gradients(work.request.calibration.seed)
    estimates: dict[str, dict[str, float]] = {}
    for index, fisher in passes.layers():
        weights = load_layer(work.source, work.arch, index, work.device, torch.float32)
        for unit in (unit for unit in work.units if unit.layer == index):
            estimates[unit.name] = unit_damages(
                unit,
                work.choices[unit.name].values(),
                weights,
                fisher,
                work.request.solver,
                work.storage(unit),
                work.ids.numel(),
            )
    return contributions, estimates


def _measure(
    work: _Work, store: StateStore, estimates: Mapping[str, Mapping[str, float]]
) -> dict[tuple[str, str], float]:
    """Measured KL by unit and choice name, of a few units under their first choice."""
    first = {unit.name: estimates[unit.name][work.first_choice(unit).name] for unit in work.units}
    chosen = units_to_measure(work.units, first, work.request.measured)
    variants = [Variant(unit, work.first_choice(unit)) for unit in chosen]
    with torch.inference_mode():
        found = measure_variants(
            work.source,
            work.arch,
            store,
            variants,
            windows=min(work.request.measured_windows, len(work.ids)),
            solver=work.request.solver,
            device=work.device,
            dtype=work.dtype,
            step=lambda layer, done, total: work.step("measure", layer, done, total),
        )
    return {(v.unit.name, v.choice.name): kl for v, kl in zip(variants, found, strict=True)}


def _agreement(
    work: _Work, estimates: Mapping[str, Mapping[str, float]], measured: Mapping[tuple[str, str], float]
) -> Agreement:
    kind_of = {unit.name: unit.kind for unit in work.units}
    estimated = [estimates[unit][choice] for unit, choice in measured]
    true = list(measured.values())
    return Agreement(
        measured=len(true),
        rank_correlation=rank_correlation(estimated, true),
        log_correlation=log_correlation(estimated, true),
        corrections=corrections([kind_of[unit] for unit, _ in measured], estimated, true),
    )


def _entry(
    work: _Work,
    unit: Unit,
    estimates: Mapping[str, float],
    measured: Mapping[tuple[str, str], float],
    factors: Mapping[str, float],
) -> UnitEntry:
    storage = work.storage(unit)
    damages = {}
    own = {name: kl for (measured_unit, name), kl in measured.items() if measured_unit == unit.name}
    ratios = [kl / estimates[name] for name, kl in own.items() if kl > 0 and estimates[name] > 0]
    factor = ratios[0] if ratios else factors.get(unit.kind, 1.0)
    for name, choice in work.choices[unit.name].items():
        true = None if name not in own else max(0.0, own[name])  # KL of nearly equal outputs may round below 0
        damages[name] = ChoiceDamage(
            bits=choice.stored_bits(unit, storage),
            estimate=_six_digits(estimates[name]),
            measured=None if true is None else _six_digits(true),
            damage=_six_digits(estimates[name] * factor if true is None else true),
        )
    return UnitEntry(
        name=unit.name,
        layer=unit.layer,
        kind=unit.kind,
        modules=unit.modules,
        weights=unit.weights,
        float_bits=unit.weights * storage.itemsize * 8,
        choices=damages,
    )


def _layer_entry(index: int, entries: tuple[UnitEntry, ...], found: Contribution) -> LayerEntry:
    damage = sum(next(iter(entry.choices.values())).damage for entry in entries if entry.layer == index)
    return LayerEntry(index=index, damage=_six_digits(damage), cosine=found.cosine, change=found.change)


def _six_digits(value: float) -> float:
    """Digits behind these depend on the number of threads, and allocations are made from the document."""
    return float(f"{value:.6g}")
