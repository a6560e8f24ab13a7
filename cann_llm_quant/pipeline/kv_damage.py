"""What quantized caches do to a model's output: KL(float || variant), with the engine's own pages and arithmetic.

A variant is the model with the cache of some layers and sides quantized. All windows go through one layer, then the
next: first those that static scales are measured on, then the judged ones in float, then every variant that has begun.
A variant begins at its first quantized layer with the float model's states, so that nothing before it runs again.

Beside it, at each layer and without running anything further: how much a format changes what the attention adds to the
residual stream, `sum |o(cached) - o(float)|² / sum |o(float)|²` over the judged tokens.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from cann_llm_quant.calibrate.backward import slot
from cann_llm_quant.calibrate.kv_ranges import ChannelValues, KvWatch
from cann_llm_quant.calibrate.state_store import StateStore
from cann_llm_quant.calibrate.stream import HiddenStates, run_layer
from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.errors import NumericError
from cann_llm_quant.kv_recipe import KvRecipe, Side
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.models.attention import Attend, CausalAttend
from cann_llm_quant.models.decoder import DecoderLayer, LinearOp, embed
from cann_llm_quant.models.rope import rotary_dim
from cann_llm_quant.models.weights import build_layer, load_layer
from cann_llm_quant.pipeline.kv_cache import is_stored, static_scales
from cann_llm_quant.pipeline.kv_candidates import SIDES, Candidates, one_side, side_of
from cann_llm_quant.pipeline.one_at_a_time import divergences
from cann_llm_quant.pipeline.request import Event, Stage
from cann_llm_quant.quant.kv import KvPlan, KvScales, LayerKv
from cann_llm_quant.runner.cached_windows import CachedWindows

JUDGED_EVERY = 4
"""One position of so many is judged: neighbours tell much the same, and the head costs more than the layers."""

Format = tuple[int, Side, str]
"""A layer, a side, and the label of a scheme."""


@dataclass(frozen=True)
class CacheVariant:
    """Formats by layer; the other layers' caches stay in float. `name` is its own among the variants of a walk."""

    name: str
    layers: Mapping[int, LayerKv]

    @property
    def first(self) -> int:
        """The layer it begins at."""
        return min(self.layers)


@dataclass(frozen=True)
class CacheWork:
    """A model, the text for static scales (`scaled`) and the text that is judged, and how caches are kept."""

    source: Checkpoint
    arch: Arch
    scaled: Int64[Tensor, "scaled seq"]
    judged: Int64[Tensor, "judged seq"]
    rules: KvRecipe
    sensitive: frozenset[int]
    device: torch.device
    dtype: torch.dtype
    budget: int
    tell: Callable[[Event], None]


class CacheWalk:
    """One walk through the layers with `variants`; formats of `compared` are compared at every layer."""

    def __init__(self, work: CacheWork, variants: Sequence[CacheVariant], compared: Candidates | None = None) -> None:
        self._work, self._variants = work, variants
        self._compared = compared or {}
        schemes = [scheme for side in self._compared.values() for scheme in side.values()]
        schemes += [scheme for v in variants for layer in v.layers.values() for scheme in (layer.k, layer.v)]
        self._scaled = len(work.scaled) if any(is_stored(scheme) for scheme in schemes) else 0
        count, windows = work.arch.num_layers, len(work.judged)
        through = sum(count - variant.first for variant in variants)
        self._head = _head_passes(work.arch)
        self._done = 0
        self._total = count * (self._scaled + windows) + windows * (through + self._head * len(variants))
        self._errors: dict[Format, float] = {}

    @torch.inference_mode()
    def run(self) -> tuple[list[float], dict[Format, float]]:
        """KL in nats per token by variant, and relative errors of the attention's output by compared format.

        Raises NumericError naming the layer where something is not finite.
        """
        work = self._work
        with tempfile.TemporaryDirectory(prefix="cann-llm-quant-") as scratch:
            budget, folder = work.budget // 2, Path(scratch)
            shape = (self._scaled, work.scaled.shape[1], work.arch.hidden_size)
            # under a name of its own: the store's slots are called states
            states = HiddenStates(shape, work.dtype, budget=budget, scratch=folder, device=work.device, name="scaled")
            store = StateStore(len(work.judged), budget=budget, scratch=folder, device=work.device)
            embedding = work.source.load(work.arch.embedding_name).to(work.device)
            states.start(embedding, work.scaled[: self._scaled].to(work.device))
            for window, ids in enumerate(work.judged.to(work.device)):
                store.put(slot(0), window, embed(embedding, ids[None]).to(work.dtype))
            del embedding
            for index in range(work.arch.num_layers):
                self._walk_layer(index, states, store)
                states.forget_before(index + 1)
                store.drop(slot(index))
            names = [variant.name for variant in self._variants]
            return self._judge(store, names), self._errors

    def _walk_layer(self, index: int, states: HiddenStates, store: StateStore) -> None:
        work = self._work
        layer = build_layer(work.arch, index, load_layer(work.source, work.arch, index, work.device, work.dtype))
        seen = self._ranges(layer, states)
        self._compare(layer, store, seen)
        for variant in self._variants:
            if variant.first > index:
                continue
            origin = slot(index) if variant.first == index else variant.name
            formats = variant.layers.get(index)
            attend = CausalAttend() if formats is None else self._cache(index, formats, seen)
            inputs = (store.get(origin, window) for window in range(store.windows))
            for window, y in enumerate(run_layer(layer, inputs, index, attend=attend)):
                store.put(variant.name, window, y)
                self._step("measure", index)

    def _ranges(self, layer: DecoderLayer, states: HiddenStates) -> tuple[ChannelValues, ChannelValues] | None:
        """What the scaled windows put into the cache; None where no scale is stored."""
        if not self._scaled:
            return None
        watch = KvWatch(rotary_dim(self._work.arch.rope, self._work.arch.head_dim))
        for _ in states.advance(layer, attend=watch):
            self._step("calibrate", layer.layer.index)
        return watch.finish()

    def _compare(
        self, layer: DecoderLayer, store: StateStore, seen: tuple[ChannelValues, ChannelValues] | None
    ) -> None:
        """The float model's next states, and the errors of the compared formats on the way."""
        index = layer.layer.index
        caches = {
            (index, side, label): self._cache(index, one_side(side, scheme), seen)
            for side in SIDES
            for label, scheme in self._compared.get(side, {}).items()
            if scheme is not None
        }
        errors = _Errors(layer.linears["o"], caches)
        for window, y in enumerate(run_layer(layer, store.all(slot(index)), index, attend=errors)):
            store.put(slot(index + 1), window, y)
            self._step("measure", index)
        self._errors |= errors.finish()

    def _cache(self, index: int, formats: LayerKv, seen: tuple[ChannelValues, ChannelValues] | None) -> CachedWindows:
        """The attention of layer `index` by way of a cache in `formats`."""
        rules, count = self._work.rules, self._work.arch.num_layers
        parts: list[Tensor | None] = []
        for number, side in enumerate(SIDES):
            scheme = side_of(formats, side)
            if scheme is None or not is_stored(scheme):
                parts += [None, None]
                continue
            assert seen is not None, "the walk measures ranges where any scale is stored"
            parts += static_scales(scheme, seen[number], rules)
        layers, scales = [LayerKv()] * count, [KvScales()] * count
        layers[index], scales[index] = formats, KvScales(*parts)
        plan = KvPlan(tuple(layers), tuple(scales), rules.sink_tokens, rules.recent_tokens, self._work.sensitive)
        return CachedWindows(plan, self._work.judged, page_size=rules.page_size)

    def _judge(self, store: StateStore, slots: Sequence[str]) -> list[float]:
        work, before = self._work, self._done
        last = work.arch.num_layers - 1
        found = divergences(
            work.source,
            work.arch,
            store,
            slots,
            windows=len(work.judged),
            device=work.device,
            dtype=work.dtype,
            step=lambda heads: self._step("measure", last, before + heads * self._head),
            every=JUDGED_EVERY,
        )
        return [max(0.0, kl) for kl in found]  # KL of nearly equal outputs may round below 0

    def _step(self, stage: Stage, layer: int, done: int | None = None) -> None:
        self._done = self._done + 1 if done is None else done
        total = self._work.arch.num_layers
        self._work.tell(Event(stage, self._done, self._total, f"layer {layer + 1}/{total}"))


def _head_passes(arch: Arch) -> int:
    """What a window through the head and the comparison costs, in passes through a layer, for the time that is left."""
    weights = sum(spec.out_features * spec.in_features for layer in arch.layers for spec in layer.linears)
    # the logits are read and written some times over, which takes about three times as long as they themselves
    return max(1, round(4 * arch.vocab_size * arch.hidden_size * arch.num_layers / (weights * JUDGED_EVERY)))


class _Errors:
    """An `Attend` that mixes in float, and sums how far each cache would move the output projection's result."""

    def __init__(self, output: LinearOp, caches: Mapping[Format, Attend]) -> None:
        self._output, self._caches = output, caches
        self._moved = dict.fromkeys(caches, 0.0)
        self._size, self._attend = 0.0, CausalAttend()

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "1 heads seq dim"],
        k: Float[Tensor, "1 kv seq dim"],
        v: Float[Tensor, "1 kv seq dim"],
        *,
        scale: float,
        window: int | None,
    ) -> Float[Tensor, "1 heads seq dim"]:
        """Attention in float."""
        mixed = self._attend(layer, q, k, v, scale=scale, window=window)
        wanted = self._project(mixed) if self._caches else mixed
        self._size += float(wanted.double().square().sum())
        for key, cache in self._caches.items():
            moved = self._project(cache(layer, q, k, v, scale=scale, window=window)) - wanted
            self._moved[key] += float(moved.double().square().sum())
        return mixed

    def _project(self, mixed: Float[Tensor, "1 heads seq dim"]) -> Float[Tensor, "1 seq hidden"]:
        return self._output(mixed.transpose(1, 2).flatten(2))

    def finish(self) -> dict[Format, float]:
        """Relative errors by format. Raises NumericError for a format that cannot hold the values."""
        return {key: self._relative(key, moved) for key, moved in self._moved.items()}

    def _relative(self, key: Format, moved: float) -> float:
        layer, side, label = key
        if not moved < float("inf"):
            raise NumericError(f"layer {layer}, {side}: {label} gives NaN or infinity; leave it out of the candidates")
        return moved / self._size if self._size else 0.0
