"""How the KV cache is stored, in words: the lines of `quantize` and the table of `inspect`."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from cann_llm_quant.checkpoint.base import Checkpoint
    from cann_llm_quant.export.kv_section import KvCache


def cache_facts(cache: "KvCache") -> Iterable[tuple[str, str]]:
    """Title and text of the closing lines about the cache: formats, what stays in float, what is clipped."""
    yield "kv cache", formats_line(cache)
    kept = [
        f"the first {cache.sink_tokens} tokens" if cache.sink_tokens else "",
        f"the latest {cache.recent_tokens}" if cache.recent_tokens else "",
        f"pages with {' or '.join(cache.sensitive)}" if cache.sensitive else "",
    ]
    if any(kept):
        yield "kv in float", f"{', '.join(part for part in kept if part)}; pages of {cache.page_size} tokens"
    if cache.given_scale is not None:
        yield "kv scales", f"{cache.given_scale:g} for all, as given"
    clipping = clipping_line(cache)
    if clipping:
        yield "kv clipping", clipping


def formats_line(cache: "KvCache") -> str:
    """Formats of K and V with the layers that have them."""
    lines = []
    for (k, v), layers in groupby(enumerate(cache.layers), key=lambda pair: (pair[1].k, pair[1].v)):
        numbers = [number for number, _ in layers]
        both = f"{k or 'float'}" if k == v else f"k {k or 'float'}, v {v or 'float'}"
        where = "" if len(numbers) == len(cache.layers) else f" in layers {numbers[0]}-{numbers[-1]}"
        where = where if numbers[0] != numbers[-1] else f" in layer {numbers[0]}"
        lines.append(f"{both}{where if len(cache.layers) > 1 else ''}")
    return "; ".join(lines)


def clipping_line(cache: "KvCache") -> str:
    """Which share of the measured values stored scales do not reach: on average, and where most."""
    shares = [
        (one.clipped, f"layer {number}, {side}")
        for number, layer in enumerate(cache.report)
        for side, one in (("k", layer.k), ("v", layer.v))
        if one is not None
    ]
    if not shares:
        return ""
    most, where = max(shares)
    if not most:
        return "none of the calibration's values"
    mean = sum(share for share, _ in shares) / len(shares)
    return f"{mean:.3%} of the calibration's values on average, most in {where}: {most:.3%}"


def cache_report(checkpoint: "Checkpoint") -> dict[str, Any] | None:
    """What a checkpoint's files say of its cache, one row a layer, and whether scales are whole; None for nothing.

    Raises CheckpointError for scales that are damaged or contradict each other.
    """
    from cann_llm_quant.export.inference_config import load_inference_config
    from cann_llm_quant.export.kv_scales import stored_scales
    from cann_llm_quant.export.kv_section import KvCache
    from cann_llm_quant.export.native_reader import is_native

    cache = load_inference_config(checkpoint.path).kv_cache if is_native(checkpoint.path) else KvCache()
    found = {key: (scale.item(), scale.item()) for key, (_, scale) in stored_scales(checkpoint).items()}
    layers = int(checkpoint.config.get("num_hidden_layers") or 0)
    if not found and not cache.layers:
        return None
    if cache.scales not in (None, "model"):
        found = _own_scales(checkpoint, layers)
    wanted = 2 * layers if cache.scales == "model" or not cache.layers else len(found)
    known = list(found.values())
    return {
        "formats": formats_line(cache) or None,
        "scales": len(found),
        "wanted": wanted,
        "all_ones": bool(known) and all(scale == (1.0, 1.0) for scale in known),
        "rows": [_row(number, cache, found) for number in range(max(layers, *(n + 1 for n, _ in found), 0))],
    }


def _own_scales(checkpoint: "Checkpoint", layers: int) -> dict[tuple[int, Any], tuple[float, float]]:
    """Smallest and largest scale by layer and side, from the file of scales."""
    from cann_llm_quant.checkpoint.files import read_bytes
    from cann_llm_quant.export.kv_scales import parse_scales
    from cann_llm_quant.export.kv_section import SCALES_FILE

    path = checkpoint.path / SCALES_FILE
    return {
        (number, side): (scale.min().item(), scale.max().item())
        for number, one in enumerate(parse_scales(read_bytes(path), layers, str(path), allow_ones=True))
        for side, scale in (("k", one.k_scale), ("v", one.v_scale))
        if scale is not None
    }


def _row(number: int, cache: "KvCache", found: Mapping[tuple[int, Any], tuple[float, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"layer": number}
    for side in ("k", "v"):
        scheme = getattr(cache.layers[number], side) if number < len(cache.layers) else None
        measured = getattr(cache.report[number], side) if number < len(cache.report) else None
        low, high = found.get((number, side), (None, None))
        row |= {side: scheme, f"{side}_scale": low, f"{side}_scale_max": high}
        row[f"{side}_clipped"] = None if measured is None else measured.clipped
    return row


def cache_line(report: Mapping[str, Any]) -> str:
    """The cache on one line of `inspect`, and what is wrong with its scales."""
    parts = [report["formats"] or "formats not stated", f"{report['scales']} stored scales"]
    if report["scales"] != report["wanted"]:
        parts.append(f"{report['wanted']} are needed, two a layer")
    if report["all_ones"]:
        parts.append("all are 1.0, as if nothing had been calibrated")
    return ", ".join(parts)


def cache_table(console: "Console", report: Mapping[str, Any]) -> None:
    """The table of `inspect`: formats, scales and clipping of each layer, as far as the files tell."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    headings = ("layer", "k", "k scale", "k clipped", "v", "v scale", "v clipped")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("k", "v") else "right", no_wrap=True)
    for row in report["rows"]:
        cells = [str(row["layer"])]
        for side in ("k", "v"):
            clipped = row[f"{side}_clipped"]
            cells += [row[side] or "float", _scale(row, side), "" if clipped is None else f"{clipped:.3%}"]
        table.add_row(*cells)
    console.print()
    console.print(table)


def _scale(row: Mapping[str, Any], side: str) -> str:
    low, high = row[f"{side}_scale"], row[f"{side}_scale_max"]
    if low is None:
        return ""
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
