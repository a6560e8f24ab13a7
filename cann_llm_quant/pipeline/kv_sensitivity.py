"""Sensitivity of the KV cache: what quantizing K or V of one layer, alone, costs in KL of the model's output.

The first candidates of each side are measured truly in every layer (`kv_damage.py`). To second order the KL of a small
change is a quadratic form of it, so the other candidates' damage is the measured one times the ratio of what they do to
the attention's output. Static scales come from other windows of the calibration text than those that are judged.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from cann_llm_quant import __version__
from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.checkpoint.companion_tokenizer import tokenizer_of
from cann_llm_quant.device import resolve_device, resolve_dtype
from cann_llm_quant.errors import UsageError
from cann_llm_quant.kv_recipe import KvRecipe
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.pipeline.calibration_text import calibration_windows
from cann_llm_quant.pipeline.kv_candidates import SIDES, Candidates, candidates_of, one_side, page_bits
from cann_llm_quant.pipeline.kv_damage import CacheVariant, CacheWalk, CacheWork, Format
from cann_llm_quant.pipeline.kv_sensitivity_file import RULES, FormatDamage, KvSensitivity, KvSettings, SideEntry
from cann_llm_quant.pipeline.request import Event, RunOptions
from cann_llm_quant.quant.kv import LayerKv
from cann_llm_quant.recipe import Calibration
from cann_llm_quant.token_classes import sensitive_ids

JUDGED_WINDOWS = 4
DEFAULT_SAMPLES = 20

Tell = Callable[[Event], None]


@dataclass(frozen=True)
class KvSensitivityRequest:
    """What to measure: text (`judged` windows of its samples, at most half, are judged on), how the cache is kept apart
    from its formats (`rules`), candidates (None: the default ones), and how many of them to measure truly.
    """

    calibration: Calibration
    rules: KvRecipe
    candidates: tuple[str, ...] | None = None
    measured: int = 1
    judged: int = JUDGED_WINDOWS


@dataclass(frozen=True)
class CacheText:
    """The text of a measurement, cut, and the report of where it came from."""

    work: CacheWork
    corpus: dict[str, Any]


def open_work(source: Checkpoint, request: KvSensitivityRequest, options: RunOptions, tell: Tell) -> CacheText:
    """Cut the text and resolve what a walk needs.

    Raises UsageError for too few windows and for windows of which no page would be quantized, CorpusError for too
    little text.
    """
    arch = arch_from_checkpoint(source)
    if request.measured < 1:
        raise UsageError("at least one format of each K and V must be measured, from which others follow")
    if request.calibration.samples < 2:
        raise UsageError("the KV cache is measured on other windows than its scales; use --samples 2 or more")
    rules, length = request.rules, request.calibration.length
    # the page being filled is float, and so are those of the first and of the latest tokens
    kept = -(-rules.sink_tokens // rules.page_size) - (-rules.recent_tokens // rules.page_size) + 1
    if length <= kept * rules.page_size:
        raise UsageError(
            f"windows of {length} tokens quantize no page of {rules.page_size} tokens beside those that stay in float; "
            f"use --seq-len {(kept + 1) * rules.page_size} or more"
        )
    ids, corpus = calibration_windows(
        source, arch, request.calibration, allow_fewer=options.allow_fewer_samples, tell=tell
    )
    if len(ids) < 2:
        raise UsageError("the text holds one window, and scales need another one than judging; give more text")
    scaled, judged = split_windows(ids, min(request.judged, len(ids) // 2))
    work = CacheWork(
        source,
        arch,
        scaled,
        judged,
        rules,
        sensitive_ids(tokenizer_of(source), rules.sensitive) if rules.sensitive else frozenset(),
        resolve_device(options.device),
        resolve_dtype(options.dtype),
        options.activation_budget,
        tell,
    )
    return CacheText(work, corpus)


def split_windows(
    ids: Int64[Tensor, "windows seq"], judged: int
) -> tuple[Int64[Tensor, "scaled seq"], Int64[Tensor, "judged seq"]]:
    """The windows for scales, and `judged` others that are spread evenly over all."""
    chosen = torch.zeros(len(ids), dtype=torch.bool)
    chosen[[(2 * i + 1) * len(ids) // (2 * judged) for i in range(judged)]] = True
    return ids[~chosen], ids[chosen]


def measure_kv_sensitivity(
    source: Checkpoint, name: str, request: KvSensitivityRequest, options: RunOptions, tell: Tell = lambda event: None
) -> KvSensitivity:
    """Measure K and V of every layer of a float checkpoint; `name` is what the document calls the model.

    Raises InputError's kinds before work starts, NumericError when the model gives NaN or infinity.
    """
    candidates = candidates_of(request.candidates, arch_from_checkpoint(source))
    text = open_work(source, request, options, tell)
    work = text.work
    variants = variants_of(candidates, work.arch, request.measured)
    kls, errors = CacheWalk(work, list(variants.values()), candidates).run()
    measured = dict(zip(variants, kls, strict=True))
    settings = KvSettings(
        candidates=tuple(dict.fromkeys(label for side in SIDES for label in candidates[side])),
        **{field: getattr(work.rules, field) for field in RULES},
        scale_windows=len(work.scaled),
        judged_windows=len(work.judged),
        dtype=options.dtype,
        device=work.device.type,
        seed=request.calibration.seed,
        calibration=text.corpus,
    )
    return KvSensitivity(
        tool_version=__version__,
        model=name,
        fingerprint=source.fingerprint(),
        settings=settings,
        sides=_sides(work, candidates, errors, measured),
    )


def variants_of(candidates: Candidates, arch: Arch, measured: int) -> dict[Format, CacheVariant]:
    """Every layer and side, alone, in each of the first `measured` quantized candidates."""
    found: dict[Format, CacheVariant] = {}
    for layer in range(arch.num_layers):
        for side in SIDES:
            quantized = [(label, scheme) for label, scheme in candidates[side].items() if scheme is not None]
            # a plain cast changes so little that nothing could be scaled from it
            for label, scheme in sorted(quantized, key=lambda pair: pair[1].is_plain)[:measured]:
                name = f"kv-{layer}-{side}-{label}"
                found[layer, side, label] = CacheVariant(name, {layer: one_side(side, scheme)})
    return found


def measure_joint(work: CacheWork, choices: Sequence[Sequence[LayerKv]]) -> list[float]:
    """KL in nats per token of the model with its whole cache in each of `choices`, static scales measured anew."""
    variants = {}
    for number, layers in enumerate(choices):
        kept = {index: layer for index, layer in enumerate(layers) if layer != LayerKv()}
        if kept:
            variants[number] = CacheVariant(f"kv-joint-{number}", kept)
    kls = dict(zip(variants, CacheWalk(work, list(variants.values())).run()[0], strict=True)) if variants else {}
    return [kls.get(number, 0.0) for number in range(len(choices))]


def _sides(
    work: CacheWork, candidates: Candidates, errors: Mapping[Format, float], measured: Mapping[Format, float]
) -> tuple[SideEntry, ...]:
    values = work.arch.num_kv_heads * work.rules.page_size * work.arch.head_dim
    entries = []
    for layer in range(work.arch.num_layers):
        for side in SIDES:
            truths = {errors[key]: kl for key, kl in measured.items() if key[:2] == (layer, side)}
            formats = {}
            for label, scheme in candidates[side].items():
                key: Format = (layer, side, label)
                error, true = errors.get(key, 0.0), measured.get(key)
                formats[label] = FormatDamage(
                    bits=page_bits(scheme, work.arch, work.rules.page_size) / values,
                    error=_six_digits(error),
                    measured=None if true is None else _six_digits(true),
                    damage=_six_digits(_scaled(error, truths) if true is None else true),
                )
            entries.append(SideEntry(layer=layer, side=side, formats=formats))
    return tuple(entries)


def _scaled(error: float, truths: Mapping[float, float]) -> float:
    """Damage by the measured format whose error is nearest in ratio; nothing where nothing is changed."""
    usable = [known for known in truths if known > 0]
    if not usable or not error:
        return 0.0
    nearest = min(usable, key=lambda known: max(known / error, error / known))
    return truths[nearest] * error / nearest


def _six_digits(value: float) -> float:
    """Digits behind these depend on the number of threads, and the choice is made from the document."""
    return float(f"{value:.6g}")
