"""The architecture map: everything that calibration, quantization and the decoder need to know of a model, as data.

A family file turns a `config.json` into an `Arch`; nothing else in the project branches on `model_type`. Inside a
layer, every matrix and vector has a *role* (`q`, `o`, `experts.3.gate`, `input_norm`), and the map says under which
*name* the checkpoint stores it. Linears that read the same input form a *site*; a site that has a *producer* can have
its input divided by a per-channel factor, which the producer absorbs (a *smooth pair*).

Roles of linears   q k v o gate up down router shared_gate experts.N.{gate,up,down} shared.{gate,up,down}
Roles of vectors   input_norm post_norm q_norm k_norm
Sites              qkv o gate_up down experts.N.gate_up experts.N.down shared.gate_up shared.down
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3"]
ProducerKind = Literal["norm", "linear"]


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base, scaling kind and that kind's parameters under their Hugging Face names.

    `trained_positions` is the config's `max_position_embeddings`, before any scaling extends it. Where `interleaved`,
    channels of a head turn in pairs of neighbours instead of halves.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    trained_positions: int = 0
    interleaved: bool = False


@dataclass(frozen=True)
class Moe:
    """Mixture of experts: routing is softmax over all experts, then top-k, optionally renormalized."""

    num_experts: int
    top_k: int
    intermediate_size: int
    normalize_top_k: bool
    shared_intermediate_size: int | None = None
    shared_gate: bool = False


@dataclass(frozen=True)
class LinearSpec:
    """One matrix `[out, in]` of a layer: role, name it is stored under (no suffix), whether it may be quantized."""

    role: str
    module: str
    out_features: int
    in_features: int
    bias: bool = False
    quantizable: bool = True


@dataclass(frozen=True)
class ParameterSpec:
    """One vector or other tensor of a layer that is no linear: role, full stored name, shape."""

    role: str
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Producer:
    """What computes a site's input and can absorb a per-channel factor.

    `norm`: the gain of the norm with this role (`offset + gain`, see `Arch.norm_offset`). `linear`: the output rows of
    the linear with this role, its bias included. `repeat` > 1 when each producer row feeds that many input channels of
    the site (v under grouped-query attention: channel c of o comes from v row
    `(c // head_dim // repeat) * head_dim + c % head_dim`).
    """

    kind: ProducerKind
    role: str
    repeat: int = 1


@dataclass(frozen=True)
class Site:
    """Linears that read the same input, and the producer that may absorb a scale of it (None: nothing may)."""

    name: str
    linears: tuple[str, ...]
    producer: Producer | None = None


@dataclass(frozen=True)
class Layer:
    """The map of one decoder layer."""

    index: int
    linears: tuple[LinearSpec, ...]
    parameters: tuple[ParameterSpec, ...]
    sites: tuple[Site, ...]
    fusion_groups: tuple[tuple[str, ...], ...]
    window: int | None = None
    moe: Moe | None = None

    def linear(self, role: str) -> LinearSpec:
        """The linear with this role; KeyError when the layer has none."""
        for spec in self.linears:
            if spec.role == role:
                return spec
        raise KeyError(role)

    def site_names(self) -> dict[str, str]:
        """The name of the site that each linear reads, by module."""
        return {self.linear(role).module: site.name for site in self.sites for role in site.linears}

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Stored name to shape, of every tensor of the layer."""
        shapes: dict[str, tuple[int, ...]] = {p.name: p.shape for p in self.parameters}
        for spec in self.linears:
            shapes[f"{spec.module}.weight"] = (spec.out_features, spec.in_features)
            if spec.bias:
                shapes[f"{spec.module}.bias"] = (spec.out_features,)
        return shapes


@dataclass(frozen=True)
class Arch:
    """The architecture map of one checkpoint.

    `max_positions` counts what the rotary scaling reaches; `rope.trained_positions` is what the config says.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    rms_norm_eps: float
    rope: Rope
    layers: tuple[Layer, ...]
    embedding_name: str = "model.embed_tokens.weight"
    final_norm_name: str = "model.norm.weight"
    head_module: str = "lm_head"
    tied_head: bool = False
    norm_offset: float = 0.0
    activation: str = "silu"

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    def outer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Stored name to shape, of every tensor outside the layers; a tied head is not listed."""
        shapes: dict[str, tuple[int, ...]] = {
            self.embedding_name: (self.vocab_size, self.hidden_size),
            self.final_norm_name: (self.hidden_size,),
        }
        if not self.tied_head:
            shapes[f"{self.head_module}.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Stored name to shape, of every tensor that the decoder reads."""
        shapes = self.outer_shapes()
        for layer in self.layers:
            shapes.update(layer.tensor_shapes())
        return shapes
