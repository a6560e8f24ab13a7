"""`verify`: an output examined as a stranger would, optionally against the model it was made from."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cann_llm_quant.cli.options import AllowPickle, Debug, Json
from cann_llm_quant.cli.progress import Step, show_progress
from cann_llm_quant.cli.terminal import Reply, one_line, print_facts, printable

if TYPE_CHECKING:
    from rich.console import Console

    from cann_llm_quant.export.verify import Verification
    from cann_llm_quant.export.verify_load import Loaded
    from cann_llm_quant.export.verify_weights import WeightError

WORST = 10  # rows of the table


def verify(
    output: Annotated[
        str,
        typer.Argument(metavar="OUTPUT", help="A folder, a GGUF file or a hub id, in any layout.", show_default=False),
    ],
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="MODEL",
            help="What it was made from, float or quantized: weights are compared.",
            show_default=False,
        ),
    ] = None,
    load: Annotated[
        bool, typer.Option("--load", help="Load it with the layout's own runtime too, where that is installed.")
    ] = False,
    allow_pickle: AllowPickle = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Check an output, alone or against its source.

    It must be whole, tell the truth about itself and hold the weights of its source.

    Exit 0 where nothing is wrong, 1 with a list of what is.
    """
    from cann_llm_quant.export.verify import verify as examine
    from cann_llm_quant.export.verify_load import load_in_runtime

    with show_progress("parts") as progress:
        result = examine(
            output,
            against,
            allow_pickle=allow_pickle,
            tick=lambda done, total, what: progress(Step("verify", done, total, layer=what)),
        )
        loaded = load_in_runtime(result.path, result.layout, result.findings) if load and result.passed else None
    value = describe(result, loaded)
    Reply(json).result(value, lambda console: draw(console, result, loaded), status="ok" if result.passed else "failed")
    return 0 if result.passed else 1


def worst(result: "Verification") -> "list[WeightError]":
    """The linears farthest from the source."""
    return sorted(result.errors, key=lambda error: -error.error)[:WORST]


def describe(result: "Verification", loaded: "Loaded | None") -> dict[str, Any]:
    """Everything that was examined, as plain values."""
    return {
        "path": str(result.path),
        "layout": result.layout,
        "checks": result.stages,
        "tensors": result.tensors,
        "digests": result.sums,
        "linears": result.linears,
        "schemes": result.schemes,
        "source": result.source,
        "findings": [asdict(fault) for fault in result.findings.faults],
        "remarks": result.findings.remarks,
        "errors": [asdict(error) for error in result.errors],
        "loaded": None if loaded is None else asdict(loaded),
    }


def draw(console: "Console", result: "Verification", loaded: "Loaded | None") -> None:
    """The report for people: facts, distances from the source, findings."""
    console.print(printable(str(result.path)), style="bold", soft_wrap=True)
    print_facts(console, facts(result, loaded))
    if result.errors:
        draw_errors(console, result)
    for text in result.findings.remarks:
        console.print(f"note: {one_line(text)}", soft_wrap=True)
    for fault in result.findings.faults:
        console.print(f"wrong: {one_line(fault.line())}", style="red", soft_wrap=True)
    count = len(result.findings.faults)
    console.print("nothing wrong was found" if not count else f"{count} {'fault' if count == 1 else 'faults'} found")


def facts(result: "Verification", loaded: "Loaded | None") -> list[tuple[str, str]]:
    """The lines at the top: title and text."""
    none = "not told apart: operators are left to the runtime (--load)" if result.layout == "onnx" else "none quantized"
    schemes = ", ".join(f"{count} x {label}" for label, count in result.schemes.items()) or none
    lines = [
        ("layout", result.layout),
        ("tensors", f"{result.tensors}"),
        ("linears", schemes),
        ("checked", ", ".join(result.stages) or "nothing: the files cannot be opened"),
        ("SHA256SUMS", f"{result.sums} files agree" if result.sums else "none"),
    ]
    if result.source is not None:
        lines.append(("source", comparison(result)))
    if loaded is not None:
        lines.append(("loaded by", f"{loaded.runtime}: {loaded.outcome}"))
    return lines


def comparison(result: "Verification") -> str:
    """How the matrices relate to the source, in one line."""
    compared = [error for error in result.errors if error.codes is not None]
    equal = sum(error.codes is True for error in compared)
    text = f"{result.source}, {len(result.errors)} matrices compared"
    return text if not compared else f"{text}; codes of {equal} of {len(compared)} equal bit for bit"


def draw_errors(console: "Console", result: "Verification") -> None:
    """The table of the linears farthest from the source."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    table.add_column("farthest from the source", overflow="fold")
    for heading in ("scheme", "error", "mean", "largest"):
        table.add_column(heading, justify="left" if heading == "scheme" else "right", no_wrap=True)
    for error in worst(result):
        numbers = (f"{number:.4g}" for number in (error.error, error.mean, error.largest))
        table.add_row(printable(error.module), error.scheme, *numbers)
    console.print()
    console.print(table)
    console.print("relative to the rms of the source's weight, folded factors undone\n")
