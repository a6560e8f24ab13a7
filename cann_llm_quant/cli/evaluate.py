"""`evaluate`: accuracy on multiple-choice and completion tasks and, with `--reference`, what quantizing cost."""

import json as json_format
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cann_llm_quant.cli.evaluate_table import draw, draw_known, known_tasks, plain
from cann_llm_quant.cli.options import (
    MODEL_HELP,
    AllowPickle,
    Debug,
    Device,
    Dtype,
    Json,
    Reference,
    ReferenceRevision,
    Revision,
)
from cann_llm_quant.cli.progress import Progress, Step, show_progress
from cann_llm_quant.cli.terminal import Reply
from cann_llm_quant.errors import InputError, UsageError

if TYPE_CHECKING:
    from cann_llm_quant.evaluate.choices import Answer, TaskResult
    from cann_llm_quant.evaluate.tasks import TaskData

THRESHOLDS = "Thresholds (exit code 1 when missed)"
DATA = "Questions"


@dataclass(frozen=True)
class Subject:
    """A model to be evaluated: where it is and how it is opened and run."""

    model: str
    revision: str | None
    allow_pickle: bool
    device: str
    dtype: str
    batch_tokens: int


def evaluate(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)] = None,
    tasks: Annotated[
        str, typer.Option("--tasks", metavar="NAMES", help="Names with commas between; --list-tasks shows all.")
    ] = "",
    reference: Reference = None,
    reference_revision: ReferenceRevision = None,
    batch_tokens: Annotated[
        int, typer.Option("--batch-tokens", metavar="N", min=1, help="Distinct tokens computed in one pass.")
    ] = 512,
    items: Annotated[
        Path | None,
        typer.Option("--items", metavar="FILE", help="Write every question's scores there, as JSON lines."),
    ] = None,
    list_tasks: Annotated[bool, typer.Option("--list-tasks", help="Show the known tasks and stop.")] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", metavar="PLACE", help="Folder of TASK*.jsonl, or a file. [default: the hub]", rich_help_panel=DATA
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", metavar="N", help="The first N questions, of each subject. [default: all]", rich_help_panel=DATA
        ),
    ] = None,
    fewshot: Annotated[
        int, typer.Option("--fewshot", metavar="K", help="Solved examples before a question.", rich_help_panel=DATA)
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Picks the examples.", rich_help_panel=DATA)] = 1234,
    max_drop: Annotated[
        str | None,
        typer.Option(
            "--max-drop",
            metavar="SHARE",
            help="Of accuracy, such as 1%: one question in 100.",
            rich_help_panel=THRESHOLDS,
        ),
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = "fp32",
    revision: Revision = None,
    allow_pickle: AllowPickle = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Measure accuracy on multiple-choice and completion tasks.

    With a reference, both answer the same questions and the difference is tested. Prompts and metrics are those of
    lm-evaluation-harness.
    """
    from cann_llm_quant.evaluate.report import parse_fraction
    from cann_llm_quant.evaluate.tasks import find_tasks, load_task

    reply = Reply(json)
    if list_tasks:
        reply.result({"tasks": known_tasks()}, draw_known)
        return 0
    check_request(model, reference, reference_revision, max_drop, items)
    most = None if max_drop is None else parse_fraction(max_drop, "--max-drop", 1.0)
    wanted = find_tasks([name.strip() for name in tasks.split(",") if name.strip()])
    if data is not None and data.is_file() and len(wanted) > 1:
        raise UsageError(f"--data {data} is one file and {len(wanted)} tasks are asked for; give a folder")
    loaded = [load_task(task, data, limit=limit, shots=fewshot, seed=seed) for task in wanted]
    subjects = [Subject(str(model), revision, allow_pickle, device, dtype, batch_tokens)]
    if reference is not None:
        subjects.append(Subject(reference, reference_revision, allow_pickle, device, dtype, batch_tokens))
    answers = answer_all(subjects, loaded)
    if items is not None:
        write_items(items, loaded, answers)
    results = summarize_all(loaded, answers)
    missed = [] if most is None else missed_drops(results, most)
    value: dict[str, Any] = {"model": model, "reference": reference, "dtype": dtype, "limit": limit, "seed": seed}
    value |= {"tasks": {result.data.task.name: plain(result) for result in results}}
    value |= {"missed": missed, "exit_code": 1} if missed else {}
    reply.result(value, lambda console: draw(console, results), status="failed" if missed else "ok")
    for sentence in missed:
        reply.note(f"error: {sentence}")
    return 1 if missed else 0


def check_request(
    model: str | None, reference: str | None, reference_revision: str | None, max_drop: str | None, items: Path | None
) -> None:
    """Refuse what cannot be meant, before anything is read. Raises UsageError."""
    if model is None:
        raise UsageError("no model was named; write `cann-llm-quant evaluate MODEL --tasks NAMES`")
    if reference is None and max_drop is not None:
        raise UsageError("--max-drop compares with a reference model; add --reference MODEL")
    if reference is None and reference_revision is not None:
        raise UsageError("--reference-revision is of a reference model; add --reference MODEL")
    if items is not None and (items.is_dir() or not items.absolute().parent.is_dir()):
        raise UsageError(f"--items {items} is no file in an existing folder")


def answer_all(subjects: Sequence[Subject], loaded: "Sequence[TaskData]") -> "list[list[list[Answer]]]":
    """Answers of each model to each task's items; one model is in memory at a time."""
    with show_progress("tokens") as progress:
        return [answer_one(subject, loaded, progress, number, len(subjects)) for number, subject in enumerate(subjects)]


def answer_one(
    subject: Subject, loaded: "Sequence[TaskData]", progress: Progress, number: int, models: int
) -> "list[list[Answer]]":
    """Answers of one model; progress assumes that every model has as many tokens to compute as this one."""
    from cann_llm_quant.evaluate.choices import answer_items, encode_items
    from cann_llm_quant.evaluate.loglikelihood import Encoder, Scorer
    from cann_llm_quant.runner.engine import LLMEngine

    engine = LLMEngine(
        subject.model,
        device=subject.device,
        dtype=subject.dtype,
        revision=subject.revision,
        allow_pickle=subject.allow_pickle,
    )
    encoder, scorer = Encoder(engine.tokenizer), Scorer(engine.model, engine.max_context, subject.batch_tokens)
    requests = [encode_items(data.items, encoder) for data in loaded]
    costs = [scorer.cost(asked) for asked in requests]
    done = number * sum(costs)

    def counter(task: str) -> Callable[[int], None]:
        def count(tokens: int) -> None:
            nonlocal done
            done = min(done + tokens, (number + 1) * sum(costs))
            progress(Step(f"reference {task}" if number else task, done, models * sum(costs)))

        return count

    answered = []
    for data, asked, cost in zip(loaded, requests, costs, strict=True):
        before = done
        answered.append(answer_items(data.items, asked, scorer, counter(data.task.name)))
        done = before + cost
    return answered


def summarize_all(loaded: "Sequence[TaskData]", answers: "Sequence[Sequence[list[Answer]]]") -> "list[TaskResult]":
    """Results of the first model's answers, beside the second's if there is one."""
    from cann_llm_quant.evaluate.choices import summarize

    references = answers[1] if len(answers) > 1 else [None] * len(loaded)
    return [summarize(data, ours, theirs) for data, ours, theirs in zip(loaded, answers[0], references, strict=True)]


def missed_drops(results: "Sequence[TaskResult]", most: float) -> list[str]:
    """A sentence for every task whose first metric fell by more than `most`."""
    sentences = []
    for result in results:
        metric, measure = next(iter(result.metrics.items()))
        paired = measure.paired
        if paired is not None and -paired.difference > most + 1e-12:
            chance = "" if paired.p_value is None else f"; p = {paired.p_value:.2g}"
            sentences.append(
                f"{result.data.task.name}: {metric} fell by {-paired.difference:.2%} ({paired.reference:.2%} to "
                f"{measure.value:.2%}), more than --max-drop {most:.2%} ({measure.questions} questions{chance})"
            )
    return sentences


def write_items(path: Path, loaded: "Sequence[TaskData]", answers: "Sequence[Sequence[list[Answer]]]") -> None:
    """One line for every question: its place, the right choice, and each model's log-likelihoods and greedy hits."""
    models = ("model", "reference")[: len(answers)]
    try:
        with open(path, "w", encoding="utf-8") as file:
            for number, data in enumerate(loaded):
                for index, item in enumerate(data.items):
                    line: dict[str, Any] = {"task": data.task.name, "item": item.name, "answer": item.answer}
                    for name, answered in zip(models, answers, strict=True):
                        scores = answered[number][index].scores
                        line[name] = {
                            "logprobs": [score.logprob for score in scores],
                            "greedy": [score.greedy for score in scores],
                        }
                    file.write(json_format.dumps(line, ensure_ascii=False) + "\n")
    except OSError as error:
        raise InputError(f"--items {path} cannot be written: {error.strerror or error}") from error
