"""`inspect`: what a checkpoint holds, without loading it; with `--scan`, whether its numbers are finite."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cann_llm_quant.cli.kv_table import cache_line, cache_report, cache_table
from cann_llm_quant.cli.options import AllowPickle, Debug, Json, Model, Revision
from cann_llm_quant.cli.progress import Step, show_progress
from cann_llm_quant.cli.terminal import Reply, print_facts, printable, size

if TYPE_CHECKING:
    from rich.console import Console

    from cann_llm_quant.checkpoint.base import Checkpoint, TensorInfo

SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def inspect(
    model: Model,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor instead of one line per kind.")] = False,
    scan: Annotated[
        bool,
        typer.Option("--scan", help="Read all weights and name tensors that hold NaN or infinity; exit 1 if any."),
    ] = False,
    revision: Revision = None,
    allow_pickle: AllowPickle = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Show what a checkpoint holds.

    That is architecture, tensors, sizes, quantization and other files. Weights are read with --scan only.
    """
    from cann_llm_quant.checkpoint.open import open_checkpoint

    with open_checkpoint(model, revision=revision, allow_pickle=allow_pickle, accept_quantized=True) as checkpoint:
        damaged = scan_tensors(checkpoint) if scan else None
        report = describe(checkpoint, damaged)
        infos = list(checkpoint.tensors.values())
    value = {**report, "tensor_list": [listed(info) for info in infos]} if tensors else report
    failed = bool(damaged)
    Reply(json).result(
        value,
        lambda console: draw(console, report, infos, every=tensors),
        status="failed" if failed else "ok",
    )
    return 1 if failed else 0


@dataclass(frozen=True)
class Damage:
    """How many NaN and infinite numbers one tensor holds."""

    nan: int
    infinite: int


def scan_tensors(checkpoint: "Checkpoint") -> dict[str, Damage]:
    """Tensors that hold NaN or infinity, by name; reads every floating-point tensor, one at a time."""
    import torch

    damaged: dict[str, Damage] = {}
    total = len(checkpoint.tensors)
    with show_progress("tensors") as progress:
        for number, name in enumerate(checkpoint.tensors):
            progress(Step("scan", number, total, layer=name))
            tensor = checkpoint.load(name)
            if not tensor.is_floating_point():
                continue
            if tensor.dtype.itemsize < 2:
                tensor = tensor.to(torch.float32)
            if not bool(tensor.isfinite().all()):
                damaged[name] = Damage(int(tensor.isnan().sum()), int(tensor.isinf().sum()))
        progress(Step("scan", total, total))
    return damaged


def describe(checkpoint: "Checkpoint", damaged: Mapping[str, Damage] | None) -> dict[str, Any]:
    """Everything `inspect` reports, as plain values."""
    infos = checkpoint.tensors.values()
    report: dict[str, Any] = {
        "path": str(checkpoint.path),
        "architecture": architecture(checkpoint),
        "quantization": quantization(checkpoint),
        "kv_cache": cache_report(checkpoint),
        "tensors": len(infos),
        "bytes": sum(info.nbytes for info in infos),
        "dtypes": bytes_by_dtype(infos),
        "files": bytes_by_file(infos),
        "companion_files": {name: len(data) for name, data in sorted(checkpoint.companion_files().items())},
    }
    if damaged is not None:
        report["non_finite"] = {name: {"nan": d.nan, "infinite": d.infinite} for name, d in damaged.items()}
    return report


def architecture(checkpoint: "Checkpoint") -> dict[str, Any]:
    """The shape of the model as its config states it; whether this version can calibrate and run it."""
    config = checkpoint.config
    keys = (
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "tie_word_embeddings",
    )
    known = {key: config[key] for key in keys if key in config}
    return {"model_type": config.get("model_type"), **known}


def quantization(checkpoint: "Checkpoint") -> dict[str, Any] | None:
    """How the weights are quantized: layout, and linears by scheme of weights and inputs; None for float.

    Of a layout that this version cannot read, the reason.
    """
    from cann_llm_quant.errors import InputError
    from cann_llm_quant.export.packed import reader_of
    from cann_llm_quant.quant.activations import label

    try:
        reader = reader_of(checkpoint)
    except InputError as error:
        return {"layout": None, "problem": str(error)}
    if reader is None:
        return None
    schemes = Counter(linear.scheme.label() for linear in reader.linears.values())
    inputs = Counter(label(linear.activations) for linear in reader.linears.values() if linear.activations)
    return {"layout": reader.layout, "schemes": dict(schemes), "inputs": dict(inputs), "tied": dict(reader.tied)}


def bytes_by_dtype(infos: "Iterable[TensorInfo]") -> dict[str, int]:
    """Stored bytes of each dtype."""
    total: Counter[str] = Counter()
    for info in infos:
        total[dtype_name(info)] += info.nbytes
    return dict(total)


def bytes_by_file(infos: "Iterable[TensorInfo]") -> dict[str, int]:
    """Tensor bytes of each weight file."""
    total: Counter[str] = Counter()
    for info in infos:
        total[info.file] += info.nbytes
    return dict(sorted(total.items()))


def dtype_name(info: "TensorInfo") -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(info.dtype).removeprefix("torch.")


def listed(info: "TensorInfo") -> dict[str, Any]:
    """One tensor as plain values."""
    return {
        "name": info.name,
        "dtype": dtype_name(info),
        "shape": list(info.shape),
        "bytes": info.nbytes,
        "file": info.file,
    }


def draw(console: "Console", report: Mapping[str, Any], infos: "Iterable[TensorInfo]", *, every: bool) -> None:
    """The report for people: facts, then a table of tensors."""
    from rich.table import Table

    console.print(printable(str(report["path"])), style="bold", soft_wrap=True)
    print_facts(console, facts(report))
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    table.add_column("tensor", overflow="fold")
    for heading in ("count", "dtype", "shape", "bytes"):
        table.add_column(heading, justify="left" if heading == "dtype" else "right", no_wrap=True)
    for name, count, dtype, shape, nbytes in tensor_rows(infos, every=every):
        table.add_row(
            printable(name),
            str(count),
            SHORT_DTYPES.get(dtype, dtype),
            "×".join(map(str, shape)) or "scalar",
            size(nbytes),
        )
    console.print()
    console.print(table)
    if report["kv_cache"] is not None:
        cache_table(console, report["kv_cache"])
    for name, damage in report.get("non_finite", {}).items():
        console.print(f"damaged: {printable(name)}: {damage['nan']} NaN, {damage['infinite']} infinite", style="red")
    if report.get("non_finite") == {}:
        console.print("\nscan: every number is finite")


def facts(report: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """The lines above the table: title and text."""
    shape = dict(report["architecture"])
    yield "model type", str(shape.pop("model_type") or "not stated")
    names = {"num_hidden_layers": "layers", "num_attention_heads": "heads", "num_key_value_heads": "kv heads"}
    readable = {names.get(key, key.replace("_", " ")): value for key, value in shape.items()}
    yield "shape", ", ".join(f"{key} {value}" for key, value in readable.items()) or "not stated"
    yield "quantization", quantization_line(report["quantization"])
    if report["kv_cache"] is not None:
        yield "kv cache", cache_line(report["kv_cache"])
    yield (
        "weights",
        f"{size(report['bytes'])} in {report['tensors']} tensors: "
        + ", ".join(f"{dtype} {size(count)}" for dtype, count in report["dtypes"].items()),
    )
    yield "files", ", ".join(f"{name} {size(count)}" for name, count in report["files"].items())
    yield "beside them", ", ".join(report["companion_files"]) or "nothing"


def quantization_line(section: Mapping[str, Any] | None) -> str:
    """The quantization on one line."""
    if section is None:
        return "none"
    if section["layout"] is None:
        return str(section["problem"])
    parts = [f"{scheme} for {count} linears" for scheme, count in section["schemes"].items()]
    parts += [f"{inputs} inputs for {count}" for inputs, count in section["inputs"].items()]
    return f"{section['layout']}: {', '.join(parts)}"


def tensor_rows(infos: "Iterable[TensorInfo]", *, every: bool) -> Iterable[tuple[str, int, str, tuple[int, ...], int]]:
    """Rows of the table: name, count, dtype, shape, bytes; layers of one kind share a row unless `every`."""
    rows: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for info in infos:
        name = info.name if every else LAYER_NUMBER.sub("*", info.name)
        row = rows.setdefault((name, dtype_name(info), info.shape), [0, 0])
        row[0] += 1
        row[1] += info.nbytes
    for (name, dtype, shape), (count, nbytes) in sorted(rows.items()):
        yield name, count, dtype, shape, nbytes
