"""Paired statistics against scipy's published numbers, and by hand."""

import math

import pytest

from cann_llm_quant.evaluate.paired import mcnemar, mean_stderr, paired_answers, paired_perplexity


@pytest.mark.parametrize(
    ("lost", "gained", "p"),
    [  # scipy.stats.binomtest(min, lost + gained, 0.5).pvalue; the first is Fagerland et al. 2013, table 2
        (1, 7, 0.0703125),
        (9, 1, 0.021484375),
        (5, 5, 1.0),
        (0, 0, 1.0),
        (0, 3, 0.25),
        (59, 6, 4.964650327128616e-12),
        (120, 80, 0.005685155996750306),
        (1100, 1000, 0.03072070786424249),
    ],
)
def test_mcnemar_is_the_exact_two_sided_binomial(lost, gained, p) -> None:
    assert mcnemar(lost, gained) == pytest.approx(p, rel=1e-9)
    assert mcnemar(gained, lost) == mcnemar(lost, gained)


def test_the_error_of_a_share_is_the_binomial_one() -> None:
    values = [1.0] * 30 + [0.0] * 10
    mean, error = mean_stderr(values)
    assert mean == 0.75
    assert error == pytest.approx(math.sqrt(0.75 * 0.25 / 39))
    assert mean_stderr([1.0]) == (1.0, None)


def test_answers_in_pairs_by_hand() -> None:
    """10 questions, 2 lost, 1 gained: mean -0.1, sum of squares 3, s^2 = (3 - 10 * 0.01) / 9."""
    reference = [1, 1, 1, 1, 1, 0, 0, 0, 0, 0]
    candidate = [0, 0, 1, 1, 1, 1, 0, 0, 0, 0]
    found = paired_answers(reference, candidate)
    error = math.sqrt(2.9 / 9 / 10)
    assert (found.lost, found.gained, found.reference) == (2, 1, 0.5)
    assert found.difference == pytest.approx(-0.1)
    assert found.stderr == pytest.approx(error)
    assert (found.low, found.high) == (
        pytest.approx(-0.1 - 1.96 * error, 1e-4),
        pytest.approx(-0.1 + 1.96 * error, 1e-3),
    )
    assert found.p_value == pytest.approx(1.0)


def test_the_same_answers_differ_by_nothing() -> None:
    found = paired_answers([1, 0, 1], [1, 0, 1])
    assert (found.difference, found.stderr, found.p_value, found.lost, found.gained) == (0, 0, 1.0, 0, 0)
    same = paired_perplexity([-1.0, -2.0], [-1.0, -2.0])
    assert (same.difference, same.p_value) == (0, 1.0)


def test_perplexities_in_pairs_by_hand() -> None:
    """Log-likelihoods lower by 0.1, 0.2, 0.3: mean -0.2, s = 0.1, z = -0.2 / (0.1 / sqrt 3)."""
    reference = [-1.0, -2.0, -3.0]
    candidate = [-1.1, -2.2, -3.3]
    found = paired_perplexity(reference, candidate)
    z = 0.2 / (0.1 / math.sqrt(3))
    assert found.reference == pytest.approx(math.exp(2.0))
    assert found.difference == pytest.approx(math.exp(2.2) - math.exp(2.0))
    assert found.p_value == pytest.approx(2 * (1 - 0.5 * (1 + math.erf(z / math.sqrt(2)))), rel=1e-6)
    change = [math.exp(2.0) * r - math.exp(2.2) * c for r, c in zip(reference, candidate, strict=True)]
    mean = sum(change) / 3
    assert found.stderr == pytest.approx(math.sqrt(sum((x - mean) ** 2 for x in change) / 2 / 3))
    assert (found.lost, found.gained) == (None, None)
