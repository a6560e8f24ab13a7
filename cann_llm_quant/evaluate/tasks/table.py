"""The tasks as data: prompts, choices and metrics as EleutherAI's lm-evaluation-harness 0.4 has them.

The first metric of a task is the one by which it is usually quoted and that `--max-drop` judges. `acc_norm` divides
a choice's log-likelihood by its length in characters. COPA's two spaces before a choice are the harness's.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from cann_llm_quant.errors import UsageError
from cann_llm_quant.evaluate.tasks import rows

Metric = Literal["acc", "acc_norm", "perplexity"]
QUESTION = "Question: {question}\nAnswer:"


@dataclass(frozen=True)
class Task:
    """One task.

    `split` of `dataset` is evaluated; examples come from `shots_split`, the first ones in order if `first_shots`.
    `subjects` names the table of a task with several, each a subset of the dataset with a `preamble`. With `letters`
    the choices are written below the question as `{options}` and their letters are scored.
    """

    name: str
    about: str
    dataset: str
    subset: str | None
    split: str
    shots_split: str | None
    read: rows.Reader
    prompt: str = "{context}"
    delimiter: str = " "
    metrics: tuple[Metric, ...] = ("acc", "acc_norm")
    letters: bool = False
    subjects: str | None = None
    preamble: str = ""
    first_shots: bool = False

    @property
    def completion(self) -> bool:
        """Whether a word is to be written rather than one of several choices to be picked."""
        return "perplexity" in self.metrics

    def subject_table(self) -> Mapping[str, tuple[str, str]]:
        """Written name and category of each subject; empty where there are none."""
        return _subjects(self.subjects) if self.subjects else {}


@cache
def _subjects(table: str) -> Mapping[str, tuple[str, str]]:
    text = (files("cann_llm_quant.evaluate.tasks") / "subjects.json").read_text(encoding="utf-8")
    return {subject: (name, category) for subject, (name, category) in json.loads(text)[table].items()}


def _exam(name: str, about: str, dataset: str, split: str, read: rows.Reader, preamble: str, end: str) -> Task:
    """A task of many subjects whose four choices are letters; examples are the first of `dev`, in order."""
    return Task(
        name,
        about,
        dataset,
        None,
        split,
        "dev",
        read,
        prompt="{question}\n{options}\n" + end,
        metrics=("acc",),
        letters=True,
        subjects=name,
        preamble=preamble,
        first_shots=True,
    )


_ALL = (
    Task("arc_easy", "school science, easy", "allenai/ai2_arc", "ARC-Easy", "test", "train", rows.labelled, QUESTION),
    Task(
        "arc_challenge",
        "school science, hard",
        "allenai/ai2_arc",
        "ARC-Challenge",
        "test",
        "train",
        rows.labelled,
        QUESTION,
        metrics=("acc_norm", "acc"),
    ),
    Task(
        "hellaswag",
        "how a scene goes on",
        "Rowan/hellaswag",
        None,
        "validation",
        "train",
        rows.hellaswag,
        metrics=("acc_norm", "acc"),
    ),
    Task("piqa", "how things are done", "baber/piqa", None, "validation", "train", rows.piqa, QUESTION),
    Task(
        "winogrande",
        "who a pronoun means",
        "allenai/winogrande",
        "winogrande_xl",
        "validation",
        "train",
        rows.winogrande,
        metrics=("acc",),
    ),
    Task(
        "boolq",
        "yes or no from a passage",
        "aps/super_glue",
        "boolq",
        "validation",
        "train",
        rows.boolq,
        "{passage}\nQuestion: {question}?\nAnswer:",
        metrics=("acc",),
    ),
    Task(
        "sciq",
        "science from a passage",
        "allenai/sciq",
        None,
        "test",
        "train",
        rows.sciq,
        "{passage}\n" + QUESTION,
    ),
    Task(
        "openbookqa",
        "elementary science",
        "allenai/openbookqa",
        "main",
        "test",
        "train",
        rows.openbookqa,
        "{question}",
        metrics=("acc_norm", "acc"),
    ),
    Task(
        "copa",
        "cause and effect",
        "aps/super_glue",
        "copa",
        "validation",
        "train",
        rows.copa,
        delimiter="  ",
        metrics=("acc",),
    ),
    Task(
        "commonsense_qa",
        "common sense, five letters",
        "tau/commonsense_qa",
        None,
        "validation",
        "train",
        rows.labelled,
        "Question: {question}\n{options}\nAnswer:",
        metrics=("acc",),
        letters=True,
    ),
    Task(
        "lambada_openai",
        "the last word of a passage",
        "EleutherAI/lambada_openai",
        "default",
        "test",
        None,
        rows.lambada,
        metrics=("acc", "perplexity"),
    ),
    _exam(
        "mmlu",
        "57 subjects, English",
        "cais/mmlu",
        "test",
        rows.indexed,
        "The following are multiple choice questions (with answers) about {subject}.\n\n",
        "Answer:",
    ),
    _exam(
        "ceval",
        "52 subjects, Chinese",
        "ceval/ceval-exam",
        "val",
        rows.lettered,
        "以下是中国关于{subject}的单项选择题，请选出其中的正确答案。\n\n",
        "答案：",
    ),
    _exam(
        "cmmlu",
        "67 subjects, Chinese",
        "haonan-li/cmmlu",
        "test",
        rows.lettered,
        "以下是关于{subject}的单项选择题，请直接给出正确答案的选项。\n\n",
        "答案：",
    ),
)
TASKS: Mapping[str, Task] = {task.name: task for task in _ALL}


def find_tasks(names: Sequence[str]) -> list[Task]:
    """The tasks of these names, each once, in their order. Raises UsageError that lists the known ones."""
    unknown = [name for name in names if name not in TASKS]
    if unknown or not names:
        what = f"unknown task {', '.join(map(repr, unknown))}" if unknown else "no task was named"
        raise UsageError(f"{what}; known are {', '.join(TASKS)}")
    return [TASKS[name] for name in dict.fromkeys(names)]
