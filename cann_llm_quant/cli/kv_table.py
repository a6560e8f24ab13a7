"""How the KV cache is stored, in words: the lines of `quantize` and the table of `inspect`."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

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


def cache_table(console: "Console", cache: Mapping[str, Any]) -> None:
    """The table of `inspect`: formats, scales and clipping of each layer, as far as the files tell."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    columns = [
        name for name in ("layer", "k", "v", "k_scale", "v_scale", "k_clipped", "v_clipped") if name in cache["rows"][0]
    ]
    for name in columns:
        table.add_column(name.replace("_", " "), justify="left" if name in ("k", "v") else "right", no_wrap=True)
    for row in cache["rows"]:
        table.add_row(*(_cell(name, row[name]) for name in columns))
    console.print()
    console.print(table)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith("clipped"):
        return f"{value:.3%}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
