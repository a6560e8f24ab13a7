"""Scores to accuracies, by hand: normalization, ties, errors, subjects, pairs."""

import math

import pytest

from cann_llm_quant.errors import NonFiniteResultError
from cann_llm_quant.evaluate.choices import Answer, encode_items, summarize
from cann_llm_quant.evaluate.loglikelihood import Encoder, Request, Score
from cann_llm_quant.evaluate.tasks import TASKS, Item, TaskData


def item(choices: tuple[str, ...], answer: int, subject: str | None = None) -> Item:
    continuations = tuple(f" {choice}" for choice in choices)
    return Item("item", ("?",) * len(choices), continuations, tuple(map(len, choices)), answer, "", subject)


def answered(asked: Item, *logprobs: float, greedy: bool = False) -> Answer:
    return Answer(asked, tuple(Score(logprob, greedy) for logprob in logprobs))


def data(name: str, answers: list[Answer]) -> TaskData:
    return TaskData(TASKS[name], tuple(answer.item for answer in answers), "here", 0, "")


def test_the_norm_divides_by_characters() -> None:
    """-6 / 6 = -1 beats -4 / 2 = -2; of Chinese, characters count and not bytes."""
    answer = answered(item(("ab", "abcdef"), 1), -4.0, -6.0)
    assert (answer.value("acc"), answer.value("acc_norm")) == (0.0, 1.0)
    chinese = answered(item(("一二", "abcd"), 0), -4.0, -9.0)
    assert chinese.value("acc_norm") == 1.0


def test_a_tie_goes_to_the_first_choice() -> None:
    assert answered(item(("a", "b"), 0), -1.0, -1.0).value("acc") == 1.0
    assert answered(item(("a", "b"), 1), -1.0, -1.0).value("acc") == 0.0


def test_accuracy_and_its_error() -> None:
    asked = item(("a", "b"), 0)
    answers = [answered(asked, -1.0, -2.0)] * 3 + [answered(asked, -2.0, -1.0)]
    result = summarize(data("sciq", answers), answers)
    measure = result.metrics["acc"]
    assert (measure.value, measure.questions, measure.paired) == (0.75, 4, None)
    assert measure.stderr == pytest.approx(math.sqrt(0.75 * 0.25 / 3))
    assert result.chance == 0.5
    assert list(result.metrics) == ["acc", "acc_norm"]
    one = summarize(data("sciq", answers[:1]), answers[:1]).metrics["acc"]
    assert (one.value, one.stderr) == (1.0, None)


def test_completions_count_greedy_hits_and_perplexity() -> None:
    asked = item(("word",), 0)
    answers = [answered(asked, -1.0, greedy=True), answered(asked, -3.0)]
    result = summarize(data("lambada_openai", answers), answers)
    assert result.metrics["acc"].value == 0.5
    assert result.metrics["perplexity"].value == pytest.approx(math.exp(2.0))
    assert result.metrics["perplexity"].stderr == pytest.approx(math.exp(2.0) * 1.0)  # s = sqrt 2, over sqrt 2
    assert result.chance is None


def test_c74_a_perplexity_that_overflows_is_no_number() -> None:
    answers = [answered(item(("word",), 0), -1e4)] * 2
    with pytest.raises(NonFiniteResultError, match="perplexity overflows"):
        summarize(data("lambada_openai", answers), answers)


def test_subjects_are_pooled_and_grouped() -> None:
    """Errors are pooled within subjects: sum of squares 2/3 + 1/2, 5 - 2 degrees of freedom."""
    right, wrong = (-1.0, -2.0), (-2.0, -1.0)
    answers = [answered(item(("A", "B"), 0, "anatomy"), *logprobs) for logprobs in (right, right, wrong)]
    answers += [answered(item(("A", "B"), 0, "virology"), *logprobs) for logprobs in (right, wrong)]
    result = summarize(data("mmlu", answers), answers)
    assert result.metrics["acc"].value == pytest.approx(3 / 5)
    assert result.metrics["acc"].stderr == pytest.approx(math.sqrt((2 / 3 + 1 / 2) / 3 / 5))
    assert {name: found["acc"].value for name, found in result.categories.items()} == {"stem": 2 / 3, "other": 0.5}
    assert {name: found["acc"].questions for name, found in result.subjects.items()} == {"anatomy": 3, "virology": 2}


def test_the_reference_answers_the_same_questions() -> None:
    asked = item(("a", "b"), 0)
    right, wrong = answered(asked, -1.0, -2.0), answered(asked, -2.0, -1.0)
    result = summarize(data("sciq", [right] * 4), [right, wrong, wrong, right], [right, right, right, wrong])
    paired = result.metrics["acc"].paired
    assert paired is not None
    assert (paired.lost, paired.gained, paired.reference, paired.difference) == (2, 1, 0.75, -0.25)


def test_every_continuation_is_one_request() -> None:
    class Words(Encoder):
        def __init__(self) -> None:
            pass

        def request(self, context: str, continuation: str, place: str = "request") -> Request:
            return Request((len(context),), tuple(map(ord, continuation)), place)

    requests = encode_items([item(("a", "b"), 0), item(("c", "d", "e"), 0)], Words())
    assert [chr(request.continuation[1]) for request in requests] == list("abcde")
    assert {request.place for request in requests} == {"item"}
