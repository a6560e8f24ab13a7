"""`export`: a quantized folder converted into another layout, without quantizing anything again."""

from pathlib import Path
from typing import Annotated

import typer

from cann_llm_quant.cli.options import Debug, Json, parse_size
from cann_llm_quant.cli.progress import Step, show_progress
from cann_llm_quant.cli.terminal import Reply, printable, size
from cann_llm_quant.errors import UsageError

LAYOUTS = ("float",)


def export(
    source: Annotated[
        str, typer.Argument(metavar="FOLDER", help="A folder that 'quantize' wrote.", show_default=False)
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="LAYOUT", help="float: a plain checkpoint of dequantized weights.", show_default=False
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="Folder to write.", show_default=False)
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="DTYPE", help="fp32, bf16 or fp16; fp32 loses nothing. [default: as the source was]"
        ),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Largest weight file.")
    ] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing or unfinished output.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Convert a quantized model into another layout."""
    if to not in LAYOUTS:
        raise UsageError(f"layout {to!r} is not available; this version converts to: {', '.join(LAYOUTS)}")
    shard = parse_size(max_shard_size)
    from cann_llm_quant.device import resolve_dtype
    from cann_llm_quant.export.inference_config import load_inference_config
    from cann_llm_quant.export.to_float import export_to_float

    folder = quantized_folder(source)
    inputs = len(load_inference_config(folder).inputs.linears)
    with show_progress("parts") as progress:
        written = export_to_float(
            folder,
            output,
            dtype=None if dtype is None else resolve_dtype(dtype),
            max_shard_bytes=shard,
            overwrite=overwrite,
            progress=lambda done, total: progress(Step("export", done, total)),
        )
    value = {
        "output": str(written.path),
        "layout": to,
        "bytes": written.total_bytes,
        "tensors": written.tensors,
        "weight_files": list(written.weight_files),
        "inputs_left_in_float": inputs,
    }
    line = f"wrote {printable(str(written.path))}: {written.tensors} tensors, {size(written.total_bytes)}"
    reply = Reply(json)
    reply.result(value, lambda console: console.print(line, soft_wrap=True))
    if inputs:
        reply.note(
            f"note: {source} quantizes the inputs of {inputs} linears, which a float checkpoint cannot say; "
            "measure the packed folder to include their error"
        )


def quantized_folder(source: str) -> Path:
    """The folder of a model that `quantize` wrote, also by hub id. Raises InputError's kinds for anything else."""
    from cann_llm_quant.checkpoint.hub import locate
    from cann_llm_quant.export.native_reader import is_native

    path = locate(source)
    if not is_native(path):
        raise UsageError(f"{source} is no folder that 'quantize' wrote; export converts nothing else")
    return path
