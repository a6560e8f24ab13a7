"""Flags of `quantize` as a recipe: the command line overrides the recipe file, that overrides the defaults."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from cann_llm_quant.errors import UsageError

if TYPE_CHECKING:
    from cann_llm_quant.recipe import Recipe

GROUP_WORDS = ("auto", "tensor", "block")

# Flag to its field in the recipe document.
FIELDS = {
    "method": ("method",),
    "effort": ("effort",),
    "tuning_steps": ("tuning_steps",),
    "smooth_alpha": ("smooth_alpha",),
    "rotate": ("rotate",),
    "bits": ("scheme", "bits"),
    "group_size": ("scheme", "group_size"),
    "symmetric": ("scheme", "symmetric"),
    "clip": ("clip",),
    "target_bits": ("target_bits",),
    "candidates": ("candidates",),
    "preset": ("preset",),
    "on_misfit": ("on_misfit",),
    "expand_fusion_groups": ("expand_fusion_groups",),
    "data": ("calibration", "data"),
    "samples": ("calibration", "samples"),
    "seq_len": ("calibration", "length"),
    "seed": ("calibration", "seed"),
    "head": ("head",),
    "embedding": ("embedding",),
    "moe_all_experts": ("moe_all_experts",),
    "formats": ("formats",),
    "kv_cache": ("kv_cache", "scheme"),
    "kv_bits": ("kv_cache", "bits"),
    "kv_candidates": ("kv_cache", "candidates"),
    "kv_sink_tokens": ("kv_cache", "sink_tokens"),
    "kv_recent_tokens": ("kv_cache", "recent_tokens"),
    "kv_sensitive": ("kv_cache", "sensitive"),
    "kv_headroom": ("kv_cache", "headroom"),
    "kv_percentile": ("kv_cache", "percentile"),
    "kv_scale": ("kv_cache", "scale"),
    "kv_smooth": ("kv_cache", "smooth"),
    "kv_page_size": ("kv_cache", "page_size"),
}


def outer_scheme(bits: int | None) -> dict[str, Any] | None:
    """The scheme that `--head-bits` or `--embedding-bits` means: 8 bits have one scale a row, fewer have groups."""
    return None if bits is None else {"bits": bits, "group_size": -1 if bits == 8 else "auto"}


def resolve_recipe(file: Path | None, flags: Mapping[str, Any], ignore: Sequence[str]) -> "Recipe":
    """The recipe of `file` (or the default one) with every flag that is not None written over it.

    `ignore` patterns become a last rule, so that they win over the file's rules. Raises UsageError.
    """
    from cann_llm_quant.recipe import Format, load_recipe, validate_recipe

    base = load_recipe(file) if file is not None else validate_recipe({}, "the default recipe")
    document = base.model_dump()
    if flags.get("scheme") is not None:
        document["scheme"] = named_scheme(flags["scheme"])
    if document["kv_cache"] is None:
        document["kv_cache"] = _new_cache(flags)
    for flag, path in FIELDS.items():
        value = flags[flag]
        if value is not None:
            _field(document, path[:-1])[path[-1]] = value
    _set_ranges(document["scheme"], flags.get("act_range"), flags.get("act_percentile"))
    if ignore:
        document["rules"] = [*document["rules"], {"match": list(ignore), "scheme": "skip"}]
    document["formats"] = ["native" if name == "compressed-tensors" else name for name in document["formats"]]
    for name in document["formats"]:
        if name not in get_args(Format):
            raise UsageError(f"format {name!r} is not available; this version writes: {', '.join(get_args(Format))}")
    return validate_recipe(document, "the command line")


def _new_cache(flags: Mapping[str, Any]) -> dict[str, Any] | None:
    """The section of a quantized KV cache where `--kv-cache` opens one. Raises UsageError for details without it."""
    if flags["kv_cache"] is not None:
        return {}
    given = [flag for flag, path in FIELDS.items() if path[0] == "kv_cache" and flags[flag]]
    if given:
        raise UsageError(f"--{given[0].replace('_', '-')} is for a quantized KV cache; add --kv-cache, int8 say")
    return None


def _set_ranges(scheme: dict[str, Any], method: str | None, percentile: float | None) -> None:
    """How static ranges of activations are estimated; a percentile alone means that estimator.

    Raises UsageError where the scheme stores no ranges.
    """
    if method is None and percentile is None:
        return
    activations = scheme["activations"]
    if activations is None or activations["dynamic"]:
        raise UsageError(
            "--act-range and --act-percentile are for stored ranges; add a static --scheme, W8A8-STATIC say"
        )
    if percentile is not None and method not in (None, "percentile"):
        raise UsageError(f"--act-percentile is of the percentile estimator, not of --act-range {method}; drop one")
    activations["range"] = method or "percentile"
    if percentile is not None:
        activations["percentile"] = percentile


def named_scheme(name: str) -> dict[str, Any]:
    """The fields of a scheme's name. Raises UsageError for a name that is none."""
    from cann_llm_quant.recipe import NAMED_SCHEMES, WeightScheme

    if name.upper() not in NAMED_SCHEMES:
        raise UsageError(f"--scheme: {name!r} is no scheme; choose from {', '.join(NAMED_SCHEMES)}")
    return WeightScheme.model_validate(name).model_dump()


def parse_group_size(text: str | None) -> int | str | None:
    """`--group-size` as a recipe has it. Raises UsageError for text that is no number and no word for groups."""
    if text is None or text in GROUP_WORDS:
        return text
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--group-size: {text!r} is no number and none of {', '.join(GROUP_WORDS)}") from None


def _field(document: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    for key in path:
        document = document[key]
    return document
