"""`--kv-cache auto`: which format each layer's keys and values get within a budget of bytes, by what each really costs.

For every layer and candidate the float model runs with that layer's cache in that format and everything else in float,
through the runner's own pages; the cost is the KL of its outputs against the float model's. Costs of layers add up as
far as errors are small, so that the best mix within the budget is a knapsack (quant/allocation.py).

The formats are int8 by static scales, with V by token where that is worth its scales, and two mixes with 4 bits. A page
is float, 16 bits a value, where no candidate would do. The answer is a SPEC that names layers: the same recipe again
needs no measuring.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor

from cann_llm_quant.calibrate.kv_ranges import KvWatch
from cann_llm_quant.calibrate.state_store import StateStore
from cann_llm_quant.calibrate.stream import run_layer
from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.device import resolve_device, resolve_dtype
from cann_llm_quant.evaluate.divergence import divergence
from cann_llm_quant.kv_recipe import KvRecipe
from cann_llm_quant.kv_spec import parse_kv_spec
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.models.attention import Attend
from cann_llm_quant.models.decoder import DecoderLayer, DenseLinear, embed, head
from cann_llm_quant.models.weights import build_layer, load_layer, load_outer
from cann_llm_quant.pipeline.calibration_text import calibration_windows
from cann_llm_quant.pipeline.kv_cache import is_stored, static_scales
from cann_llm_quant.pipeline.request import Event, RunOptions
from cann_llm_quant.quant.allocation import allocate
from cann_llm_quant.quant.kv import KvPlan, KvScales, LayerKv
from cann_llm_quant.recipe import Recipe
from cann_llm_quant.runner.cached_windows import CachedWindows

CANDIDATES = (
    "float",
    "k=int8-channel v=int8-token",
    "k=int8-channel v=int8-head",
    "k=int8-channel v=int4-asym-token",
    "int4",
)
MEASURED_WINDOWS = 4
FLOAT_BYTES = 2  # of a number that is not quantized, as budgets count it

Tell = Callable[[Event], None]


@dataclass(frozen=True)
class _Work:
    source: Checkpoint
    arch: Arch
    ids: Int64[Tensor, "windows seq"]
    wanted: KvRecipe
    device: torch.device
    dtype: torch.dtype
    tell: Tell

    def step(self, layer: int, done: int, total: int) -> None:
        self.tell(Event("measure", done, total, f"layer {layer + 1}/{self.arch.num_layers}"))


def resolve_auto(source: Checkpoint, recipe: Recipe, options: RunOptions, tell: Tell) -> Recipe:
    """The recipe with an `auto` cache replaced by one that names layers; unchanged where there is none.

    Raises UsageError for a budget that no mix of the candidates meets.
    """
    wanted = recipe.kv_cache
    if wanted is None or wanted.spec.auto is None:
        return recipe
    arch = arch_from_checkpoint(source)
    few = recipe.calibration.model_copy(update={"samples": min(recipe.calibration.samples, MEASURED_WINDOWS)})
    ids, _ = calibration_windows(source, arch, few, allow_fewer=options.allow_fewer_samples, tell=tell)
    work = _Work(source, arch, ids, wanted, resolve_device(options.device), resolve_dtype(options.dtype), tell)
    with tempfile.TemporaryDirectory(prefix="cann-llm-quant-") as scratch, torch.no_grad():
        store = StateStore(len(ids), budget=options.activation_budget, scratch=Path(scratch), device=work.device)
        damage = measure_layers(work, store)
    sizes = [candidate_bytes(arch, name, wanted.page_size) for name in CANDIDATES]
    budget = int(wanted.spec.auto * arch.num_layers * sizes[0])
    chosen = allocate(damage, [sizes] * arch.num_layers, budget)
    share = sum(sizes[choice] for choice in chosen) / (arch.num_layers * sizes[0])
    cost = sum(row[choice] for row, choice in zip(damage, chosen, strict=True))
    spec = _spelled(chosen)
    tell(Event("prepare", message=f"KV cache auto: {spec}"))
    tell(Event("prepare", message=f"{share:.1%} of the bytes of 16 bits, costs of layers sum to KL {cost:.2e}"))
    return recipe.model_copy(update={"kv_cache": wanted.model_copy(update={"scheme": spec})})


def candidate_bytes(arch: Arch, name: str, page_size: int) -> int:
    """Bytes of a page of one layer in a candidate's format, keys and values."""
    (layer,) = parse_kv_spec(name, 1)
    shape = (arch.num_kv_heads, page_size, arch.head_dim)
    plain = arch.num_kv_heads * page_size * arch.head_dim * FLOAT_BYTES
    return sum(plain if scheme is None else scheme.page_bytes(*shape) for scheme in (layer.k, layer.v))


def measure_layers(work: _Work, store: StateStore) -> list[list[float]]:
    """KL in nats a token of every layer and candidate (`float` costs nothing), with one layer in memory at a time."""
    arch, quantized = work.arch, range(1, len(CANDIDATES))
    table = work.source.load(arch.embedding_name).to(work.device)
    for window, row in enumerate(work.ids):
        store.put("float", window, embed(table, row[None].to(work.device)).to(work.dtype))
    del table
    total = len(quantized) * arch.num_layers * (arch.num_layers + 1) // 2
    done = 0
    for index in range(arch.num_layers):
        layer = build_layer(arch, index, load_layer(work.source, arch, index, work.device, work.dtype))
        for earlier in range(index):
            for candidate in quantized:
                _advance(layer, store, _slot(earlier, candidate), _slot(earlier, candidate))
        watch = KvWatch()
        _advance(layer, store, "float", "next", watch)
        for candidate in quantized:
            _advance(layer, store, "float", _slot(index, candidate), _cache(work, index, candidate, watch))
        for window in range(store.windows):
            store.put("float", window, store.get("next", window))
        done += len(quantized) * (index + 1)
        work.step(index, done, total)
    return _divergences(work, store)


def _slot(layer: int, candidate: int) -> str:
    return f"{layer}-{candidate}"


def _advance(layer: DecoderLayer, store: StateStore, source: str, target: str, attend: Attend | None = None) -> None:
    for window, y in enumerate(run_layer(layer, store.all(source), layer.layer.index, attend=attend)):
        store.put(target, window, y)


def _cache(work: _Work, index: int, candidate: int, watch: KvWatch) -> Attend:
    """The runner's cache with one layer in a candidate's format, its stored scales as a run would measure them."""
    seen = watch.finish()
    assert seen is not None, "calibration has at least one window"
    (layer,) = parse_kv_spec(CANDIDATES[candidate], 1)
    parts: list[Tensor | None] = []
    for scheme, values in zip((layer.k, layer.v), seen, strict=True):
        parts += static_scales(scheme, values, work.wanted) if scheme and is_stored(scheme) else (None, None)
    count = work.arch.num_layers
    layers, scales = [LayerKv()] * count, [KvScales()] * count
    layers[index], scales[index] = layer, KvScales(*parts)
    plan = KvPlan(tuple(layers), tuple(scales), work.wanted.sink_tokens, work.wanted.recent_tokens)
    return CachedWindows(plan, work.ids, page_size=work.wanted.page_size)


def _divergences(work: _Work, store: StateStore) -> list[list[float]]:
    outer = load_outer(work.source, work.arch, work.device, work.dtype)
    head_op = DenseLinear(outer.head)
    damage = [[0.0] * len(CANDIDATES) for _ in work.arch.layers]
    for window in range(store.windows):
        reference = head(work.arch, outer.norm, head_op, store.get("float", window))[0]
        for layer, row in enumerate(damage):
            for candidate in range(1, len(CANDIDATES)):
                logits = head(work.arch, outer.norm, head_op, store.get(_slot(layer, candidate), window))[0]
                row[candidate] += float(divergence(reference, logits)[0].mean()) / store.windows
    return damage


def _spelled(chosen: Sequence[int]) -> str:
    """The choice as a SPEC: a rule for each format, with the layers that have it."""
    rules = []
    for candidate in sorted(set(chosen)):
        layers = [index for index, choice in enumerate(chosen) if choice == candidate]
        starts = [layer for layer in layers if layer - 1 not in layers]
        ends = [layer for layer in layers if layer + 1 not in layers]
        spans = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
        rules.append(f"{','.join(spans)}: {CANDIDATES[candidate]}")
    return "; ".join(rules)
