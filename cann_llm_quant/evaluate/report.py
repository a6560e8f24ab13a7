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


def parse_fraction(value: str | float, option: str, most: float = math.inf) -> float:
    """`"1%"`, `"0.01"` or 0.01 as 0.01.

    Raises UsageError, naming the option, for anything but a finite number from 0 to `most`.
    """
    text = str(value).strip()
    try:
        number = float(text[:-1]) / 100.0 if text.endswith("%") else float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise UsageError(f"{option} {text!r} is not a fraction; write a percentage such as 1% or a number such as 0.01")
    if number > most:
        raise UsageError(f"{option} {text!r} is more than {most:.0%}; write a percentage such as 95% or 0.95")
    return number


@dataclass(frozen=True)
class Thresholds:
    """What a result must keep against its reference; None asks nothing.

    `max_increase` is of perplexity, `max_kl` in nats per token, `min_top1` a share of tokens.
    """

    max_increase: float | None = None
    max_kl: float | None = None
    min_top1: float | None = None

    @classmethod
    def parse(
        cls,
        *,
        max_increase: str | float | None = None,
        max_kl: str | float | None = None,
        min_top1: str | float | None = None,
    ) -> "Thresholds":
        """The thresholds as a user writes them. Raises UsageError, naming the option that cannot be meant."""
        return cls(
            None if max_increase is None else parse_fraction(max_increase, "--max-increase"),
            None if max_kl is None else parse_fraction(max_kl, "--max-kl"),
            None if min_top1 is None else parse_fraction(min_top1, "--min-top1", 1.0),
        )

    def missed(self, result: EvaluationResult) -> list[str]:
        """One sentence for each threshold that the result misses; empty when it holds them all.

        Raises UsageError when there are thresholds and the result has no reference.
        """
        if self == Thresholds():
            return []
        measured = result.divergence
        if measured is None or result.increase is None:
            raise UsageError("thresholds need a reference model to measure against; give --reference")
        failures = []
        if self.max_increase is not None and result.increase > self.max_increase:
            failures.append(
                f"perplexity rose by {result.increase:.3%} ({measured.reference_perplexity:.4f} to "
                f"{result.perplexity:.4f}), more than --max-increase {self.max_increase:.3%}"
            )
        if self.max_kl is not None and measured.kl > self.max_kl:
            failures.append(f"KL divergence {measured.kl:.6f} exceeds --max-kl {self.max_kl:g}")
        if self.min_top1 is not None and measured.top1_agreement < self.min_top1:
            failures.append(f"top-1 agreement {measured.top1_agreement:.3%} is below --min-top1 {self.min_top1:.3%}")
        return failures
