"""How the output distribution reacts to each linear: Fisher statistics by a backward pass with one layer in memory.

To second order, changing a matrix W by D moves the next-token distributions of a text by

    sum over tokens of KL(p || p') = 1/2 E_y[ <dL/dW, D>² ],    L = sum over tokens of log p(y_t), y_t drawn from p_t

(the Fisher information is the curvature of KL). With x the linear's input and g the gradient of L by its output,
<dL/dW, D> = sum_t g_t · D x_t. Products of different tokens, and of different rows of D (which are rounded apart from
one another), vanish on average and are left out, which takes most of the sampling noise away:

    KL ≈ 1/2 sum_r sum_t g_tr² (D x_t)_r²  ≈  1/2 sum_r s_r (D H_g Dᵀ)_rr / sum_r s_r

    s_r = sum_t g_tr²  [out]        H_g = sum_t |g_t|² x_t x_tᵀ  [in, in]

One forward pass stores every layer's input; then, from the last layer to the first, a layer is loaded, run again with
autograd and differentiated. So memory holds one layer, one window's activations and the layer's statistics, whatever
the model's size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cann_llm_quant.calibrate.state_store import StateStore
from cann_llm_quant.calibrate.statistics import StatisticsCollector
from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.errors import NumericError
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.models.attention import CausalAttend
from cann_llm_quant.models.decoder import DecoderLayer, DenseLinear, LinearOp, embed, head
from cann_llm_quant.models.weights import build_layer, load_layer, load_outer

GRADIENTS = "gradients"
_CHUNK_ELEMENTS = 1 << 23

Step = Callable[[int, int], None]
"""Called with (layer, windows of it done)."""


@dataclass(frozen=True)
class Contribution:
    """What a layer does to the residual stream, averaged over tokens: cosine of its input and output, and
    |output - input| / |input|. A cosine near 1 and a small change mark a layer that adds little.
    """

    cosine: float
    change: float


@dataclass(frozen=True)
class LinearFisher:
    """Statistics of one linear; see the module's formulas. `hessian` is the plain Gram matrix of its input.

    `tokens` were seen by this linear (an expert sees those routed to it).
    """

    hessian: Float[Tensor, "in in"]
    weighted: Float[Tensor, "in in"]
    squares: Float[Tensor, " out"]
    tokens: int


class _Tap:
    """A linear that remembers its last input and output."""

    def __init__(self, op: LinearOp) -> None:
        self.op = op
        self.seen: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        y = self.op(x)
        self.seen = x, y
        return y


class StreamedBackward:
    """One text, forward and backward; call `forward`, then `output_gradients`, then iterate `layers`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        arch: Arch,
        ids: Int[Tensor, "windows seq"],
        store: StateStore,
        *,
        device: torch.device,
        dtype: torch.dtype,
        step: Step = lambda layer, window: None,
    ) -> None:
        self._checkpoint, self._arch, self._ids, self._store = checkpoint, arch, ids, store
        self._device, self._dtype = device, dtype
        self.step = step

    @torch.no_grad()
    def forward(self) -> list[Contribution]:
        """Store the input of every layer, and the last layer's output; returns what each layer contributes.

        Raises NumericError when a layer's output is not finite.
        """
        embedding = self._checkpoint.load(self._arch.embedding_name)
        for window, ids in enumerate(self._ids):
            self._store.put(slot(0), window, embed(embedding, ids[None]).to(self._dtype))
        contributions = []
        for index in range(self._arch.num_layers):
            layer = self._layer(index)
            sums = torch.zeros(2, dtype=torch.float64)
            for window, x in enumerate(self._store.all(slot(index))):
                y = layer(x, _positions(x), CausalAttend())
                _require_finite(y, index, window)
                sums += _contribution(x, y).cpu()
                self._store.put(slot(index + 1), window, y)
                self.step(index, window + 1)
            cosine, change = (sums / self._ids.numel()).tolist()
            contributions.append(Contribution(cosine, change))
        return contributions

    def output_gradients(self, seed: int) -> None:
        """Draw a label for every token from the model's own distribution, and store dL/d(last layer's output).

        Uniform numbers come from a CPU generator, so that the labels do not depend on the device.
        """
        outer = load_outer(self._checkpoint, self._arch, self._device, self._dtype)
        head_op, generator = DenseLinear(outer.head), torch.Generator().manual_seed(seed)
        tokens = max(1, _CHUNK_ELEMENTS // self._arch.vocab_size)
        for window, states in enumerate(self._store.all(slot(self._arch.num_layers))):
            gradients = []
            for begin in range(0, states.shape[1], tokens):
                x = states[:, begin : begin + tokens].detach().requires_grad_()
                log_p = head(self._arch, outer.norm, head_op, x)[0].to(torch.float32).log_softmax(-1)
                labels = _draw(log_p.detach(), generator)
                (gradient,) = torch.autograd.grad(log_p.gather(1, labels).sum(), x)
                gradients.append(gradient)
            self._store.put(GRADIENTS, window, torch.cat(gradients, dim=1))

    def layers(self) -> Iterator[tuple[int, dict[str, LinearFisher]]]:
        """Layer index and statistics by role, from the last layer to the first; roles no token reached are absent.

        Raises NumericError when a gradient is not finite.
        """
        for index in reversed(range(self._arch.num_layers)):
            yield index, self._differentiate(index)

    def _differentiate(self, index: int) -> dict[str, LinearFisher]:
        layer, spec = self._layer(index), self._arch.layers[index]
        taps = {linear.role: _Tap(layer.linears[linear.role]) for linear in spec.linears if linear.quantizable}
        tapped = DecoderLayer(self._arch, spec, {**layer.linears, **taps}, layer.parameters)
        site_of = {role: site.name for site in spec.sites for role in site.linears}
        inputs, weighted = StatisticsCollector(site_of.values()), StatisticsCollector(taps)
        squares: dict[str, Tensor] = {}
        for window, x in enumerate(self._store.all(slot(index))):
            gradient, reached = _backward(tapped, taps, x, self._store.get(GRADIENTS, window), inputs)
            _require_finite(gradient, index, window)
            self._store.put(GRADIENTS, window, gradient)
            for role, (rows, g) in reached.items():
                weighted.observe(role, rows * g.norm(dim=1, keepdim=True))
                squares[role] = squares.get(role, 0) + g.square().sum(0)
            self.step(index, window + 1)
        hessians, grams = inputs.finish(), weighted.finish()
        return {
            role: LinearFisher(hessians[site_of[role]].hessian, gram.hessian, squares[role], gram.tokens)
            for role, gram in grams.items()
        }

    def _layer(self, index: int) -> DecoderLayer:
        tensors = load_layer(self._checkpoint, self._arch, index, self._device, self._dtype)
        return build_layer(self._arch, index, tensors)


def slot(index: int) -> str:
    """The store's slot of the states before layer `index`."""
    return f"states-{index}"


def _backward(
    layer: DecoderLayer, taps: dict[str, _Tap], x: Tensor, gradient: Tensor, inputs: StatisticsCollector
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """dL/dx of one window, and of every linear reached its input rows and dL/d(output rows), in float32."""
    for tap in taps.values():
        tap.seen = None
    x = x.requires_grad_()
    y = layer(x, _positions(x), CausalAttend(), lambda site, rows: inputs.observe(site, rows.detach()))
    seen = {role: tap.seen for role, tap in taps.items() if tap.seen is not None}
    first, *others = torch.autograd.grad(y, [x, *(output for _, output in seen.values())], gradient)
    reached = {
        role: (rows.detach().flatten(0, -2).to(torch.float32), g.flatten(0, -2).to(torch.float32))
        for (role, (rows, _)), g in zip(seen.items(), others, strict=True)
    }
    return first, reached


def _positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)[None]


def _draw(log_p: Tensor, generator: torch.Generator) -> Tensor:
    """One label a row `[tokens, 1]` from the distributions `[tokens, vocab]`, by inverting their cumulative sums."""
    levels = log_p.exp().cumsum(-1, dtype=torch.float64)
    u = torch.rand(len(log_p), 1, generator=generator, dtype=torch.float64).to(log_p.device) * levels[:, -1:]
    return torch.searchsorted(levels, u, right=True).clamp_(max=log_p.shape[1] - 1)


def _contribution(x: Tensor, y: Tensor) -> Tensor:
    """Sums over tokens of the cosine and of the relative change."""
    a, b = x[0].to(torch.float32), y[0].to(torch.float32)
    cosine = torch.nn.functional.cosine_similarity(a, b, dim=-1)
    change = (b - a).norm(dim=-1) / a.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.stack([cosine.sum(dtype=torch.float64), change.sum(dtype=torch.float64)])


def _require_finite(value: Tensor, index: int, window: int) -> None:
    if not bool(torch.isfinite(value).all()):
        raise NumericError(
            f"layer {index} gives NaN or infinity for window {window} in {value.dtype}; use --dtype fp32 or bf16, or "
            "scan the source's weights with inspect --scan"
        )
