"""What an evaluation found and under which settings, thresholds on it, and the comparison of two results.

Perplexities are comparable only under the same text, window, stride and BOS rule: the settings travel
inside the result and `compare` refuses two that differ.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from cann_llm_quant.errors import UsageError


@dataclass(frozen=True)
class EvaluationSettings:
    """Everything that decides which tokens are scored with which context."""

    text_sha256: str | None
    tokens_sha256: str
    windows: int
    window: int
    stride: int
    bos: Literal["each-window", "none"]
    bos_id: int | None


@dataclass(frozen=True)
class Divergence:
    """Candidate against reference on the same positions; KL(reference || candidate) in nats per position.

    `kl_stderr` is the standard error of the mean over windows, None for a single window.
    """

    reference_nll_sum: float
    reference_perplexity: float
    positions: int
    kl: float
    kl_stderr: float | None
    kl_p99: float
    kl_max: float
    top1_agreement: float


@dataclass(frozen=True)
class EvaluationResult:
    """One evaluation: `perplexity` = exp(`nll_sum` / `tokens`), natural logarithms.

    `bits_per_byte` is known when the text is; `dropped_tokens` is the stream's end that no window covers.
    """

    settings: EvaluationSettings
    tokens: int
    dropped_tokens: int
    nll_sum: float
    perplexity: float
    bits_per_byte: float | None
    divergence: Divergence | None

    @property
    def increase(self) -> float | None:
        """Perplexity over the reference's, minus one; None without a reference."""
        if self.divergence is None:
            return None
        return self.perplexity / self.divergence.reference_perplexity - 1.0

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON values, `increase` included."""
        return {**asdict(self), "increase": self.increase}


@dataclass(frozen=True)
class Comparison:
    """Two results on the same tokens; `increase` is b's perplexity over a's, minus one."""

    perplexity_a: float
    perplexity_b: float
    increase: float
    nll_per_token_difference: float

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain JSON values."""
        return asdict(self)


def compare(a: EvaluationResult, b: EvaluationResult) -> Comparison:
    """How b stands against a. Raises UsageError naming the settings that differ."""
    settings_a, settings_b = asdict(a.settings), asdict(b.settings)
    different = [
        f"{key} ({settings_a[key]} / {settings_b[key]})" for key in settings_a if settings_a[key] != settings_b[key]
    ]
    if different:
        raise UsageError(f"these results do not compare, their settings differ: {', '.join(different)}")
    return Comparison(
        perplexity_a=a.perplexity,
        perplexity_b=b.perplexity,
        increase=b.perplexity / a.perplexity - 1.0,
        nll_per_token_difference=b.nll_sum / b.tokens - a.nll_sum / a.tokens,
    )


def parse_fraction(value: str | float, option: str) -> float:
    """`"1%"`, `"0.01"` or 0.01 as 0.01.

    Raises UsageError, naming the option, for anything but a finite number >= 0.
    """
    text = str(value).strip()
    try:
        number = float(text[:-1]) / 100.0 if text.endswith("%") else float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise UsageError(f"{option} {text!r} is not a fraction; write a percentage such as 1% or a number such as 0.01")
    return number


def check_thresholds(
    result: EvaluationResult,
    *,
    max_increase: str | float | None = None,
    max_kl: float | None = None,
    min_top1: str | float | None = None,
) -> list[str]:
    """One sentence for each threshold that the result misses; empty when it holds them all.

    Raises UsageError for a threshold that is no number, or one that needs a reference where there was none.
    """
    limits = {
        option: parse_fraction(value, option)
        for option, value in (
            ("--max-increase", max_increase),
            ("--max-kl", max_kl),
            ("--min-top1", min_top1),
        )
        if value is not None
    }
    if not limits:
        return []
    measured = result.divergence
    if measured is None or result.increase is None:
        raise UsageError(f"{', '.join(limits)} needs a reference model to measure against; give --reference")
    failures = []
    if result.increase > limits.get("--max-increase", math.inf):
        failures.append(
            f"perplexity rose by {result.increase:.3%} ({measured.reference_perplexity:.4f} to "
            f"{result.perplexity:.4f}), more than --max-increase {limits['--max-increase']:.3%}"
        )
    if measured.kl > limits.get("--max-kl", math.inf):
        failures.append(f"KL divergence {measured.kl:.6f} exceeds --max-kl {limits['--max-kl']:g}")
    if measured.top1_agreement < limits.get("--min-top1", 0.0):
        failures.append(f"top-1 agreement {measured.top1_agreement:.3%} is below --min-top1 {limits['--min-top1']:.3%}")
    return failures
