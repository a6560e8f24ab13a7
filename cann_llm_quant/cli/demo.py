"""`demo`: the whole way on the small model inside the package, without a network: quantize, measure, generate.

Every number in its table is measured in this run: the float model beside plain rounding (RTN), AWQ and GPTQ, all at 4
bits.
"""

import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cann_llm_quant.cli.models import open_model
from cann_llm_quant.cli.options import Debug, Json
from cann_llm_quant.cli.perplexity import Compute, TextRules, measure
from cann_llm_quant.cli.progress import ProgressEvent, show_progress
from cann_llm_quant.cli.terminal import Reply, printable, size
from cann_llm_quant.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from cann_llm_quant.evaluate.report import EvaluationResult
    from cann_llm_quant.pipeline import QuantizeReport

METHODS = {"rtn": "int4 RTN", "awq": "int4 AWQ", "gptq": "int4 GPTQ"}
WINDOW = 256  # tokens that the model was trained on at once
SAMPLES = 64  # windows to calibrate on
WINDOWS = 48  # windows to measure on
PROMPT = "If the file"
NEW_TOKENS = 40
GIB = 1 << 30
LEGEND = (
    "RTN rounds to nearest; AWQ first scales channels by what calibration saw; GPTQ corrects each rounding error in "
    "the weights to come. KL divergence and top-1 compare with the original. Only the decoder's linears are quantized "
    "and counted in bits."
)


@dataclass(frozen=True)
class Trial:
    """One method's outcome: its output folder, what quantizing reported, what evaluation found, and a text."""

    method: str
    report: "QuantizeReport"
    result: "EvaluationResult"
    text: str


def demo(
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FOLDER", help="Keep the quantized models here.", show_default=False),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Quantize, measure and run a small model. No network is needed.

    The model lies inside the package. The original, plain rounding, AWQ and GPTQ are compared; it takes a minute.
    """
    refuse_existing(output)
    import torch

    torch.set_num_threads(1)  # the model is so small that threads only wait for one another
    source = Path(str(files("cann_llm_quant") / "data" / "demo_model"))
    with ExitStack() as stack:
        folder = output or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cann-llm-quant-demo-")))
        trials = [try_method(method, source, folder / method) for method in METHODS]
        text = continuation(source)
    value = summary(source, trials, text)
    Reply(json).result(value, lambda console: draw(console, value, output))


def refuse_existing(output: Path | None) -> None:
    """Raise UsageError for a folder that the demo would write and that is there already."""
    for path in [] if output is None else [output / method for method in METHODS]:
        if os.path.lexists(path):
            raise UsageError(f"{path} exists already; choose another -o or move it away")


def try_method(method: str, source: Path, output: Path) -> Trial:
    """Quantize the model with one method, measure the outcome against it, and let it write."""
    from cann_llm_quant.pipeline import RunOptions, quantize_model
    from cann_llm_quant.recipe import validate_recipe

    calibration = {"samples": SAMPLES, "length": WINDOW}
    recipe = validate_recipe({"method": method, "calibration": calibration}, "the demo")
    with show_progress("passes") as progress:

        def steps(event: ProgressEvent) -> None:
            if event.warning or not event.message:
                progress(event)

        report = quantize_model(str(source), output, recipe, options=RunOptions(), progress=steps)
    with ExitStack() as stack:
        models = [open_model(str(path)) for path in (output, source)]
        for model in models:
            stack.enter_context(model.checkpoint)
        rules = TextRules(data=None, window=WINDOW, stride=None, max_windows=WINDOWS, bos="auto")
        result, _ = measure(models, rules, Compute("cpu", "fp32", GIB))
    return Trial(method, report, result, continuation(output))


def continuation(model: Path) -> str:
    """What the model writes after the prompt, greedily."""
    from cann_llm_quant.runner.engine import LLMEngine

    return LLMEngine(model).generate(PROMPT, NEW_TOKENS).text


def summary(source: Path, trials: list[Trial], text: str) -> dict[str, Any]:
    """Everything the demo shows, as plain values."""
    first = trials[0]
    assert first.result.divergence is not None
    original = {
        "name": "bfloat16",
        "perplexity": first.result.divergence.reference_perplexity,
        "kl": 0.0,
        "top1_agreement": 1.0,
        "bits_per_weight": 16.0,
        "bytes": first.report.source_bytes,
        "seconds": None,
        "text": text,
    }
    return {
        "model": str(source),
        "parameters": first.report.total_parameters,
        "scored_tokens": first.result.tokens,
        "prompt": PROMPT,
        "rows": [original, *(row(trial) for trial in trials)],
    }


def row(trial: Trial) -> dict[str, Any]:
    """One quantized model's line of the table."""
    measured = trial.result.divergence
    assert measured is not None
    return {
        "name": METHODS[trial.method],
        "perplexity": trial.result.perplexity,
        "kl": measured.kl,
        "top1_agreement": measured.top1_agreement,
        "bits_per_weight": trial.report.bits_per_weight,
        "bytes": trial.report.output_bytes,
        "seconds": trial.report.seconds,
        "text": trial.text,
    }


def draw(console: "Console", value: dict[str, Any], output: Path | None) -> None:
    """Table, texts and what to do next, for people."""
    from rich.table import Table

    millions, tokens = value["parameters"] / 1e6, value["scored_tokens"]
    console.print(f"The model inside the package ({millions:.2f} M parameters) on {tokens:,} tokens new to it:\n")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for heading in ("perplexity", "KL", "same top-1", "bits/weight", "file", "seconds"):
        table.add_column(heading, justify="right")
    for line in value["rows"]:
        table.add_row(
            line["name"],
            f"{line['perplexity']:.2f}",
            f"{line['kl']:.4f}",
            f"{line['top1_agreement']:.1%}",
            f"{line['bits_per_weight']:.2f}",
            size(line["bytes"]),
            "" if line["seconds"] is None else f"{line['seconds']:.1f}",
        )
    console.print(table)
    console.print(f"\n{LEGEND}")
    for line in value["rows"]:
        console.print(f"\n{line['name']}:", style="bold")
        text = " ".join(f"{value['prompt']}{line['text']}".split())
        console.print(printable(text))
    if output is not None:
        console.print(f"\nThe quantized models are in {printable(str(output))}: rtn, awq and gptq.", soft_wrap=True)
    console.print("\nNow with a model of yours:  cann-llm-quant quantize MODEL -o FOLDER")
