"""The KV cache's part of a run: scales of each layer's K and V from what the quantized layer hands its attention.

A layer's K and V are measured while all windows run through it for other ends, with its linears as they are stored.
Where nothing else asks for that pass (the last layer's output is read by nobody), its attention alone is run.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cann_llm_quant.calibrate.kv_ranges import ChannelValues, KvWatch
from cann_llm_quant.errors import CannQuantError, NumericError
from cann_llm_quant.export.kv_scales import common_scheme, model_tensors
from cann_llm_quant.export.kv_section import KvCache, KvFormat, KvLayer, KvLayerReport
from cann_llm_quant.kv_recipe import KvRecipe
from cann_llm_quant.models.arch import Layer
from cann_llm_quant.models.rope import rotary_dim
from cann_llm_quant.pipeline.prepare import Job
from cann_llm_quant.quant.kv import KvPlan, KvScales, KvScheme, LayerKv, kv_scale

_SHARED = {"tensor": (0, 1), "head": (1,), "channel": ()}


class KvMeter:
    """Measures one layer's K and V where its scales are stored; `attend` is what the layer is to be run with."""

    def __init__(self, job: Job, layer: Layer) -> None:
        self._job, self._layer = job, layer
        self._schemes = LayerKv() if job.kv is None else job.kv[layer.index]
        self._turning = rotary_dim(job.arch.rope, job.arch.head_dim)
        self.watch: KvWatch | None = None
        self.restart()

    def restart(self) -> None:
        """Forget what was seen: the layer has changed."""
        stored = any(is_stored(scheme) for scheme in (self._schemes.k, self._schemes.v))
        self.watch = KvWatch(self._turning) if stored and self._job.ids is not None else None

    def finish(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The layer's record, JSON, and the tensors that go beside its weights.

        Raises CannQuantError for a layer that was never measured, NumericError for values that are not finite.
        """
        if self._job.kv is None:
            return {}, {}
        seen = None if self.watch is None else self.watch.finish()
        record: dict[str, Any] = {"tokens": None if seen is None else seen[0].tokens}
        for side, scheme, values in (
            ("k", self._schemes.k, None if seen is None else seen[0]),
            ("v", self._schemes.v, None if seen is None else seen[1]),
        ):
            if scheme is not None and is_stored(scheme):
                record[side] = self._solve(side, scheme, values)
        stored = {}
        if common_scheme(self._job.kv) is not None:
            attention = self._layer.linear("o").module.rpartition(".")[0]
            stored = model_tensors(attention, scales_of(self._job, self._layer.index, record))
        return record, stored

    def _solve(self, side: str, scheme: KvScheme, values: ChannelValues | None) -> dict[str, Any]:
        wanted = self._job.recipe.kv_cache
        assert wanted is not None
        place = f"layer {self._layer.index}, {side}"
        if values is not None and not bool((values.minimum.isfinite() & values.maximum.isfinite()).all()):
            raise NumericError(f"{place}: cached values hold NaN or infinity; use --dtype fp32 or bf16")
        if wanted.scale is not None:
            shape = scheme.scale_shape(self._job.arch.num_kv_heads, 1, self._job.arch.head_dim)
            scale = torch.full(shape, wanted.scale)
            zero = None if scheme.symmetric else torch.zeros(shape, dtype=torch.int32)
        elif values is None:
            raise CannQuantError(f"{place}: no cached value was measured, so it has no scale; please report this")
        else:
            scale, zero = static_scales(scheme, values, wanted)
        record: dict[str, Any] = {
            "scale": _numbers(scale),
            "zero_point": None if zero is None else zero.flatten().tolist(),
        }
        if values is not None:
            record["largest"] = float(torch.maximum(-values.minimum, values.maximum).max())
            record["clipped"] = values.share_outside(*_reach(scheme, scale, zero))
        return record


def static_scales(
    scheme: KvScheme, values: ChannelValues, wanted: KvRecipe
) -> tuple[Float[Tensor, "..."], Int[Tensor, "..."] | None]:
    """Scales, and zero points where the scheme has them, that reach what was seen as far as the recipe wants."""
    low, high = values.range(
        _SHARED[scheme.strategy],
        symmetric=scheme.symmetric,
        percentile=wanted.percentile,
        headroom=wanted.headroom,
    )
    return kv_scale(low, high, scheme)


def is_stored(scheme: KvScheme | None) -> bool:
    """Whether scales of the scheme are stored, one set for all pages."""
    return scheme is not None and not scheme.is_plain and not scheme.dynamic


def _reach(scheme: KvScheme, scale: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor]:
    """Smallest and largest number that does not saturate: half a step beyond the outermost codes of integers."""
    limit = {"fp8_e4m3": 464.0, "fp8_e5m2": 61440.0}.get(scheme.dtype)
    if limit is not None:  # half a step beyond 448 and 57344
        return -limit * scale, limit * scale
    half = float(1 << (scheme.bits - 1))
    shift = 0.0 if zero is None else zero.to(torch.float64)
    return (-half - 0.5 - shift) * scale, (half - 0.5 - shift) * scale


def _numbers(tensor: Tensor) -> list[float]:
    """Nine digits tell any float32 from all others."""
    return [float(f"{value:.9g}") for value in tensor.flatten().tolist()]


def scales_of(job: Job, layer: int, record: dict[str, Any]) -> KvScales:
    """A layer's scales from its record."""
    assert job.kv is not None
    parts: list[Tensor | None] = []
    for side, scheme in (("k", job.kv[layer].k), ("v", job.kv[layer].v)):
        entry = record.get(side)
        if entry is None or scheme is None:
            parts += [None, None]
            continue
        shape = scheme.scale_shape(job.arch.num_kv_heads, 1, job.arch.head_dim)
        zero = entry["zero_point"]
        parts.append(torch.tensor(entry["scale"], dtype=torch.float32).view(shape))
        parts.append(None if zero is None else torch.tensor(zero, dtype=torch.int32).view(shape))
    return KvScales(*parts)


def all_scales(job: Job, records: dict[str, dict[str, Any]]) -> tuple[KvScales, ...]:
    """Every layer's scales, from the journal's records.

    Raises CannQuantError when all that were measured are 1.0, as if nothing had been (C63).
    """
    scales = tuple(scales_of(job, layer.index, _record(records, layer)) for layer in job.arch.layers)
    known = [part for one in scales for part in (one.k_scale, one.v_scale) if part is not None]
    wanted = job.recipe.kv_cache
    if known and wanted is not None and wanted.scale is None and all(bool((scale == 1).all()) for scale in known):
        raise CannQuantError(
            "all measured KV scales are 1.0, as if nothing had been measured; nothing was published. Use other text, "
            "or ask for them with --kv-scale 1.0"
        )
    return scales


def planned_cache(job: Job) -> KvPlan:
    """The cache as the output will have it, with 1 and 0 for scales and zero points that are still to be measured."""
    wanted = job.recipe.kv_cache
    if job.kv is None or wanted is None:
        return KvPlan.plain(job.arch.num_layers)
    return KvPlan(
        job.kv,
        tuple(KvScales(*_unmeasured(job, layer.k), *_unmeasured(job, layer.v)) for layer in job.kv),
        sink_tokens=wanted.sink_tokens,
        recent_tokens=wanted.recent_tokens,
    )


def _unmeasured(job: Job, scheme: KvScheme | None) -> tuple[Tensor | None, Tensor | None]:
    if scheme is None or not is_stored(scheme):
        return None, None
    shape = scheme.scale_shape(job.arch.num_kv_heads, 1, job.arch.head_dim)
    return torch.ones(shape), None if scheme.symmetric else torch.zeros(shape, dtype=torch.int32)


def kv_section(job: Job, records: dict[str, dict[str, Any]]) -> KvCache:
    """The section of the inference config."""
    wanted = job.recipe.kv_cache
    if job.kv is None or wanted is None:
        return KvCache()
    schemes = {scheme for layer in job.kv for scheme in (layer.k, layer.v) if scheme is not None}
    stored = any(is_stored(scheme) for scheme in schemes)
    place: Literal["model", "kv_cache/scales.safetensors"] = (
        "model" if common_scheme(job.kv) is not None else "kv_cache/scales.safetensors"
    )
    return KvCache(
        schemes={scheme.label(): KvFormat.of(scheme) for scheme in sorted(schemes, key=KvScheme.label)},
        layers=[KvLayer(k=_label(layer.k), v=_label(layer.v)) for layer in job.kv],
        scales=place if stored else None,
        given_scale=wanted.scale,
        page_size=wanted.page_size,
        sink_tokens=wanted.sink_tokens,
        recent_tokens=wanted.recent_tokens,
        sensitive=list(wanted.sensitive),
        report=[_report(_record(records, layer)) for layer in job.arch.layers],
    )


def _label(scheme: KvScheme | None) -> str | None:
    return None if scheme is None else scheme.label()


def _record(records: dict[str, dict[str, Any]], layer: Layer) -> dict[str, Any]:
    record: dict[str, Any] = records[f"layer.{layer.index}"].get("kv") or {}
    return record


def _report(record: dict[str, Any]) -> KvLayerReport:
    sides = {
        side: {name: record[side][name] for name in ("largest", "clipped")}
        for side in ("k", "v")
        if "clipped" in record.get(side, {})
    }
    return KvLayerReport(**sides, tokens=record.get("tokens"), smoothed=record.get("smoothed"))  # type: ignore[arg-type]
