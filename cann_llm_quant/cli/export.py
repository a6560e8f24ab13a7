"""`export`: a quantized model converted into another layout, without quantizing anything again unless asked."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cann_llm_quant.cli import export_flags as flag
from cann_llm_quant.cli.options import AllowPickle, Debug, Json, parse_size
from cann_llm_quant.cli.progress import Step, show_progress
from cann_llm_quant.cli.terminal import Reply, print_facts, printable, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cann_llm_quant.export.layouts import Exported


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A model: folder, GGUF file or hub id, in any layout.", show_default=False
        ),
    ],
    to: flag.To,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="Folder to write.", show_default=False)
    ],
    regroup: flag.Regroup = None,
    requantize: flag.Requantize = False,
    dtype: flag.Dtype = None,
    runtime: flag.Runtime = None,
    dialect: flag.Dialect = None,
    accuracy_level: flag.AccuracyLevel = None,
    contrib_ops: flag.ContribOps = True,
    soc_version: flag.SocVersion = None,
    tokenizer: flag.Tokenizer = True,
    kv_cache: flag.KvCache = True,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Largest weight file.")
    ] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing or unfinished output.")] = False,
    allow_pickle: AllowPickle = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Convert a model into another layout, its codes as they are."""
    shard = parse_size(max_shard_size)
    from cann_llm_quant.export.layouts import ExportOptions, export_model

    options = ExportOptions(
        regroup=regroup,
        requantize=requantize,
        dtype=dtype,
        runtime=runtime,
        dialect=dialect,
        accuracy_level=accuracy_level,
        contrib_ops=contrib_ops,
        soc_version=soc_version,
        tokenizer=tokenizer,
        kv_cache=kv_cache,
        allow_pickle=allow_pickle,
        max_shard_bytes=shard,
        overwrite=overwrite,
    )
    with show_progress("parts") as progress:
        done = export_model(
            source, output, flag.layout(to), options, progress=lambda n, total: progress(Step("export", n, total))
        )
    reply = Reply(json)
    reply.result(done.to_json(), lambda console: print_facts(console, facts(done)))
    for warning in done.warnings:
        reply.note(f"note: {warning}")


def facts(done: "Exported") -> "Iterator[tuple[str, str]]":
    """Title and text of each closing line."""
    yield "wrote", f"{printable(str(done.path))}, {size(done.total_bytes)} of weights"
    yield "layout", done.layout
    if done.layout != "float":
        anew = f", {done.rounded} of them rounded anew" if done.rounded else ", codes as in the source"
        yield "linears", f"{done.linears} quantized{anew if done.linears else ''}"
