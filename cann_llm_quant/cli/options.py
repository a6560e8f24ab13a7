"""Arguments and options that several commands share, and the spellings of their values."""

import re
from typing import Annotated, Literal

import typer

from cann_llm_quant.errors import UsageError

UNITS = {
    "": 1,
    "b": 1,
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
    "t": 1e12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
LARGEST = 1 << 63  # bytes; file systems and memory count no further
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)

MODEL_SECTION = "Model"
MODEL_HELP = "A local directory, a GGUF file or a hub id."

Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
Revision = Annotated[
    str | None,
    typer.Option("--revision", help="Hub branch, tag or commit.", rich_help_panel=MODEL_SECTION, show_default=False),
]
AllowPickle = Annotated[
    bool,
    typer.Option(
        "--allow-pickle",
        help="Read .bin shards when there is no safetensors form; code in them is never run.",
        rich_help_panel=MODEL_SECTION,
    ),
]
Reference = Annotated[
    str | None,
    typer.Option("--reference", metavar="MODEL", help="The float model to compare with.", show_default=False),
]
ReferenceRevision = Annotated[
    str | None,
    typer.Option("--reference-revision", metavar="NAME", help="Its hub branch, tag or commit.", show_default=False),
]
ActivationBudget = Annotated[
    str,
    typer.Option("--activation-budget", metavar="SIZE", help="Activations kept in memory before they go to disk."),
]
Device = Annotated[str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda or npu, also cuda:1.")]
Dtype = Annotated[str, typer.Option("--dtype", metavar="DTYPE", help="fp32, bf16 or fp16.")]
Kernel = Annotated[
    Literal["auto", "reference"],
    typer.Option("--kernel", help="auto: torch's int4/int8 operators where they fit; reference: dequantize."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; progress stays on stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")]


def parse_size(text: str) -> int:
    """Bytes from `5GB` (powers of ten), `2GiB` (powers of two) or a plain number.

    Raises UsageError for anything else, and for more than any machine holds.
    """
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a size; write for example 500MB, 5GB or 2GiB")
    number = float(match[1]) * UNITS[(match[2] or "").lower()]
    if number >= LARGEST:
        raise UsageError(f"{text[:40]!r} is more than any machine holds; write for example 5GB")
    return int(number)
