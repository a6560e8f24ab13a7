"""Which scheme each unit gets under a budget of stored bits: the multiple-choice knapsack.

    minimize  sum_u damage[u][c_u]     such that   sum_u bits[u][c_u] <= budget,   one choice c_u a unit

Solved by dynamic programming over the budget. With `step` the greatest common divisor of what choices cost beyond each
unit's cheapest one, the sums take multiples of `step` only, and the answer is the true optimum. Where that would be
more than `MAX_STATES` sums, `step` is raised and costs are rounded up to it: the budget still holds, and the damage is
within what `units * step` more bits could save. Real matrices have sizes with large common divisors; a model of 30
layers and 6 candidate schemes takes about 10,000 sums.
"""

from collections.abc import Sequence
from math import gcd

import torch

from cann_llm_quant.errors import UsageError

MAX_STATES = 1 << 17


def allocate(damage: Sequence[Sequence[float]], bits: Sequence[Sequence[int]], budget: int) -> list[int]:
    """The chosen index of every unit, see the module's formula; of equal damages the smaller sum is taken.

    `damage[u][c]` and `bits[u][c]` are what choice c of unit u costs. Raises UsageError when the cheapest choices
    together exceed the budget.
    """
    least = [min(row) for row in bits]
    spare = budget - sum(least)
    if spare < 0:
        raise UsageError(f"the smallest mix takes {sum(least)} bits, more than the {budget} that are allowed")
    extra = [[b - low for b in row] for row, low in zip(bits, least, strict=True)]
    spare = min(spare, sum(max(row) for row in extra))
    step = max(1, gcd(*(b for row in extra for b in row)), -(-spare // (MAX_STATES - 1)))
    steps = [[-(-b // step) for b in row] for row in extra]
    return _trace(*_tables(damage, steps, spare // step), steps)


def _tables(
    damage: Sequence[Sequence[float]], steps: Sequence[Sequence[int]], states: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Least damage of all units for each sum of steps spent exactly, and each unit's choice on the way to every sum."""
    best = torch.full((states + 1,), torch.inf, dtype=torch.float64)
    best[0] = 0.0
    chosen = []
    for costs, sizes in zip(damage, steps, strict=True):
        reached = torch.full_like(best, torch.inf)
        choice = torch.zeros(states + 1, dtype=torch.uint8)
        for index, (cost, size) in enumerate(zip(costs, sizes, strict=True)):
            if size > states:
                continue
            candidate = best[: states + 1 - size] + cost
            better = candidate < reached[size:]
            reached[size:][better] = candidate[better]
            choice[size:][better] = index
        best = reached
        chosen.append(choice)
    return best, chosen


def _trace(best: torch.Tensor, chosen: list[torch.Tensor], steps: Sequence[Sequence[int]]) -> list[int]:
    """Walk back from the cheapest sum (the first of equals) to every unit's choice."""
    state = int(best.argmin())
    answer = []
    for choice, sizes in zip(reversed(chosen), reversed(steps), strict=True):
        index = int(choice[state])
        answer.append(index)
        state -= sizes[index]
    return answer[::-1]
