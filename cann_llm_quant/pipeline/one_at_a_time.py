"""The truth that estimates are held against: one unit quantized, everything else float, and the KL of the outputs.

A variant begins at its unit's layer from the stored input of that layer, so that nothing before it runs again; all
variants then go through the later layers together, one layer in memory at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cann_llm_quant.calibrate.backward import slot
from cann_llm_quant.calibrate.state_store import StateStore
from cann_llm_quant.calibrate.statistics import StatisticsCollector
from cann_llm_quant.calibrate.stream import run_layer
from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.evaluate.divergence import divergence
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.models.decoder import DecoderLayer, DenseLinear, head
from cann_llm_quant.models.weights import build_layer, load_layer, load_outer
from cann_llm_quant.pipeline.damage import DAMPING, Solver, solve
from cann_llm_quant.pipeline.units import Choice, Unit
from cann_llm_quant.quant.gptq import factorize
from cann_llm_quant.quant.shrinkage import shrink_hessian


@dataclass(frozen=True)
class Variant:
    """The model with one unit quantized."""

    unit: Unit
    choice: Choice

    @property
    def slot(self) -> str:
        """Where its hidden states are stored."""
        return f"{self.unit.name}-{self.choice.name}"


def measure_variants(
    checkpoint: Checkpoint,
    arch: Arch,
    store: StateStore,
    variants: Sequence[Variant],
    *,
    windows: int,
    solver: Solver,
    device: torch.device,
    dtype: torch.dtype,
    step: Callable[[int, int, int], None],
) -> list[float]:
    """KL(float || variant) in nats per token over the first `windows` windows, in the order of `variants`.

    `store` holds the float model's inputs of every layer. `step(layer, done, total)` counts windows through layers and
    the head.
    """
    total = windows * sum(arch.num_layers - variant.unit.layer + 1 for variant in variants)  # the head is one more
    done = 0
    for index in range(min((v.unit.layer for v in variants), default=0), arch.num_layers):
        tensors = load_layer(checkpoint, arch, index, device, dtype)
        starting = [variant for variant in variants if variant.unit.layer == index]
        grams = _input_grams(build_layer(arch, index, tensors), starting, store) if starting else {}
        for variant in (v for v in variants if v.unit.layer <= index):
            changed, source = tensors, variant.slot
            if variant.unit.layer == index:
                changed, source = tensors | _solved(variant, tensors, grams, checkpoint, solver), slot(index)
            _advance(build_layer(arch, index, changed), index, store, source, variant.slot, windows)
            done += windows
            step(index, done, total)
    last = arch.num_layers - 1
    return divergences(
        checkpoint,
        arch,
        store,
        [variant.slot for variant in variants],
        windows=windows,
        device=device,
        dtype=dtype,
        step=lambda heads: step(last, done + heads, total),
    )


def _input_grams(layer: DecoderLayer, variants: Sequence[Variant], store: StateStore) -> dict[str, Tensor]:
    """Shrunk Gram matrices over all windows by role, of the variants' linears; an expert no token reached has none."""
    site_of = {role: site.name for site in layer.layer.sites for role in site.linears}
    roles = [spec.role for variant in variants for spec in variant.unit.linears]
    collector = StatisticsCollector(site_of[role] for role in roles)
    for _ in run_layer(layer, store.all(slot(layer.layer.index)), layer.layer.index, collector.observe):
        pass
    shrunk = {site: shrink_hessian(s.hessian, s.tokens) for site, s in collector.finish().items()}
    return {role: shrunk[site_of[role]] for role in roles if site_of[role] in shrunk}


def _solved(
    variant: Variant,
    tensors: Mapping[str, Tensor],
    grams: Mapping[str, Tensor],
    checkpoint: Checkpoint,
    solver: Solver,
) -> dict[str, Tensor]:
    """The unit's weights as they come back from their codes, by stored name."""
    solved: dict[str, Tensor] = {}
    for spec in variant.unit.linears:
        hessian, name = grams.get(spec.role), f"{spec.module}.weight"
        if hessian is None or variant.choice.scheme is None:
            continue
        w = tensors[name]
        factor = factorize(hessian, DAMPING) if solver == "feedback" else None
        storage = checkpoint.tensors[name].dtype
        solved[name] = solve(w.to(torch.float32), variant.choice.scheme, storage, hessian.diagonal(), factor).to(
            w.dtype
        )
    return solved


def _advance(layer: DecoderLayer, index: int, store: StateStore, source: str, target: str, windows: int) -> None:
    states = (store.get(source, window) for window in range(windows))
    for window, y in enumerate(run_layer(layer, states, index)):
        store.put(target, window, y)


def divergences(
    checkpoint: Checkpoint,
    arch: Arch,
    store: StateStore,
    slots: Sequence[str],
    *,
    windows: int,
    device: torch.device,
    dtype: torch.dtype,
    step: Callable[[int], None],
    every: int = 1,
) -> list[float]:
    """KL in nats per token of the final states in each of `slots` against the float model's, which `store` holds too.

    Of each window the positions `every - 1`, `2 every - 1`, ... are compared: with a large vocabulary the head costs as
    much as many layers. `step` counts windows through the head.
    """
    outer = load_outer(checkpoint, arch, device, dtype)
    head_op = DenseLinear(outer.head)
    total, positions = [0.0] * len(slots), 0
    for window in range(windows):
        reference = head(arch, outer.norm, head_op, store.get(slot(arch.num_layers), window)[:, every - 1 :: every])[0]
        positions += len(reference)
        for number, name in enumerate(slots):
            kl, _ = divergence(
                reference, head(arch, outer.norm, head_op, store.get(name, window)[:, every - 1 :: every])[0]
            )
            total[number] += float(kl.sum())
            step(window * len(slots) + number + 1)
    return [value / max(1, positions) for value in total]
