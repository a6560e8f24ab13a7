"""What formats of keys and values cost, in words: the tables of `sensitivity --kv-cache`, a line of `quantize`."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from cann_llm_quant.cli.terminal import print_facts, printable

if TYPE_CHECKING:
    from rich.console import Console

    from cann_llm_quant.pipeline.kv_sensitivity_file import KvChoiceReport, KvSensitivity, SideEntry


def choice_line(report: "KvChoiceReport") -> str:
    """What `auto` came to: stored bits, and predicted against measured KL."""
    return (
        f"{report.bits:.3f} bits per value of {report.bits_wanted:g} allowed; predicted KL {report.predicted_kl:.3g} "
        f"nats per token, measured {report.measured_kl:.3g} with all layers together"
    )


def draw_kv(console: "Console", result: "KvSensitivity", top: int, output: Path | None) -> None:
    """The measurement for people: the rules it was made under, then layers by what their worst format costs."""
    from rich.table import Table

    console.print(f"KV cache sensitivity of {printable(result.model)}", style="bold")
    print_facts(console, facts(result, output))
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for heading in ("layer", "side", "format"):
        table.add_column(heading, justify="right" if heading == "layer" else "left", no_wrap=True)
    for heading in ("bits", "error", "measured", "KL"):
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in sorted(result.sides, key=rank)[:top]:
        for number, cells in enumerate(rows(entry)):
            table.add_row(*((str(entry.layer), entry.side) if number == 0 else ("", "")), *cells)
    console.print()
    console.print(table)


def rank(entry: "SideEntry") -> float:
    """Sorts by the damage of the first measured format, the largest first."""
    measured = [one.damage for one in entry.formats.values() if one.measured is not None]
    return -measured[0] if measured else 0.0


def rows(entry: "SideEntry") -> Iterable[tuple[str, ...]]:
    """A row for each format of K or V of a layer."""
    for label, one in entry.formats.items():
        measured = "" if one.measured is None else f"{one.measured:.3g}"
        yield label, f"{one.bits:.3f}", f"{one.error:.3g}", measured, f"{one.damage:.3g}"


def facts(result: "KvSensitivity", output: Path | None) -> Iterable[tuple[str, str]]:
    """The lines above the ranking."""
    settings = result.settings
    length = settings.calibration["length"]
    yield (
        "text",
        f"{settings.judged_windows} windows of {length} tokens judged, static scales from {settings.scale_windows} "
        f"others, seed {settings.seed}",
    )
    kept = [f"first {settings.sink_tokens} tokens"] if settings.sink_tokens else []
    kept += [f"latest {settings.recent_tokens} tokens"] if settings.recent_tokens else []
    kept += [f"pages with {' or '.join(settings.sensitive)}"] if settings.sensitive else []
    yield "cache", f"pages of {settings.page_size} tokens{', in float: ' + ', '.join(kept) if kept else ''}"
    yield "error", "how far a format moves what attention adds to the residual stream, relative, squared"
    yield "KL", "in nats per token with one side of one layer quantized; unmeasured: by the ratio of errors"
    for side in ("k", "v"):
        damages = [-rank(entry) for entry in result.sides if entry.side == side]
        yield f"sum over {side}", f"{sum(damages):.3g} in the first measured format"
    if output is not None:
        yield "file", str(output)
