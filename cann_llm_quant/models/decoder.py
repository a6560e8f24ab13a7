"""The one decoder that executes every architecture map: embedding, layers, final norm, head.

    h = x + o(attend(q, k, v)),   q, k, v from norm(x), q and k optionally normed per head, then turned by RoPE
    y = h + down(act(gate(n)) * up(n)),   n = norm(h);   or a mixture of such MLPs

A layer holds *linear operations* by role, so a float weight, a quantized one or a packed one all run the same code.
Norms are computed in float32. Everything runs where the tensors are, in their dtype.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from cann_llm_quant.models.arch import Arch, Layer
from cann_llm_quant.models.attention import Attend, CausalAttend
from cann_llm_quant.models.moe import mix_experts, route
from cann_llm_quant.models.rope import cos_sin, halves_from_pairs, rotate

Observe = Callable[[str, Float[Tensor, "tokens in"]], None]
Rotation = tuple[Float[Tensor, "batch seq dim"], Float[Tensor, "batch seq dim"]]

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


@runtime_checkable
class LinearOp(Protocol):
    """A matrix of any storage that multiplies: `x @ wᵀ + b`."""

    def __call__(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """The product for every row of `x`, in the dtype of `x`."""
        ...


@runtime_checkable
class Lookup(Protocol):
    """A table of any storage whose rows are looked up."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        ...

    def __call__(self, ids: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq hidden"]:
        """The rows for `ids`."""
        ...


Table = Float[Tensor, "vocab hidden"] | Lookup


class DenseLinear:
    """A float matrix [out, in] with an optional bias [out]."""

    def __init__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, "out"] | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """`x @ weightᵀ + bias`."""
        return functional.linear(x, self.weight, self.bias)


def rms_norm(
    x: Float[Tensor, "*rows hidden"], gain: Float[Tensor, "hidden"], eps: float, offset: float = 0.0
) -> Float[Tensor, "*rows hidden"]:
    """`x / rms(x) * (offset + gain)` (1910.07467), normalized in float32; the gain is applied in the dtype of `x`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if offset:
        # families with an offset round once, after the gain
        return (normed * (offset + gain.float())).to(x.dtype)
    return normed.to(x.dtype) * gain


class DecoderLayer:
    """One decoder layer: its map, linear operations by role and vectors by role."""

    def __init__(
        self, arch: Arch, layer: Layer, linears: Mapping[str, LinearOp], parameters: Mapping[str, Tensor]
    ) -> None:
        self.arch = arch
        self.layer = layer
        self.linears = linears
        self.parameters = parameters

    def __call__(
        self,
        x: Float[Tensor, "batch seq hidden"],
        positions: Int[Tensor, "batch seq"],
        attend: Attend,
        observe: Observe | None = None,
        rotation: Rotation | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        """The layer's output.

        `observe` gets each site's input once per call, experts only the tokens routed to them; a mixture also shows
        what all of its experts could have been given, as `experts`. `rotation` saves computing the RoPE of `positions`
        again in every layer.
        """
        observe = observe or ignore
        rotation = rotation or rotation_of(self.arch, positions, x.dtype)
        h = x + self.linears["o"](self.mix(self.norm("input_norm", x), rotation, attend, observe))
        normed = self.norm("post_norm", h).flatten(0, 1)
        return h + self.mlp(normed, observe).view_as(h)

    def norm(self, role: str, x: Float[Tensor, "*rows channels"]) -> Float[Tensor, "*rows channels"]:
        """`x` through the norm with this role."""
        return rms_norm(x, self.parameters[role], self.arch.rms_norm_eps, self.arch.norm_offset)

    def mix(
        self, x: Float[Tensor, "batch seq hidden"], rotation: Rotation, attend: Attend, observe: Observe
    ) -> Float[Tensor, "batch seq width"]:
        """Attention over the normed input `x` up to what the o projection reads."""
        observe("qkv", x.flatten(0, 1))
        q, k, v = (
            self.linears[role](x).view(*x.shape[:2], -1, self.arch.head_dim).transpose(1, 2) for role in ("q", "k", "v")
        )
        if "q_norm" in self.parameters:
            q, k = self.norm("q_norm", q), self.norm("k_norm", k)
        if self.arch.rope.interleaved:
            turning = rotation[0].shape[-1]
            q, k = halves_from_pairs(q, turning), halves_from_pairs(k, turning)
        q, k = rotate(q, *rotation), rotate(k, *rotation)
        mixed = attend(self.layer.index, q, k, v, scale=self.arch.head_dim**-0.5, window=self.layer.window)
        mixed = mixed.transpose(1, 2).flatten(2)
        observe("o", mixed.flatten(0, 1))
        return mixed

    def mlp(self, x: Float[Tensor, "tokens hidden"], observe: Observe) -> Float[Tensor, "tokens hidden"]:
        """The output of the layer's MLP or mixture for the normed tokens `x`."""
        return self.gated_mlp("", x, observe) if self.layer.moe is None else self._moe(x, observe)

    def gated_mlp(
        self, prefix: str, x: Float[Tensor, "tokens hidden"], observe: Observe
    ) -> Float[Tensor, "tokens hidden"]:
        """The output of the MLP whose roles and sites start with `prefix` (`experts.3.`); it sees all of `x`."""
        return self.linears[f"{prefix}down"](self.gate(prefix, x, observe))

    def gate(self, prefix: str, x: Float[Tensor, "tokens hidden"], observe: Observe) -> Float[Tensor, "tokens inner"]:
        """The gated MLP `prefix` up to what its down projection reads."""
        observe(f"{prefix}gate_up", x)
        activation = ACTIVATIONS[self.arch.activation]
        inner = activation(self.linears[f"{prefix}gate"](x)) * self.linears[f"{prefix}up"](x)
        observe(f"{prefix}down", inner)
        return inner

    def _moe(self, x: Tensor, observe: Observe) -> Tensor:
        moe = self.layer.moe
        assert moe is not None
        observe("experts", x)
        weights, experts = route(self.linears["router"](x), moe)
        y = mix_experts(
            x, weights, experts, lambda expert, tokens: self.gated_mlp(f"experts.{expert}.", tokens, observe)
        )
        if moe.shared_intermediate_size is None:
            return y
        shared = self.gated_mlp("shared.", x, observe)
        if moe.shared_gate:
            shared = torch.sigmoid(self.linears["shared_gate"](x)) * shared
        return y + shared


def rotation_of(
    arch: Arch, positions: Int[Tensor, "batch seq"], dtype: torch.dtype, length: int | None = None
) -> Rotation:
    """Cosines and sines of `positions`, the same for all layers; `length` as in `cos_sin`."""
    return cos_sin(arch.rope, arch.head_dim, positions, dtype, length)


def embed(table: Table, ids: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq hidden"]:
    """The rows of the embedding for `ids`."""
    return functional.embedding(ids, table) if isinstance(table, Tensor) else table(ids)


def head(
    arch: Arch, norm_weight: Float[Tensor, "hidden"], head_op: LinearOp, x: Float[Tensor, "batch seq hidden"]
) -> Float[Tensor, "batch seq vocab"]:
    """Logits: final norm, then the head."""
    return head_op(rms_norm(x, norm_weight, arch.rms_norm_eps, arch.norm_offset))


class DecoderModel:
    """A whole model in memory."""

    def __init__(
        self,
        arch: Arch,
        layers: Sequence[DecoderLayer],
        embedding: Table,
        norm: Float[Tensor, "hidden"],
        head_op: LinearOp,
    ) -> None:
        self.arch = arch
        self.layers = layers
        self.embedding = embedding
        self.norm = norm
        self.head_op = head_op

    def __call__(
        self,
        ids: Int[Tensor, "batch seq"],
        positions: Int[Tensor, "batch seq"] | None = None,
        attend: Attend | None = None,
    ) -> Float[Tensor, "batch seq vocab"]:
        """Logits of every token; by default tokens count from position 0 and attend to one another causally."""
        return head(self.arch, self.norm, self.head_op, self.hidden(ids, positions, attend))

    def hidden(
        self,
        ids: Int[Tensor, "batch seq"],
        positions: Int[Tensor, "batch seq"] | None = None,
        attend: Attend | None = None,
        length: int | None = None,
        rotation: Rotation | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        """The last layer's output, before the final norm: what a caller needs that wants logits of few tokens.

        `length` is the number of positions of the whole text of which `ids` are a chunk; by default they end it.
        `rotation` replaces the RoPE of `positions`, where tokens of several texts lie side by side.
        """
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        attend = attend or CausalAttend()
        x = embed(self.embedding, ids)
        turn = rotation or rotation_of(self.arch, positions, x.dtype, length)
        for layer in self.layers:
            x = layer(x, positions, attend, rotation=turn)
        return x


def ignore(site: str, x: Tensor) -> None:
    """The observer of a run that measures nothing."""
