"""The last touch on a solved layer: its scales and norm gains, tuned together against the float layer's outputs.

Codes stay; every scale and every gain may move by a few thousandths, by gradient descent (Adam, Kingma and Ba 2014,
arXiv:1412.6980) on

    loss = mean over tokens of |layer(y) - float layer(x)|² / mean(float layer(x)²)

with y and x the two models' states before the layer: what no site alone can see, how the errors of its linears add up
in the layer's output, is learnt here. Each token counts relative to its own length, for the reason that
calibrate/moments.py gives. Every eighth window is held out; where the tuned layer, rounded as it is stored, is not
better there, nothing is changed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from cann_llm_quant.models.attention import CausalAttend
from cann_llm_quant.models.decoder import DecoderLayer, DenseLinear, LinearOp
from cann_llm_quant.quant.number_formats import to_values
from cann_llm_quant.quant.ranges import rounded_to
from cann_llm_quant.quant.scheme import QuantizedTensor

BATCH = 2
RATE = 1e-3
_HELD_OUT = 8
_WARMUP = 0.1

Pairs = Callable[[int], tuple[Float[Tensor, "1 seq hidden"], Float[Tensor, "1 seq hidden"]]]


@dataclass(frozen=True)
class Tuned:
    """Tuned weights and gains by role, and the held-out loss before and after."""

    weights: dict[str, QuantizedTensor]
    gains: dict[str, Tensor]
    before: float
    after: float


class _ScaledLinear:
    """A quantized linear whose scales can move; `weight` is built once a step."""

    def __init__(self, weight: QuantizedTensor, bias: Tensor | None) -> None:
        self.quantized, self.bias = weight, bias
        out, groups = weight.scale.shape
        levels = to_values(weight.codes, weight.scheme.dtype).view(out, groups, -1)
        if weight.zero_point is not None:
            levels = levels - weight.zero_point.to(torch.float32).unsqueeze(-1)
        self._dense = levels * weight.scale.to(torch.float32).unsqueeze(-1)
        self.change = torch.zeros(out, groups, 1, device=levels.device, requires_grad=True)
        self.weight = self._dense.flatten(1)

    def build(self) -> None:
        self.weight = (self._dense * (1 + self.change)).flatten(1)

    def stored(self) -> QuantizedTensor:
        scale = self.quantized.scale.to(torch.float32) * (1 + self.change.detach().squeeze(-1))
        dtype = self.quantized.scale.dtype
        return replace(self.quantized, scale=rounded_to(scale, dtype).to(dtype))  # positive after any number of steps

    def __call__(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        return functional.linear(x, self.weight, self.bias)


def can_tune(weight: QuantizedTensor) -> bool:
    """Whether the scales are free numbers of a row's own."""
    return weight.scheme.strategy in ("group", "channel") and weight.scheme.scale_type == "float"


def tune_layer(
    running: DecoderLayer,
    weights: Mapping[str, QuantizedTensor],
    gain_dtypes: Mapping[str, torch.dtype],
    pairs: Pairs,
    windows: int,
    *,
    steps: int,
    seed: int,
    step: Callable[[], None] = lambda: None,
) -> Tuned | None:
    """Tune the linears in `weights` (by role) and all vectors of `running` (stored as `gain_dtypes`, by role).

    `pairs(window)` are the layer's input in the quantized model and its output in the float one. None when the tuned
    layer is not better on the held-out windows, or when there are too few windows to hold any out.
    """
    held_out = list(range(0, windows, _HELD_OUT))
    training = [window for window in range(windows) if window % _HELD_OUT]
    if not training or not weights:
        return None
    before = _mean_loss(running, pairs, held_out)
    with torch.enable_grad():
        scaled = {role: _ScaledLinear(weight, _bias(running.linears[role])) for role, weight in weights.items()}
        gains = {role: gain.to(torch.float32).clone() for role, gain in running.parameters.items()}
        changes = {role: torch.zeros_like(gain, requires_grad=True) for role, gain in gains.items()}
        order = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.Adam([*(s.change for s in scaled.values()), *changes.values()], RATE, (0.9, 0.95))
        for number in range(steps):
            optimizer.param_groups[0]["lr"] = RATE * _rate(number, steps)
            for linear in scaled.values():
                linear.build()
            layer = _rebuilt(running, scaled, {role: gain * (1 + changes[role]) for role, gain in gains.items()})
            picked = torch.randperm(len(training), generator=order)[:BATCH].tolist()
            optimizer.zero_grad()
            loss = torch.stack([_loss(layer, *pairs(training[i])) for i in picked]).mean()
            torch.autograd.backward(loss)
            optimizer.step()
            step()
    tuned = {role: linear.stored() for role, linear in scaled.items()}
    kept = {role: (gain * (1 + changes[role].detach())).to(gain_dtypes[role]) for role, gain in gains.items()}
    after = _mean_loss(_as_stored(running, tuned, kept), pairs, held_out)
    return Tuned(tuned, kept, before, after) if after < before else None


def _rate(number: int, steps: int) -> float:
    """Linear warm-up, then linear to zero."""
    return min(1.0, (number + 1) / max(1.0, _WARMUP * steps)) * (1 - number / steps)


def _loss(layer: DecoderLayer, y: Tensor, target: Tensor) -> Tensor:
    positions = torch.arange(y.shape[1], device=y.device)[None]
    difference = layer(y, positions, CausalAttend()).to(torch.float32) - target.to(torch.float32)
    energy = target.to(torch.float32).square().mean(-1)
    floor = (1e-2 * energy.mean()).clamp(min=torch.finfo(torch.float32).tiny)
    return (difference.square().mean(-1) / energy.clamp(min=floor)).mean()


def _mean_loss(layer: DecoderLayer, pairs: Pairs, windows: list[int]) -> float:
    with torch.no_grad():
        return sum(float(_loss(layer, *pairs(window))) for window in windows) / len(windows)


def _rebuilt(running: DecoderLayer, linears: Mapping[str, LinearOp], parameters: Mapping[str, Tensor]) -> DecoderLayer:
    return DecoderLayer(
        running.arch, running.layer, {**running.linears, **linears}, {**running.parameters, **parameters}
    )


def _as_stored(
    running: DecoderLayer, weights: Mapping[str, QuantizedTensor], gains: Mapping[str, Tensor]
) -> DecoderLayer:
    dtype = next(iter(running.parameters.values())).dtype
    dense = {
        role: DenseLinear(weight.dequantize().to(dtype), _bias(running.linears[role]))
        for role, weight in weights.items()
    }
    return _rebuilt(running, dense, {role: gain.to(dtype) for role, gain in gains.items()})


def _bias(linear: LinearOp) -> Tensor | None:
    return linear.bias if isinstance(linear, DenseLinear) else None
