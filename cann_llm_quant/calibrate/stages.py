"""One layer, site by site: each site is measured on what the linears before it, already quantized, hand it.

    states ─norm─► qkv ─attention─► o ─► stream ─norm─► gate_up ─► down ─► states of the next layer

Two models may walk together: the one that is being quantized, whose linears the caller replaces after each stage, and
the float one, so that every site sees how far its input and its layer's residual stream have drifted. What a stage
needs of the one before (attention's output, the stream, the gated activations) is kept for all windows in a
`StateStore`. Each linear multiplies every window exactly once, as when the layer is simply run, and with the same
operations, so that running the stored layer again gives the same bits.

A mixture's experts are measured on the tokens that the quantized model routes to them and on what they borrow
(calibrate/experts.py), without a float partner: the two models route tokens differently.
"""

from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.calibrate.experts import ExpertCollector
from cann_llm_quant.calibrate.moments import MomentSums, SiteMoments
from cann_llm_quant.calibrate.state_store import StateStore
from cann_llm_quant.calibrate.stream import HiddenStates, require_finite
from cann_llm_quant.models.attention import CausalAttend
from cann_llm_quant.models.decoder import DecoderLayer, ignore, rotation_of

Pair = tuple[Tensor, Tensor | None]
Measured = dict[str, SiteMoments]


class _Walk:
    """One model's way through the layer; every method runs all windows and yields what the next site reads."""

    def __init__(self, name: str, layer: DecoderLayer, states: HiddenStates, store: StateStore) -> None:
        self.layer, self.states, self._name, self._store = layer, states, name, store
        positions = torch.arange(states.shape[1], device=states.device)[None]
        self._rotation = rotation_of(layer.arch, positions, states.dtype)
        self._attend = CausalAttend()

    def attention_inputs(self) -> Iterator[Pair]:
        for x in self.states.windows():
            yield self.layer.norm("input_norm", x).flatten(0, 1), None

    def mixed(self) -> Iterator[Pair]:
        for window, x in enumerate(self.states.windows()):
            mixed = self.layer.mix(self.layer.norm("input_norm", x), self._rotation, self._attend, ignore)
            self._store.put(self._slot("mixed"), window, mixed)
            yield mixed.flatten(0, 1), x.flatten(0, 1)

    def mlp_inputs(self) -> Iterator[Pair]:
        pairs = zip(self.states.windows(), self._store.all(self._slot("mixed")), strict=True)
        for window, (x, mixed) in enumerate(pairs):
            h = x + self.layer.linears["o"](mixed)
            self._store.put(self._slot("stream"), window, h)
            yield self.layer.norm("post_norm", h).flatten(0, 1), None
        self._store.drop(self._slot("mixed"))

    def streams(self) -> Iterator[Tensor]:
        return self._store.all(self._slot("stream"))

    def gated(self) -> Iterator[Pair]:
        for window, h in enumerate(self.streams()):
            inner = self.layer.gate("", self.layer.norm("post_norm", h).flatten(0, 1), ignore)
            self._store.put(self._slot("inner"), window, inner[None])
            yield inner, h.flatten(0, 1)

    def outputs(self) -> Iterator[Float[Tensor, "1 seq hidden"]]:
        for window in range(self._store.windows):
            yield self.output(window)

    def output(self, window: int) -> Float[Tensor, "1 seq hidden"]:
        h = self._store.get(self._slot("stream"), window)
        if self.layer.layer.moe is None:
            mlp = self.layer.linears["down"](self._store.get(self._slot("inner"), window)[0])
        else:
            mlp = self.layer.mlp(self.layer.norm("post_norm", h).flatten(0, 1), ignore)
        y = h + mlp.view_as(h)
        require_finite(y, self.states.index, window)
        return y

    def close(self) -> None:
        for slot in ("mixed", "stream", "inner"):
            self._store.drop(self._slot(slot))

    def _slot(self, kind: str) -> str:
        return f"{self._name}-{kind}"


class StagedLayer:
    """A layer on its way from float to quantized; `wanted` are the sites to be measured.

    `float_layer` and `float_states` are None where no float model walks along. `factors` are what the quantized model's
    producers were divided by, by site: the float model's inputs are divided by the same. `every_token` measures experts
    on all tokens. `step` is called after every window.
    """

    def __init__(
        self,
        layer: DecoderLayer,
        states: HiddenStates,
        store: StateStore,
        wanted: Collection[str],
        *,
        float_layer: DecoderLayer | None = None,
        float_states: HiddenStates | None = None,
        factors: Mapping[str, Float[Tensor, " in"]] | None = None,
        every_token: bool = False,
        step: Callable[[], None] = lambda: None,
    ) -> None:
        self._quantized = _Walk("quantized", layer, states, store)
        self._float = None
        if float_layer is not None and float_states is not None:
            self._float = _Walk("float", float_layer, float_states, store)
        self._wanted, self._factors, self._step = tuple(wanted), factors or {}, step
        self._every_token = every_token

    def sites(self) -> Iterator[Measured]:
        """Moments of the sites, stage by stage; the caller replaces the linears of a stage before taking the next."""
        yield self._measured("qkv", _Walk.attention_inputs)
        yield self._measured("o", _Walk.mixed)
        if self._quantized.layer.layer.moe is None:
            yield self._measured("gate_up", _Walk.mlp_inputs)
            yield self._measured("down", _Walk.gated)
            return
        for _ in self._pairs(_Walk.mlp_inputs):
            pass
        for kind in ("gate_up", "down"):
            yield self._mixture(kind)

    def advance(self) -> None:
        """Replace the states of both models by the layer's outputs."""
        for walk in (self._quantized, self._float):
            if walk is not None:
                for _ in walk.states.replace(walk.outputs()):
                    self._step()
        self.close()

    def pair(self, window: int) -> tuple[Float[Tensor, "1 seq hidden"], Float[Tensor, "1 seq hidden"]]:
        """The quantized model's input of the layer, and the float model's output; after all sites."""
        assert self._float is not None
        return self._quantized.states.window(window), self._float.output(window)

    def rerun(self, layer: DecoderLayer) -> None:
        """Replace the states of the quantized model by the outputs of `layer` instead of those of the walk."""
        for _ in self._quantized.states.advance(layer):
            self._step()
        if self._float is not None:
            for _ in self._float.states.replace(self._float.outputs()):
                self._step()
        self.close()

    def close(self) -> None:
        """Free what was kept between stages."""
        for walk in (self._quantized, self._float):
            if walk is not None:
                walk.close()

    def _pairs(self, stage: Callable[[_Walk], Iterator[Pair]]) -> Iterator[tuple[Pair, Pair | None]]:
        partner = None if self._float is None else stage(self._float)
        for read in stage(self._quantized):
            yield read, None if partner is None else next(partner)
            self._step()
        if partner is not None:
            # Run to its end, where it frees what the next stage does not read.
            next(partner, None)

    def _measured(self, site: str, stage: Callable[[_Walk], Iterator[Pair]]) -> Measured:
        sums = MomentSums()
        for (y, stream), partner in self._pairs(stage):
            if site not in self._wanted:
                continue
            x, float_stream = (None, None) if partner is None else partner
            if x is not None and site in self._factors:
                x = x / self._factors[site].to(x.dtype)
            sums.add(y, x, None if stream is None else (stream, float_stream))
        moments = sums.finish()
        return {} if moments is None else {site: moments}

    def _mixture(self, kind: str) -> Measured:
        """Sites of all experts and of the shared expert that end in `kind`, over the tokens routed to them."""
        layer = self._quantized.layer
        sites = [site for site in self._wanted if site.endswith(kind)]
        collector = ExpertCollector(layer, sites, every_token=self._every_token)
        for h in self._quantized.streams():
            layer.mlp(layer.norm("post_norm", h).flatten(0, 1), collector.observe)
            self._step()
        return {
            site: SiteMoments(s.hessian, None, None, s.tokens, s.borrowed, s.routed)
            for site, s in collector.finish().items()
        }
