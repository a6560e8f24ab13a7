"""How `evaluate` writes its results: a table for people, plain values for machines."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cann_llm_quant.cli.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console

    from cann_llm_quant.evaluate.choices import Measure, TaskResult


def plain(result: "TaskResult") -> dict[str, Any]:
    """A task's result as JSON values."""

    def measures(metrics: "Mapping[Any, Measure]") -> dict[str, Any]:
        return {name: asdict(measure) for name, measure in metrics.items()}

    groups = {
        kind: {name: measures(metrics) for name, metrics in found.items()}
        for kind, found in (("categories", result.categories), ("subjects", result.subjects))
        if found
    }
    data = result.data
    facts = {
        "questions": len(data.items),
        "source": data.source,
        "fewshot": data.shots,
        "questions_sha256": data.sha256,
    }
    return {**facts, "chance": result.chance, "metrics": measures(result.metrics), **groups}


def draw(console: "Console", results: "Sequence[TaskResult]") -> None:
    """The table for people: a line for each metric, categories below their task."""
    from rich.table import Table

    compared = any(measure.paired for result in results for measure in result.metrics.values())
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("task", "metric"):
        table.add_column(heading)
    for heading in ("questions", "value", *(("reference", "difference", "lost", "gained", "p") if compared else ())):
        table.add_column(heading, justify="right")
    for result in results:
        name = result.data.task.name
        for number, (metric, measure) in enumerate(result.metrics.items()):
            table.add_row("" if number else name, *cells(metric, measure))
        for category, metrics in result.categories.items():
            for metric, measure in metrics.items():
                table.add_row(f"  {category}", *cells(metric, measure))
    console.print(table)
    console.print()
    for result in results:
        data = result.data
        guess = "" if result.chance is None else f", guessing gives {result.chance:.1%}"
        shots = f", {data.shots} examples" if data.shots else ""
        console.print(f"{data.task.name}: {printable(data.source)}{shots}{guess}", soft_wrap=True)
    if compared:
        console.print("± is one standard error; p: how often chance alone would give such a difference.")


def cells(metric: str, measure: "Measure") -> list[str]:
    """A metric's cells: accuracies in percent, perplexities as numbers."""
    share = metric != "perplexity"

    def written(value: float, error: float | None, sign: str = "") -> str:
        if not share and abs(value) >= 1e5:
            return f"{value:{sign}.3g}"
        factor, digits = (100.0, 1) if share else (1.0, 2)
        margin = "" if error is None else f" ± {factor * error:.{digits}f}"
        return f"{factor * value:{sign}.{digits}f}{margin}{'%' if share and not sign else ''}"

    line = [metric, str(measure.questions), written(measure.value, measure.stderr)]
    paired = measure.paired
    if paired is not None:
        flips = ["" if count is None else str(count) for count in (paired.lost, paired.gained)]
        chance = "" if paired.p_value is None else f"{paired.p_value:.2g}"
        line += [written(paired.reference, None), written(paired.difference, paired.stderr, "+"), *flips, chance]
    return line


def known_tasks() -> list[dict[str, Any]]:
    """The known tasks, for machines."""
    from cann_llm_quant.evaluate.tasks import TASKS

    return [
        {"name": task.name, "about": task.about, "dataset": task.dataset, "subset": task.subset, "split": task.split}
        | {"metrics": list(task.metrics), "subjects": len(task.subject_table())}
        for task in TASKS.values()
    ]


def draw_known(console: "Console") -> None:
    """The known tasks, for people."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("task", "what is asked", "hub dataset", "split", "metrics"):
        table.add_column(heading)
    for task in known_tasks():
        place = f"{task['dataset']} {task['subset']}" if task["subset"] else task["dataset"]
        table.add_row(task["name"], task["about"], place, task["split"], ", ".join(task["metrics"]))
    console.print(table)
