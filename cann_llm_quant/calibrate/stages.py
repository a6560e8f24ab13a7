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

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.calibrate.experts import ExpertCollector
from cann_llm_quant.calibrate.moments import MomentSums, SiteMoments
from cann_llm_quant.calibrate.state_store import StateStore
from cann_llm_quant.calibrate.stream import HiddenStates, require_finite
from cann_llm_quant.models.attention import Attend, CausalAttend
from cann_llm_quant.models.decoder import DecoderLayer, DenseLinear, Observe, ignore, rotation_of

Measured = dict[str, SiteMoments]


class _Walk(ABC):
    """One model's way through the layer; a stage runs all windows and keeps what later ones need."""

    name: str

    def __init__(
        self, layer: DecoderLayer, states: HiddenStates, store: StateStore, attend: Attend | None = None
    ) -> None:
        self.layer, self.states, self._store = layer, states, store
        positions = torch.arange(states.shape[1], device=states.device)[None]
        self._rotation = rotation_of(layer.arch, positions, states.dtype)
        self._attend = attend or CausalAttend()

    def attention_inputs(self) -> Iterator[Tensor]:
        for x in self.states.windows():
            yield self.layer.norm("input_norm", x).flatten(0, 1)

    def outputs(self) -> Iterator[Float[Tensor, "1 seq hidden"]]:
        for window in range(self._store.windows):
            yield self.output(window)

    @abstractmethod
    def output(self, window: int) -> Float[Tensor, "1 seq hidden"]:
        """The layer's output for one window, when all stages are done."""

    def close(self) -> None:
        for kind in ("mixed", "stream", "inner", "output"):
            self._store.drop(f"{self.name}-{kind}")

    def _mix(self, x: Tensor) -> Tensor:
        return self.layer.mix(self.layer.norm("input_norm", x), self._rotation, self._attend, ignore)

    def _mlp_input(self, h: Tensor) -> Tensor:
        return self.layer.norm("post_norm", h).flatten(0, 1)

    def _put(self, kind: str, window: int, value: Tensor) -> None:
        self._store.put(f"{self.name}-{kind}", window, value)

    def _kept(self, kind: str) -> Iterator[Tensor]:
        return self._store.all(f"{self.name}-{kind}")


class _QuantizedWalk(_Walk):
    """The model whose linears are replaced on the way: a stage ends at a site, the next begins with its new linears."""

    name = "quantized"

    def mixed(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What o reads, and the stream that its output is added to."""
        for window, x in enumerate(self.states.windows()):
            mixed = self._mix(x)
            self._put("mixed", window, mixed)
            yield mixed.flatten(0, 1), x.flatten(0, 1)

    def mlp_inputs(self) -> Iterator[Tensor]:
        pairs = zip(self.states.windows(), self._kept("mixed"), strict=True)
        for window, (x, mixed) in enumerate(pairs):
            h = x + self.layer.linears["o"](mixed)
            self._put("stream", window, h)
            yield self._mlp_input(h)
        self._store.drop(f"{self.name}-mixed")

    def streams(self) -> Iterator[Tensor]:
        return self._kept("stream")

    def gated(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What down reads, and the stream that its output is added to."""
        for window, h in enumerate(self.streams()):
            inner = self.layer.gate("", self._mlp_input(h), ignore)
            self._put("inner", window, inner[None])
            yield inner, h.flatten(0, 1)

    def output(self, window: int) -> Float[Tensor, "1 seq hidden"]:
        h = self._store.get(f"{self.name}-stream", window)
        if self.layer.layer.moe is None:
            mlp = self.layer.linears["down"](self._store.get(f"{self.name}-inner", window)[0])
        else:
            mlp = self.layer.mlp(self._mlp_input(h), ignore)
        y = h + mlp.view_as(h)
        require_finite(y, self.states.index, window)
        return y


class _FloatWalk(_Walk):
    """The float model: its linears stay, so that a stage goes on to the stream behind the site."""

    name = "float"

    def mixed(self) -> Iterator[Tensor]:
        """The stream after attention."""
        for window, x in enumerate(self.states.windows()):
            h = x + self.layer.linears["o"](self._mix(x))
            self._put("stream", window, h)
            yield h.flatten(0, 1)

    def mlp_inputs(self) -> Iterator[Tensor]:
        return (self._mlp_input(h) for h in self._kept("stream"))

    def gated(self) -> Iterator[Tensor]:
        """The stream after the MLP, which is the layer's output."""
        for window, h in enumerate(self._kept("stream")):
            y = h + self.layer.mlp(self._mlp_input(h), ignore).view_as(h)
            require_finite(y, self.states.index, window)
            self._put("output", window, y)
            yield y.flatten(0, 1)
        self._store.drop(f"{self.name}-stream")

    def output(self, window: int) -> Float[Tensor, "1 seq hidden"]:
        return self._store.get(f"{self.name}-output", window)


class StagedLayer:
    """A layer on its way from float to quantized; `wanted` are the sites to be measured.

    `float_layer` and `float_states` are None where no float model walks along. `factors` are what the quantized model's
    producers were divided by, by site: the float model's inputs are divided by the same. `every_token` measures experts
    on all tokens. `observers` gives, for each stage in turn (`qkv`, `o`, `gate_up`, `down`), an observer of what the
    quantized model hands its sites; `attend` is what its attention mixes with (None: nothing but causal attention).
    `step` is called after every window.
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
        observers: Callable[[str], Observe] = lambda stage: ignore,
        attend: Attend | None = None,
        step: Callable[[], None] = lambda: None,
    ) -> None:
        self._quantized = _QuantizedWalk(layer, states, store, attend)
        self._float = None
        if float_layer is not None and float_states is not None:
            self._float = _FloatWalk(float_layer, float_states, store)
        self._wanted, self._factors, self.step = tuple(wanted), factors or {}, step
        self._every_token, self._observers = every_token, observers

    def sites(self) -> Iterator[Measured]:
        """Moments of the sites, stage by stage; the caller replaces the linears of a stage before taking the next."""
        walk, partner = self._quantized, self._partner
        yield self._read("qkv", walk.attention_inputs(), partner(_FloatWalk.attention_inputs))
        yield self._written("o", walk.mixed(), partner(_FloatWalk.mixed))
        inputs = self._read("gate_up", walk.mlp_inputs(), partner(_FloatWalk.mlp_inputs))
        if walk.layer.layer.moe is None:
            yield inputs
            yield self._written("down", walk.gated(), partner(_FloatWalk.gated))
            return
        for kind in ("gate_up", "down"):
            yield self._mixture(kind)
        if self._float is not None:
            for _ in self._float.gated():
                self.step()

    def advance(self) -> None:
        """Replace the states of both models by the layer's outputs."""
        for walk in (self._quantized, self._float):
            if walk is not None:
                for _ in walk.states.replace(walk.outputs()):
                    self.step()
        self.close()

    @property
    def windows(self) -> int:
        """How many windows walk."""
        return self._quantized.states.shape[0]

    def pair(self, window: int) -> tuple[Float[Tensor, "1 seq hidden"], Float[Tensor, "1 seq hidden"]]:
        """The quantized model's input of the layer, and the float model's output; after all sites."""
        assert self._float is not None
        return self._quantized.states.window(window), self._float.output(window)

    def rerun(self, layer: DecoderLayer, attend: Attend | None = None) -> None:
        """Replace the states of the quantized model by the outputs of `layer` instead of those of the walk."""
        for _ in self._quantized.states.advance(layer, attend=attend):
            self.step()
        if self._float is not None:
            for _ in self._float.states.replace(self._float.outputs()):
                self.step()
        self.close()

    def close(self) -> None:
        """Free what was kept between stages."""
        for walk in (self._quantized, self._float):
            if walk is not None:
                walk.close()

    def _partner(self, stage: Callable[[_FloatWalk], Iterator[Tensor]]) -> Iterator[Tensor | None]:
        """The float model's part of a stage, as many None without one."""
        return itertools.repeat(None, self.windows) if self._float is None else stage(self._float)

    def _read(self, site: str, inputs: Iterator[Tensor], partner: Iterator[Tensor | None]) -> Measured:
        """Moments of a site whose linears go on to other linears."""
        sums, observe = MomentSums(), self._observers(site)
        for y, x in zip(inputs, partner, strict=True):
            observe(site, y)
            if site in self._wanted:
                if x is not None and site in self._factors:
                    x = x / self._factors[site].to(x.dtype)
                sums.add(y, x=x)
            self.step()
        return _found(site, sums)

    def _written(
        self, site: str, inputs: Iterator[tuple[Tensor, Tensor]], partner: Iterator[Tensor | None]
    ) -> Measured:
        """Moments of a site whose one linear writes to the stream."""
        sums, observe = MomentSums(), self._observers(site)
        linear = self._quantized.layer.linears[site]
        # The product with the weight is asked for what the bias will not add.
        bias = linear.bias if isinstance(linear, DenseLinear) else None
        for (y, before), after in zip(inputs, partner, strict=True):
            observe(site, y)
            if site not in self._wanted:
                pass
            elif after is None:
                sums.add(y, stream=before)
            else:
                wanted = after - before
                sums.add(y, wanted=wanted if bias is None else wanted - bias, stream=after)
            self.step()
        return _found(site, sums)

    def _mixture(self, kind: str) -> Measured:
        """Sites of all experts and of the shared expert that end in `kind`, over the tokens routed to them."""
        layer = self._quantized.layer
        sites = [site for site in self._wanted if site.endswith(kind)]
        collector = ExpertCollector(layer, sites, every_token=self._every_token)
        both = _shown_to(collector.observe, self._observers(kind))
        for h in self._quantized.streams():
            layer.mlp(layer.norm("post_norm", h).flatten(0, 1), both)
            self.step()
        return {
            site: SiteMoments(s.hessian, None, None, s.tokens, s.borrowed, s.routed)
            for site, s in collector.finish().items()
        }


def _shown_to(first: Observe, second: Observe) -> Observe:
    """An observer that shows everything to two."""

    def show(site: str, x: Tensor) -> None:
        first(site, x)
        second(site, x)

    return show


def _found(site: str, sums: MomentSums) -> Measured:
    moments = sums.finish()
    return {} if moments is None else {site: moments}
