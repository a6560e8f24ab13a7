"""K's channels evened out before a layer is measured: powers of two folded into its q and k (quant/kv_smooth.py).

The sizes of K's channels are those of the float layer on the quantized model's activations. The fold is checked on one
window, with the changed tensors rounded to their stored type; where attention's output moves, nothing is folded.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cann_llm_quant.calibrate.kv_ranges import KvWatch, watched_attention
from cann_llm_quant.models.arch import Layer
from cann_llm_quant.models.attention import CausalAttend
from cann_llm_quant.models.decoder import DecoderLayer, ignore, rotation_of
from cann_llm_quant.models.rope import rotary_dim
from cann_llm_quant.models.weights import build_layer
from cann_llm_quant.pipeline.layer import FOLD_TOLERANCE
from cann_llm_quant.pipeline.layer_tensors import build_running, load_float, storage_dtypes
from cann_llm_quant.pipeline.prepare import Job
from cann_llm_quant.pipeline.states import Streams
from cann_llm_quant.quant.kv_smooth import divided_keys, multiplied_queries, pair_factors


@dataclass(frozen=True)
class KeyFold:
    """The changed tensors by name, float32; how far factors lie apart; what the user should know."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    spread: float | None = None
    warnings: tuple[str, ...] = ()

    def over(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """A layer's tensors with the changed ones in place; they may be written to."""
        return tensors | {name: tensor.clone() for name, tensor in self.tensors.items()}


def fold_keys(job: Job, layer: Layer, streams: Streams | None, step: Callable[[], None]) -> KeyFold:
    """Even out this layer's keys where the recipe asks for it."""
    if job.recipe.kv_cache is None or not job.recipe.kv_cache.smooth or streams is None:
        return KeyFold()
    normed = any(parameter.role == "k_norm" for parameter in layer.parameters)
    if normed and job.arch.norm_offset:
        return KeyFold(warnings=(f"layer {layer.index}: keys not smoothed, the gains of their norm have an offset",))
    source = load_float(job, layer)
    watch = KvWatch()
    for _ in watched_attention(build_running(job, layer, source), streams.quantized, watch):
        step()
    seen = watch.finish()
    assert seen is not None, "calibration has at least one window"
    amax = torch.maximum(-seen[0].minimum, seen[0].maximum).to(job.device)
    factor = pair_factors(amax, rotary_dim(job.arch.rope, job.arch.head_dim), shared=normed)
    folded = _folded(layer, source, factor, normed)
    storage = storage_dtypes(job, layer)
    folded = {name: tensor.to(storage[name]).to(torch.float32) for name, tensor in folded.items()}
    change = _change(job, layer, source, source | folded, streams.probe())
    if change > FOLD_TOLERANCE:
        warning = f"layer {layer.index}: smoothing K changed the attention's output by {change:.1e}; it was left out"
        return KeyFold(warnings=(warning,))
    return KeyFold(folded, float(factor.max() / factor.min()))


def _folded(layer: Layer, source: dict[str, Tensor], factor: Tensor, normed: bool) -> dict[str, Tensor]:
    """The tensors that take the factor: the norms' gains where K has one, else rows of q and k and their biases."""
    if normed:
        names = {parameter.role: parameter.name for parameter in layer.parameters}
        q, k = names["q_norm"], names["k_norm"]
        return {q: source[q] * factor[0], k: source[k] / factor[0]}
    folded = {}
    for role, fold in (("q", multiplied_queries), ("k", divided_keys)):
        module = layer.linear(role).module
        for name in (f"{module}.weight", f"{module}.bias"):
            if name in source:
                folded[name] = fold(source[name], factor)
    return folded


def _change(job: Job, layer: Layer, before: dict[str, Tensor], after: dict[str, Tensor], probe: Tensor) -> float:
    """Largest change of what o reads, relative to the largest number there."""
    x = probe.to(torch.float32)
    old, new = (_mixed(build_layer(job.arch, layer.index, tensors), x) for tensors in (before, after))
    return float((new - old).abs().max()) / max(float(old.abs().max()), torch.finfo(torch.float32).tiny)


def _mixed(layer: DecoderLayer, x: Tensor) -> Tensor:
    rotation = rotation_of(layer.arch, torch.arange(x.shape[1], device=x.device)[None], x.dtype)
    return layer.mix(layer.norm("input_norm", x), rotation, CausalAttend(), ignore)
