"""`sensitivity`: which linears and layers lose most under which scheme, as a table and as a file for `quantize`."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cann_llm_quant.cli import kv_flags as kv
from cann_llm_quant.cli.kv_sensitivity_table import draw_kv
from cann_llm_quant.cli.options import (
    ActivationBudget,
    AllowPickle,
    Debug,
    Device,
    Dtype,
    Json,
    Model,
    Revision,
    parse_size,
)
from cann_llm_quant.cli.progress import show_progress
from cann_llm_quant.cli.scheme_names import named_schemes
from cann_llm_quant.cli.terminal import Reply, print_facts, printable
from cann_llm_quant.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cann_llm_quant.checkpoint.base import Checkpoint
    from cann_llm_quant.pipeline.kv_sensitivity_file import KvSensitivity
    from cann_llm_quant.pipeline.request import Event, RunOptions
    from cann_llm_quant.pipeline.sensitivity_file import Document, Sensitivity, UnitEntry
    from cann_llm_quant.recipe import Calibration

TEXT = "Text"
MEGABYTE_BITS = 8e6


def sensitivity(
    model: Model,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write the measurement, for quantize --sensitivity."),
    ] = None,
    kv_cache: Annotated[
        bool,
        typer.Option("--kv-cache", help="Rank the layers' cached keys and values, for quantize --kv-sensitivity."),
    ] = False,
    schemes: Annotated[
        str | None,
        typer.Option(
            "--schemes",
            metavar="LIST",
            help="Schemes to try; the first ranks, but float. W4g64: 4 bits in groups of 64; W4g64a: asymmetric; W8: "
            "one scale a row. [default: W4g64,W3g64,W4g128,W4g32,W5g64,W6g64,W8]. With --kv-cache formats as for "
            "quantize, [default: int4,int4-g32-asym,int8,int8-channel,int8-channel-dynamic,int8-token,fp8_e4m3,fp16]",
        ),
    ] = None,
    top: Annotated[int, typer.Option("--top", metavar="K", min=0, help="Units and layers to print.")] = 10,
    measure: Annotated[
        int | None,
        typer.Option(
            "--measure",
            metavar="N",
            min=0,
            help="Units to quantize really, one at a time, as a check [default: 8]; with --kv-cache formats of every "
            "layer's K and V, from which the others follow [default: 1].",
        ),
    ] = None,
    rounding: Annotated[
        bool, typer.Option("--rounding", help="Damage of plain rounding, not of rounding with error feedback.")
    ] = False,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", metavar="SOURCE", help="As for quantize. [default: text inside the package]", rich_help_panel=TEXT
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples", metavar="N", min=1, help="Windows. [default: 8; with --kv-cache 20]", rich_help_panel=TEXT
        ),
    ] = None,
    seq_len: Annotated[int, typer.Option("--seq-len", metavar="N", min=2, rich_help_panel=TEXT)] = 512,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Picks windows and labels.", rich_help_panel=TEXT)
    ] = 0,
    kv_sink_tokens: kv.KvSinkTokens = None,
    kv_recent_tokens: kv.KvRecentTokens = None,
    kv_sensitive: kv.KvSensitive = None,
    kv_page_size: kv.KvPageSize = None,
    activation_budget: ActivationBudget = "2GiB",
    device: Device = "cpu",
    dtype: Dtype = "fp32",
    revision: Revision = None,
    allow_pickle: AllowPickle = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure what quantizing each linear or cache costs.

    Damage is the KL divergence, in nats per token, of quantizing that part alone. One layer is in memory at a time.
    """
    budget = parse_size(activation_budget)
    if output is not None and not output.parent.is_dir():
        raise UsageError(f"--output {output}: the folder {output.parent} does not exist")
    if kv_cache and rounding:
        raise UsageError("--rounding is of linears; leave it out with --kv-cache")
    from cann_llm_quant.checkpoint import open_checkpoint
    from cann_llm_quant.pipeline.request import RunOptions
    from cann_llm_quant.pipeline.sensitivity import SensitivityRequest, measure_sensitivity
    from cann_llm_quant.pipeline.sensitivity_file import save_sensitivity
    from cann_llm_quant.recipe import DEFAULT_CANDIDATES, Calibration

    text = Calibration(
        data=tuple(data or ("default",)), samples=samples or (20 if kv_cache else 8), length=seq_len, seed=seed
    )
    options = RunOptions(device=device, dtype=dtype, activation_budget=budget)
    rules = {
        "sink_tokens": kv_sink_tokens,
        "recent_tokens": kv_recent_tokens,
        "sensitive": kv_sensitive,
        "page_size": kv_page_size,
    }
    given = {name: value for name, value in rules.items() if value is not None}
    if given and not kv_cache:
        raise UsageError(f"--kv-{next(iter(given)).replace('_', '-')} is of cached keys and values; add --kv-cache")
    request = SensitivityRequest(
        calibration=text,
        candidates=DEFAULT_CANDIDATES if schemes is None or kv_cache else named_schemes(schemes, "--schemes"),
        solver="rounding" if rounding else "feedback",
        measured=8 if measure is None else measure,
    )
    result: Document
    with (
        open_checkpoint(model, revision=revision, allow_pickle=allow_pickle) as source,
        show_progress("passes") as progress,
    ):
        if kv_cache:
            result = measure_cache(source, text, given, schemes, measure, options, progress)
        else:
            result = measure_sensitivity(source, Path(model).name, request, options, progress)
    if output is not None:
        save_sensitivity(result, output)
    Reply(json).result(result.document(), lambda console: draw_either(console, result, top, output))


def measure_cache(
    source: "Checkpoint",
    text: "Calibration",
    rules: dict[str, Any],
    schemes: str | None,
    measure: int | None,
    options: "RunOptions",
    progress: "Callable[[Event], None]",
) -> "KvSensitivity":
    """What formats of the layers' keys and values cost, in pages that are kept by `rules`."""
    from cann_llm_quant.pipeline.kv_sensitivity import KvSensitivityRequest, measure_kv_sensitivity
    from cann_llm_quant.recipe import validate_recipe

    cache = validate_recipe({"kv_cache": {"scheme": "auto", **rules}}, "the command line").kv_cache
    assert cache is not None
    candidates = None if schemes is None else tuple(part.strip() for part in schemes.split(",") if part.strip())
    if candidates == ():
        raise UsageError("--schemes names no format; write int4,int8,fp16 say")
    request = KvSensitivityRequest(text, cache, candidates, 1 if measure is None else measure)
    return measure_kv_sensitivity(source, source.path.resolve().name, request, options, progress)


def draw_either(console: "Console", result: "Document", top: int, output: Path | None) -> None:
    """The measurement for people, of linears or of the cache."""
    from cann_llm_quant.pipeline.kv_sensitivity_file import KvSensitivity
    from cann_llm_quant.pipeline.sensitivity_file import Sensitivity

    if isinstance(result, KvSensitivity):
        draw_kv(console, result, top, output)
    elif isinstance(result, Sensitivity):
        draw(console, result, top, output)


def draw(console: "Console", result: "Sensitivity", top: int, output: Path | None) -> None:
    """The measurement for people: how good it is, the ranking, the layers."""
    from rich.table import Table

    console.print(f"sensitivity of {printable(result.model)}", style="bold")
    print_facts(console, facts(result, output))
    if not top:
        return
    units = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    columns(units, "unit", "scheme", "bits", "est. KL", "measured", "KL", "KL per MB saved")
    ranked = sorted(result.units, key=lambda unit: -next(iter(unit.choices.values())).damage)
    for unit in ranked[:top]:
        for number, row in enumerate(rows(unit)):
            units.add_row(printable(unit.name) if number == 0 else "", *row)
    console.print()
    console.print(units)
    layers = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    columns(layers, "layer", "KL", "cosine in/out", "relative change")
    for layer in sorted(result.layers, key=lambda layer: -layer.damage)[:top]:
        layers.add_row(str(layer.index), f"{layer.damage:.3g}", f"{layer.cosine:.4f}", f"{layer.change:.3f}")
    console.print()
    console.print(layers)


def columns(table: "Table", first: str, *others: str) -> None:
    """A left column and right ones."""
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)


def rows(unit: "UnitEntry") -> Iterable[tuple[str, ...]]:
    """A row for each scheme of one unit."""
    for name, choice in unit.choices.items():
        saved = (unit.float_bits - choice.bits) / MEGABYTE_BITS
        yield (
            name,
            f"{choice.bits / unit.weights:.3f}",
            f"{choice.estimate:.3g}",
            "" if choice.measured is None else f"{choice.measured:.3g}",
            f"{choice.damage:.3g}",
            f"{choice.damage / saved:.3g}" if saved > 0 else "",
        )


def facts(result: "Sensitivity", output: Path | None) -> Iterable[tuple[str, str]]:
    """The lines above the ranking."""
    settings, agreement = result.settings, result.agreement
    text = settings.calibration
    yield "text", f"{text['samples']} windows of {text['length']} tokens, seed {settings.seed}"
    yield "damage", f"KL in nats per token of quantizing one unit alone, with {settings.solver}"
    if agreement.measured:
        ranks = "" if agreement.rank_correlation is None else f"rank correlation {agreement.rank_correlation:.3f}, "
        logs = "" if agreement.log_correlation is None else f"of logarithms {agreement.log_correlation:.3f}; "
        factors = ", ".join(f"{kind} ×{factor:.2f}" for kind, factor in agreement.corrections.items())
        yield "check", f"{agreement.measured} units measured: {ranks}{logs}corrected by {factors}"
    if output is not None:
        yield "file", str(output)
