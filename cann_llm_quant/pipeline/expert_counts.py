"""How many calibration tokens reached the experts of a mixture: counts for the report and one line for people."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from cann_llm_quant.models.arch import Arch


@dataclass(frozen=True)
class ExpertCounts:
    """Tokens that the router sent to each expert, over all experts of all layers.

    `few` saw fewer than `few_tokens`, `unseen` none at all; `borrowing` were solved for other experts' tokens as well,
    with `every_token` all for all tokens.
    """

    count: int
    min_tokens: int
    median_tokens: float
    max_tokens: int
    few_tokens: int
    few: int
    unseen: int
    borrowing: int
    every_token: bool


def expert_counts(
    arch: Arch, linears: Mapping[str, Mapping[str, Any]], *, few_tokens: int, every_token: bool
) -> ExpertCounts | None:
    """Counts from the linears' records, one gate for each expert; None without experts or without calibration."""
    gates = [spec.module for layer in arch.layers for spec in layer.linears if _is_expert_gate(spec.role)]
    entries = [linears[module] for module in gates if module in linears and linears[module]["routed"] is not None]
    if not entries:
        return None
    routed = [int(entry["routed"]) for entry in entries]
    return ExpertCounts(
        count=len(routed),
        min_tokens=min(routed),
        median_tokens=float(median(routed)),
        max_tokens=max(routed),
        few_tokens=few_tokens,
        few=sum(tokens < few_tokens for tokens in routed),
        unseen=routed.count(0),
        borrowing=sum(entry["borrowed"] > 0 for entry in entries),
        every_token=every_token,
    )


def _is_expert_gate(role: str) -> bool:
    return role.startswith("experts.") and role.endswith(".gate")
