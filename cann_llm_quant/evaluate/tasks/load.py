"""Questions of a task, from a local folder or the hub, as items with their examples.

Local: `TASK*.jsonl` (or .json, .csv, .parquet, each also .gz), prepared rows or rows as the hub's dataset has them.
A file's split is the first word behind the task's name that is one (`arc_easy_test.jsonl`), or its rows' `split`;
of several files that could be evaluated the task's own split is preferred, then uncompressed ones, then by name.

`limit` takes the first questions, of each subject where there are several, as the harness does. Examples are drawn
by one random generator over the questions in order (Python's `random`, seed 1234 by default: the harness's own), or
are the first ones where the task says so; a question is never its own example.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from cann_llm_quant.corpus.hub import hub_rows
from cann_llm_quant.corpus.readers import Row, read_rows
from cann_llm_quant.corpus.sources import ROW_ENDINGS, CorpusSource, ending
from cann_llm_quant.errors import CorpusError, UsageError
from cann_llm_quant.evaluate.tasks.items import Item, Question, items_sha256
from cann_llm_quant.evaluate.tasks.rows import LETTERS, is_prepared, prepared
from cann_llm_quant.evaluate.tasks.table import Task
from cann_llm_quant.shown import shown

SPLITS = {"test": "test", "val": "validation", "validation": "validation", "dev": "dev", "train": "train"}
EVALUATED = ("test", "validation", "dev", "train")  # which local file is rather evaluated ...
EXAMPLES = ("train", "dev", "validation", "test")  # ... and which gives examples
SEED = 1234


@dataclass(frozen=True)
class TaskData:
    """A task's items, examples included, and where they come from."""

    task: Task
    items: tuple[Item, ...]
    source: str
    shots: int
    sha256: str


def load_task(
    task: Task, data: Path | None = None, *, limit: int | None = None, shots: int = 0, seed: int = SEED
) -> TaskData:
    """The items of a task, from the folder or file `data` or (None) from the hub.

    Raises UsageError for numbers that cannot be, CorpusError when data are missing or wrong, naming file and line.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"--limit {limit} must be at least 1")
    if shots < 0:
        raise UsageError(f"--fewshot {shots} must not be negative")
    source, found, examples = _hub(task, limit, shots) if data is None else _local(task, data, shots)
    items = _limited(task, found, limit)
    if not items:
        raise CorpusError(f"{source} holds no question of {task.name}")
    if shots or task.preamble:
        items = with_examples(task, items, examples, shots, seed)
    return TaskData(task, tuple(items), source, shots, items_sha256(items))


def to_item(task: Task, question: Question, name: str) -> Item:
    """The question in the task's words, without examples."""
    parts = dict(question.parts)
    choices = question.choices
    if task.letters:
        if len(choices) > len(LETTERS):
            raise CorpusError(f"{name}: {len(choices)} choices are more than the letters {LETTERS}")
        parts["question"] = parts["question"].strip()
        parts["options"] = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, choices, strict=False))
        choices = tuple(LETTERS[: len(choices)])
    if question.contexts:
        contexts, choices = question.contexts, choices * len(question.contexts)
    else:
        prompt = parts["context"] if "context" in parts else task.prompt.format(**parts)
        contexts = (prompt,) * len(choices)
    continuations = tuple(task.delimiter + choice for choice in choices)
    answer = question.answer
    # The harness puts its delimiter before an example's answer, and a completion's answer begins with a space itself.
    gap = task.delimiter if task.completion else ""
    return Item(
        name=name,
        contexts=contexts,
        continuations=continuations,
        lengths=tuple(map(len, choices)),
        answer=answer,
        solved=f"{contexts[answer]}{gap}{continuations[answer]}",
        subject=question.subject,
    )


def _hub(task: Task, limit: int | None, shots: int) -> tuple[str, Iterable[Item], list[Item]]:
    wanted: tuple[str | None, ...] = tuple(task.subject_table()) or (None,)

    def items(split: str, most: int | None) -> Iterator[Item]:
        for subject in wanted:
            source = CorpusSource(task.dataset, subset=subject or task.subset)
            for row in islice(hub_rows(source, split, seed=None, buffer=1), most):
                yield to_item(task, replace(task.read(row), subject=subject), row.place)

    pool_split = task.shots_split or task.split
    pool = list(items(pool_split, shots if task.first_shots else None)) if shots else []
    return f"{task.dataset} [{task.split}]", items(task.split, limit), pool


def _local(task: Task, data: Path, shots: int) -> tuple[str, Iterable[Item], list[Item]]:
    files = _files(task, data)
    splits = {file: _split_of(task, file) for file in files}
    asked = _preferred(task, files, splits)
    others = [file for file in files if splits[file] != splits[asked]]
    others.sort(key=lambda file: EXAMPLES.index(splits[file]))
    pool = list(_local_items(task, others[0] if others else asked)) if shots else []
    return str(asked), _local_items(task, asked), pool


def _files(task: Task, data: Path) -> list[Path]:
    if data.is_file():
        if ending(data) not in ROW_ENDINGS:
            raise CorpusError(f"{data} holds no rows: its name must end in one of {', '.join(ROW_ENDINGS)} (or .gz)")
        return [data]
    if not data.is_dir():
        raise CorpusError(f"there is no folder or file {data} with questions")
    files = [file for file in sorted(data.iterdir()) if ending(file) in ROW_ENDINGS and _belongs(task, file)]
    if not files:
        raise CorpusError(
            f"{data} holds no questions of {task.name}: no file {task.name}*.jsonl (or .json, .csv, .parquet, .gz)"
        )
    return files


def _belongs(task: Task, file: Path) -> bool:
    stem = file.name.split(".")[0]
    return stem == task.name or stem.startswith(f"{task.name}_")


def _split_of(task: Task, file: Path) -> str:
    words = file.name.split(".")[0].removeprefix(task.name).split("_")
    named = [SPLITS[word] for word in words if word in SPLITS]
    if named:
        return named[0]
    first = next(iter(read_rows(file)), None)
    value = first.values.get("split") if first is not None else None
    return SPLITS.get(str(value), "test")


def _preferred(task: Task, files: Sequence[Path], splits: dict[Path, str]) -> Path:
    wanted = (SPLITS[task.split], *EVALUATED)
    return min(files, key=lambda file: (wanted.index(splits[file]), file.name.endswith(".gz"), file.name))


def _local_items(task: Task, file: Path) -> Iterator[Item]:
    for row in read_rows(file):
        yield to_item(task, _question(task, row), row.place)


def _question(task: Task, row: Row) -> Question:
    question = prepared(row, task.letters) if is_prepared(row) else task.read(row)
    alternatives = len(question.contexts or question.choices)
    if (alternatives == 1) != task.completion:
        raise CorpusError(f"{row.place} is no question of {task.name}: it has {alternatives} choices")
    return question


def _limited(task: Task, items: Iterable[Item], limit: int | None) -> list[Item]:
    if not task.subjects:
        return list(islice(items, limit))
    table = task.subject_table()
    taken: Counter[str | None] = Counter()
    kept = []
    for item in items:
        if item.subject not in table:
            raise CorpusError(f"{item.name}: {shown(item.subject)} is not a subject of {task.name}")
        taken[item.subject] += 1
        if limit is None or taken[item.subject] <= limit:
            kept.append(item)
    return kept


def with_examples(task: Task, items: list[Item], pool: Sequence[Item], shots: int, seed: int) -> list[Item]:
    """The items behind the task's preamble and `shots` solved ones."""
    generator = random.Random(seed)
    # Where the harness may meet the question itself among the examples, it draws one more and takes it out.
    spare = int(task.split != "test" or pool[:1] == items[:1])
    table = task.subject_table()
    ready = []
    for item in items:
        examples = _examples(task, item, pool, shots, spare, generator) if shots else []
        subject = table[item.subject][0] if item.subject else ""
        before = task.preamble.format(subject=subject) + "".join(f"{example.solved}\n\n" for example in examples)
        ready.append(replace(item, contexts=tuple(before + context for context in item.contexts)))
    return ready


def _examples(
    task: Task, item: Item, pool: Sequence[Item], shots: int, spare: int, generator: random.Random
) -> list[Item]:
    if task.first_shots:
        same = (other for other in pool if other.subject == item.subject and other.solved != item.solved)
        examples = list(islice(same, shots))
    else:
        drawn = generator.sample(pool, min(shots + spare, len(pool)))
        examples = [other for other in drawn if not spare or other.solved != item.solved][:shots]
    if len(examples) < shots:
        raise UsageError(f"--fewshot {shots} is more than the {len(examples)} examples that there are for {item.name}")
    return examples
