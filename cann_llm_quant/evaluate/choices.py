"""Questions answered by log-likelihood: scores in, accuracies with their errors out.

    acc         the likeliest continuation is the right one (a completion: greedy decoding writes it)
    acc_norm    the same with every log-likelihood divided by its choice's length in characters
    perplexity  exp(-mean log-likelihood) of completions; standard error by the delta method

Ties go to the first choice. Accuracies over subjects weigh every question alike; their error is pooled within
subjects, sqrt(sum n_i (n_i - 1) se_i^2 / (n - subjects) / n), as the harness does.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cann_llm_quant.errors import NonFiniteResultError
from cann_llm_quant.evaluate.loglikelihood import Encoder, Request, Score, Scorer
from cann_llm_quant.evaluate.paired import Paired, mean_stderr, paired_answers, paired_perplexity, perplexity
from cann_llm_quant.evaluate.tasks import Item, TaskData
from cann_llm_quant.evaluate.tasks.table import Metric


@dataclass(frozen=True)
class Answer:
    """A model's scores of an item's continuations, in their order."""

    item: Item
    scores: tuple[Score, ...]

    def value(self, metric: Metric) -> float:
        """1 or 0 for the accuracies; the log-likelihood for perplexity."""
        logprobs = [score.logprob for score in self.scores]
        if metric == "perplexity":
            return logprobs[0]
        if len(self.scores) == 1:
            return float(self.scores[0].greedy)
        if metric == "acc_norm":
            logprobs = [logprob / length for logprob, length in zip(logprobs, self.item.lengths, strict=True)]
        return float(logprobs.index(max(logprobs)) == self.item.answer)


@dataclass(frozen=True)
class Measure:
    """A metric over some questions; `paired` where a reference answered them too."""

    value: float
    stderr: float | None
    questions: int
    paired: Paired | None = None


@dataclass(frozen=True)
class TaskResult:
    """Metrics of a task, the usual one first, and by category and subject where there are several."""

    data: TaskData
    metrics: Mapping[Metric, Measure]
    categories: Mapping[str, Mapping[Metric, Measure]]
    subjects: Mapping[str, Mapping[Metric, Measure]]

    @property
    def chance(self) -> float | None:
        """Accuracy of guessing; None for completions."""
        if self.data.task.completion:
            return None
        return math.fsum(1 / len(item.continuations) for item in self.data.items) / len(self.data.items)


def encode_items(items: Sequence[Item], encoder: Encoder) -> list[Request]:
    """Every continuation of every item, in order."""
    return [
        encoder.request(context, continuation, item.name)
        for item in items
        for context, continuation in zip(item.contexts, item.continuations, strict=True)
    ]


def answer_items(
    items: Sequence[Item],
    requests: Sequence[Request],
    scorer: Scorer,
    progress: Callable[[int], None] = lambda tokens: None,
) -> list[Answer]:
    """Score the items' requests (of `encode_items`); `progress` gets tokens computed since its last call.

    Raises NonFiniteResultError where the model gives NaN or infinity.
    """
    scores = iter(scorer.score(requests, progress))
    return [Answer(item, tuple(next(scores) for _ in item.continuations)) for item in items]


def summarize(data: TaskData, answers: Sequence[Answer], reference: Sequence[Answer] | None = None) -> TaskResult:
    """Metrics of the answers to all items of a task, beside a reference's answers to the same items."""
    table = data.task.subject_table()
    by_subject: dict[str, list[int]] = {}
    by_category: dict[str, list[int]] = {}
    for index, item in enumerate(data.items):
        if item.subject is not None and table:
            by_subject.setdefault(item.subject, []).append(index)
            by_category.setdefault(table[item.subject][1], []).append(index)

    def measured(indices: Sequence[int]) -> dict[Metric, Measure]:
        ours = [answers[i] for i in indices]
        theirs = None if reference is None else [reference[i] for i in indices]
        return {metric: _measure(metric, ours, theirs) for metric in data.task.metrics}

    return TaskResult(
        data,
        measured(range(len(answers))),
        {name: measured(indices) for name, indices in sorted(by_category.items())},
        {name: measured(indices) for name, indices in sorted(by_subject.items())},
    )


def _measure(metric: Metric, answers: Sequence[Answer], reference: Sequence[Answer] | None) -> Measure:
    values = [answer.value(metric) for answer in answers]
    others = None if reference is None else [answer.value(metric) for answer in reference]
    if metric == "perplexity":
        value = perplexity(values)
        if not math.isfinite(value):
            raise NonFiniteResultError(
                "perplexity overflows: the right words are all but impossible to this model; "
                "check the weights with `cann-llm-quant inspect --scan`"
            )
        _, error = mean_stderr(values)
        stderr = None if error is None else value * error
        return Measure(value, stderr, len(values), None if others is None else paired_perplexity(others, values))
    value = math.fsum(values) / len(values)
    stderr = _pooled_stderr(values, [answer.item.subject for answer in answers])
    return Measure(value, stderr, len(values), None if others is None else paired_answers(others, values))


def _pooled_stderr(values: Sequence[float], subjects: Sequence[str | None]) -> float | None:
    groups: dict[str | None, list[float]] = {}
    for value, subject in zip(values, subjects, strict=True):
        groups.setdefault(subject, []).append(value)
    freedom = len(values) - len(groups)
    if not freedom:
        return None
    squares = math.fsum(math.fsum((v - math.fsum(g) / len(g)) ** 2 for v in g) for g in groups.values())
    return math.sqrt(squares / freedom / len(values))
