"""How a model's KV cache is stored, rebuilt from its files: the plan that the runner and the evaluation work by."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.checkpoint.companion_tokenizer import tokenizer_of
from cann_llm_quant.checkpoint.files import read_bytes
from cann_llm_quant.errors import CheckpointError, UsageError
from cann_llm_quant.export.ascend_reader import AscendReader
from cann_llm_quant.export.inference_config import FILE_NAME
from cann_llm_quant.export.kv_scales import applied_scales, check_shapes, parse_scales, stored_scales
from cann_llm_quant.export.kv_section import SCALES_FILE, KvCache
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.quant.kv import KvPlan, KvScales, KvScheme, LayerKv
from cann_llm_quant.shown import shown
from cann_llm_quant.token_classes import sensitive_ids


def kv_plan(checkpoint: Checkpoint) -> KvPlan:
    """The plan that a checkpoint's files ask for; everything in the compute dtype where they ask for nothing.

    Raises CheckpointError when the files contradict each other or a scale is missing, damaged or never measured.
    """
    arch = arch_from_checkpoint(checkpoint)
    num_layers = arch.num_layers
    if isinstance(checkpoint, PackedCheckpoint) and checkpoint.reader.kv_cache.layers:
        return _native_plan(checkpoint, arch)
    stored = _stored(checkpoint)
    scheme = _foreign_scheme(stored)
    if scheme is None:
        return KvPlan.plain(num_layers)
    scales = (KvScales(),) * num_layers if scheme.dynamic else applied_scales(stored, num_layers)
    return KvPlan((LayerKv(scheme, scheme),) * num_layers, scales)


def kv_plan_for(checkpoint: Checkpoint, wanted: Sequence[LayerKv]) -> KvPlan:
    """A plan in the schemes `wanted`, with the scales that the files have for exactly those.

    Scales beside the weights of a model whose config names no scheme are taken for fp8_e4m3, as vLLM does. Raises
    UsageError when a scheme needs scales that were never stored.
    """
    plan = kv_plan(checkpoint)
    if not plan.quantizes and stored_scales(_stored(checkpoint)):
        fp8 = KvScheme("fp8_e4m3")
        found = applied_scales(_stored(checkpoint), len(plan.layers))
        plan = KvPlan((LayerKv(fp8, fp8),) * len(plan.layers), found)
    scales = [
        KvScales(
            *((stored.k_scale, stored.k_zero) if new.k == old.k else (None, None)),
            *((stored.v_scale, stored.v_zero) if new.v == old.v else (None, None)),
        )
        for new, old, stored in zip(wanted, plan.layers, plan.scales, strict=True)
    ]
    return replace(plan, layers=tuple(wanted), scales=tuple(scales))


def _stored(checkpoint: Checkpoint) -> Checkpoint:
    return checkpoint.inner if isinstance(checkpoint, PackedCheckpoint) else checkpoint


def _native_plan(checkpoint: PackedCheckpoint[Any], arch: Arch) -> KvPlan:
    section, num_layers = checkpoint.reader.kv_cache, arch.num_layers
    if len(section.layers) != num_layers:
        raise CheckpointError(
            f"{checkpoint.path}/{FILE_NAME}: kv_cache has {len(section.layers)} layers, the model {num_layers}"
        )
    sensitive = sensitive_ids(tokenizer_of(checkpoint), section.sensitive) if section.sensitive else frozenset()
    try:
        scales = _native_scales(checkpoint, section, arch)
        return KvPlan(section.layer_schemes(), scales, section.sink_tokens, section.recent_tokens, sensitive)
    except UsageError as error:
        raise CheckpointError(f"{checkpoint.path}/{FILE_NAME}: kv_cache: {error}") from error


def _native_scales(checkpoint: PackedCheckpoint[Any], section: KvCache, arch: Arch) -> tuple[KvScales, ...]:
    num_layers, accepted = arch.num_layers, section.given_scale == 1.0
    if isinstance(checkpoint.reader, AscendReader):
        return checkpoint.reader.kv_scales()
    if section.scales is None:
        return (KvScales(),) * num_layers
    if section.scales == "model":
        return applied_scales(checkpoint.inner, num_layers, allow_ones=accepted)
    path = checkpoint.path / SCALES_FILE
    scales = parse_scales(read_bytes(path), num_layers, str(path), allow_ones=accepted)
    check_shapes(section.layer_schemes(), scales, arch.num_kv_heads, arch.head_dim, str(path))
    return scales


def _foreign_scheme(checkpoint: Checkpoint) -> KvScheme | None:
    """What the `kv_cache_scheme` of compressed-tensors means. Raises CheckpointError for one that cannot be run."""
    section = checkpoint.config.get("quantization_config")
    arguments = section.get("kv_cache_scheme") if isinstance(section, Mapping) else None
    if arguments is None:
        return None
    known = (("float", 8, KvScheme("fp8_e4m3")), ("int", 8, KvScheme("int8")))
    said = (arguments.get("type"), arguments.get("num_bits")) if isinstance(arguments, Mapping) else None
    scheme = next((own for kind, bits, own in known if said == (kind, bits)), None)
    if scheme is None or arguments.get("strategy") != "tensor" or arguments.get("symmetric") is False:
        raise CheckpointError(
            f"{checkpoint.path}/config.json: kv_cache_scheme {shown(arguments)} is none that this version runs; it "
            "knows 8 bits, symmetric, one scale a tensor"
        )
    return replace(scheme, dynamic=arguments.get("dynamic") is True)
