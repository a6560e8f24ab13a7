"""Everything that is decided, checked and refused before the first weight is read."""

import math
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import psutil
import torch
from jaxtyping import Int64
from torch import Tensor

from cann_llm_quant import __version__
from cann_llm_quant.assignment import Assignment, assign
from cann_llm_quant.calibrate.kv_ranges import KV_CHANNEL_BYTES
from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.checkpoint.companion_tokenizer import tokenizer_of
from cann_llm_quant.device import resolve_device, resolve_dtype
from cann_llm_quant.errors import UnsupportedError, UsageError
from cann_llm_quant.export.kv_scales import is_kv_scale
from cann_llm_quant.export.model_config import json_bytes
from cann_llm_quant.kv_recipe import KvRecipe
from cann_llm_quant.kv_spec import kv_schemes
from cann_llm_quant.models import arch_from_checkpoint, unclaimed
from cann_llm_quant.models.arch import Arch, Layer
from cann_llm_quant.pipeline.calibration_text import calibration_windows
from cann_llm_quant.pipeline.request import BLOCK_ELEMENTS, GIB, Event, RunOptions
from cann_llm_quant.quant.kv import LayerKv
from cann_llm_quant.quant.value_sketch import SKETCH_BYTES
from cann_llm_quant.recipe import Recipe
from cann_llm_quant.token_classes import sensitive_ids

LIBRARIES = ("torch", "transformers", "safetensors", "gguf")


@dataclass(frozen=True)
class Job:
    """One run, resolved: what to do with which tensor, on which text, where."""

    source: Checkpoint
    source_name: str
    companions: dict[str, bytes]
    arch: Arch
    assignment: Assignment
    recipe: Recipe
    options: RunOptions
    device: torch.device
    dtype: torch.dtype
    ids: Int64[Tensor, "windows seq"] | None
    corpus: dict[str, Any] | None
    dropped: dict[str, str]
    extra: list[str]
    kv: tuple[LayerKv, ...] | None = None

    @property
    def budgets(self) -> tuple[int, int]:
        """Bytes of activations held in memory: the states between layers, and what is kept inside a layer."""
        total = self.options.activation_budget
        return (total // 2, total - total // 2) if self.recipe.feedback else (total, 0)

    def run_identity(self) -> dict[str, Any]:
        """Everything that decides the output's bytes; a resume with another identity is refused."""
        return {
            "source": self.source.fingerprint(),
            "recipe": self.recipe.model_dump(mode="json"),
            "corpus": self.corpus,
            "dtype": self.options.dtype,
            "device": self.device.type,
            "tool": __version__,
            "libraries": {name: version(name) for name in LIBRARIES},
        }


def prepare(
    source: Checkpoint, source_name: str, recipe: Recipe, options: RunOptions, tell: Callable[[Event], None]
) -> Job:
    """Resolve and check a run. Raises InputError's kinds for everything that cannot work."""
    json_bytes(source.config)
    companions = source.companion_files()
    device, dtype = resolve_device(options.device), resolve_dtype(options.dtype)
    arch = arch_from_checkpoint(source)
    assignment = assign(
        arch, recipe, allow_empty_pattern=options.allow_empty_pattern, tensor_parallel=options.tensor_parallel
    )
    if recipe.smoothing == {"smoothquant"} and not assignment.activations:
        raise UsageError(
            "smoothquant moves outliers out of quantized inputs, but no input is quantized; ask for a scheme such as "
            "--scheme W8A8, or use awq"
        )
    if recipe.tuning_steps and assignment.activations:
        raise UsageError(
            "layers whose inputs are quantized cannot be tuned, since rounding has no gradient; leave out --tune-steps"
        )
    for pattern, hits in assignment.pattern_hits.items():
        if not pattern.startswith(("glob:", "re:")):
            continue  # a full name says what it matches
        tell(Event("prepare", message=f"pattern {pattern} matches {hits} linear{'' if hits == 1 else 's'}"))
    for warning in assignment.warnings:
        tell(Event("prepare", message=warning, warning=True))
    kv = None if recipe.kv_cache is None else kv_schemes(recipe.kv_cache, arch)
    if recipe.kv_cache is not None and recipe.kv_cache.sensitive:
        _tell_sensitive(source, arch, recipe.kv_cache, tell)
    ids, corpus = None, None
    if recipe.needs_calibration:
        ids, corpus = calibration_windows(
            source, arch, recipe.calibration, allow_fewer=options.allow_fewer_samples, tell=tell
        )
    dropped, extra = _account(arch, source)
    if extra:
        message = f"{len(extra)} tensors that {arch.model_type} has no place for travel along in float: {extra[0]}"
        tell(Event("prepare", message=message + (" …" if extra[1:] else ""), warning=True))
    job = Job(
        source,
        source_name,
        companions,
        arch,
        assignment,
        recipe,
        options,
        device,
        dtype,
        ids,
        corpus,
        dropped,
        extra,
        kv,
    )
    estimate = estimate_peak_bytes(job)
    _check_memory(estimate)
    tell(
        Event(
            "prepare",
            message=f"{arch.model_type}, {arch.num_layers} layers; peak memory about {estimate / GIB:.1f} GiB",
        )
    )
    return job


def _tell_sensitive(source: Checkpoint, arch: Arch, wanted: KvRecipe, tell: Callable[[Event], None]) -> None:
    """Say how many tokens keep their pages in float. Raises UsageError when none would."""
    found = len(sensitive_ids(tokenizer_of(source), wanted.sensitive))
    classes = " and ".join(wanted.sensitive)
    if not found:
        raise UsageError(f"this model's vocabulary has no token in {classes}; leave out --kv-sensitive")
    tell(Event("prepare", message=f"{found} of {arch.vocab_size} tokens are {classes}; their pages stay in float"))


def _account(arch: Arch, source: Checkpoint) -> tuple[dict[str, str], list[str]]:
    """Tensors that the decoder does not read: dropped ones with the reason, and the extra ones that travel along."""
    dropped: dict[str, str] = {}
    extra = []
    for name in unclaimed(arch, list(source.tensors)):
        if name.endswith("rotary_emb.inv_freq"):
            dropped[name] = "computed from the config"
        elif source.tensors[name].dtype.is_complex:
            raise UnsupportedError(f"tensor {name} is {source.tensors[name].dtype}, which safetensors cannot hold")
        elif name == f"{arch.head_module}.weight" and arch.tied_head:
            dropped[name] = "tied to the embedding"
        elif is_kv_scale(name):
            dropped[name] = "KV scale of the source; --kv-cache measures new ones"
        else:
            extra.append(name)
    return dropped, extra


def estimate_peak_bytes(job: Job) -> int:
    """Upper estimate of resident memory.

    Libraries, embedding, one layer in float32 with its statistics, activations.
    """
    fixed = 600 << 20
    tensors = job.source.tensors
    outer = max((_outer_bytes(job, name) for name in job.arch.outer_shapes() if name in tensors), default=0)
    widest = max(_layer_bytes(job, layer) for layer in job.arch.layers)
    activations = 0
    if job.ids is not None:
        held = sum(min(wanted, budget) for wanted, budget in zip(_activation_bytes(job), job.budgets, strict=True))
        window = job.ids.shape[1] * max(job.arch.intermediate_size * 4, job.arch.hidden_size * 8) * 4
        activations = held + window
    return fixed + max(outer, widest) + activations


def _layer_bytes(job: Job, layer: Layer) -> int:
    weights = sum(spec.out_features * spec.in_features for spec in layer.linears)
    features = [layer.linear(site.linears[0]).in_features for site in layer.sites]
    largest = max(spec.out_features * spec.in_features for spec in layer.linears)
    kv = 3 * KV_CHANNEL_BYTES * job.arch.num_kv_heads * job.arch.head_dim if job.kv is not None else 0
    sketches = SKETCH_BYTES * len(layer.sites) if job.recipe.needs_ranges else 0
    grams = 8 * sum(n * n for n in features) if job.recipe.needs_calibration else 0
    copies = 5
    if job.recipe.feedback:
        # One site's moments and factors at a time; the source's layer beside the one that walks, and its copies in
        # tuning: levels, weights and their gradients.
        solving = 24 * max(features) ** 2
        grams = max(grams, solving) if job.recipe.smoothing else solving
        copies = 9 + (16 if job.recipe.tuning_steps else 0)
    return copies * weights + grams + 16 * largest + sketches + kv


def _activation_bytes(job: Job) -> tuple[int, int]:
    """What the states between layers take, and what is kept inside a layer."""
    assert job.ids is not None
    arch, paired = job.arch, job.recipe.effort_plan.drift
    item = job.ids.numel() * job.dtype.itemsize
    states = item * arch.hidden_size * (2 if paired else 1)
    if not job.recipe.feedback:
        return states, 0
    inner = max(arch.num_heads * arch.head_dim, arch.hidden_size + arch.intermediate_size)
    return states, item * (inner + (2 * arch.hidden_size if paired else 0))


def _outer_bytes(job: Job, name: str) -> int:
    """Memory for a tensor outside the layers: itself, and its codes and float32 blocks where it is quantized."""
    info = job.source.tensors[name]
    if name.removesuffix(".weight") not in job.assignment.schemes:
        return info.nbytes
    numbers = math.prod(info.shape)
    return info.nbytes + 3 * numbers + 24 * min(numbers, BLOCK_ELEMENTS)


def _check_memory(estimate: int) -> None:
    total = psutil.virtual_memory().total
    if estimate > total:
        raise UsageError(
            f"this run needs about {estimate / GIB:.1f} GiB of memory and the machine has {total / GIB:.1f} GiB; lower "
            "--activation-budget, or use fewer or shorter calibration windows"
        )


def peak_memory_bytes() -> int:
    """Largest resident size of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
