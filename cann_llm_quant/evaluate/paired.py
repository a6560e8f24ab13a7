"""Did the candidate answer worse than the reference, on the same questions? Paired statistics.

With b questions that only the reference answers right and c that only the candidate does, McNemar's exact test
(binomial, two-sided; McNemar 1947) asks how often chance alone would split b + c flips this unevenly:

    p = min(1, 2 * sum_{k <= min(b, c)} C(b + c, k) / 2^(b + c))

The mean difference of paired values d_i has the standard error  s(d) / sqrt(n),  s with n - 1, and the interval
mean +- 1.96 standard errors; for answers this is far narrower than two separate error bars, as most d_i are 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

NORMAL_95 = 1.959963984540054


@dataclass(frozen=True)
class Paired:
    """Candidate minus reference for one metric.

    `lost` and `gained` count answers that turned wrong and right (None for a metric that is no accuracy).
    """

    reference: float
    difference: float
    stderr: float | None
    low: float | None
    high: float | None
    p_value: float | None
    lost: int | None = None
    gained: int | None = None


def mcnemar(lost: int, gained: int) -> float:
    """Two-sided exact p of this many flips one way and the other; 1 without flips."""
    flips = lost + gained
    tail = sum(math.comb(flips, k) for k in range(min(lost, gained) + 1))
    return min(1.0, 2 * tail / (1 << flips))


def mean_stderr(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error, s / sqrt(n) with n - 1 in s; for 0 and 1 that is sqrt(p (1 - p) / (n - 1))."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return mean, None
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (count - 1) / count)


def paired_answers(reference: Sequence[float], candidate: Sequence[float]) -> Paired:
    """Compare right (1) and wrong (0) answers to the same questions."""
    lost = sum(r > c for r, c in zip(reference, candidate, strict=True))
    gained = sum(c > r for r, c in zip(reference, candidate, strict=True))
    difference, stderr = mean_stderr([c - r for r, c in zip(reference, candidate, strict=True)])
    return _paired(math.fsum(reference) / len(reference), difference, stderr, mcnemar(lost, gained), lost, gained)


def paired_perplexity(reference: Sequence[float], candidate: Sequence[float]) -> Paired:
    """Compare perplexities exp(-mean) of log-likelihoods of the same texts.

    p is that of a normal test on the mean difference of log-likelihoods; the error of the difference of perplexities
    is to first order (delta method) that of `ppl_r * r_i - ppl_c * c_i`.
    """
    ppl_r, ppl_c = perplexity(reference), perplexity(candidate)
    shift, error = mean_stderr([c - r for r, c in zip(reference, candidate, strict=True)])
    p_value = None if error is None else math.erfc(abs(shift) / error / math.sqrt(2)) if error else float(not shift)
    _, stderr = mean_stderr([ppl_r * r - ppl_c * c for r, c in zip(reference, candidate, strict=True)])
    return _paired(ppl_r, ppl_c - ppl_r, stderr, p_value, None, None)


def perplexity(logprobs: Sequence[float]) -> float:
    """Of log-likelihoods, exp(-mean); infinity past the range of floats."""
    try:
        return math.exp(-math.fsum(logprobs) / len(logprobs))
    except OverflowError:
        return math.inf


def _paired(
    reference: float,
    difference: float,
    stderr: float | None,
    p_value: float | None,
    lost: int | None,
    gained: int | None,
) -> Paired:
    margin = None if stderr is None else NORMAL_95 * stderr
    low, high = (None, None) if margin is None else (difference - margin, difference + margin)
    return Paired(reference, difference, stderr, low, high, p_value, lost, gained)
