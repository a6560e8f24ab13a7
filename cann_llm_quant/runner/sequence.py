"""One request on its way: what is known of its text, how much of it is stored, and in which pages.

    waiting ──> running ──> finished
       ^          │  ^
       └──────────┤  └──── swapped        preempted: its pages are given up (recompute) or moved outside (swap)
                  └──────────^

A sequence of n known tokens has at most n - 1 of them stored while it runs: the newest is the input of the next step.
"""

from dataclasses import dataclass, field
from enum import Enum

from cann_llm_quant.runner.prefix_cache import Entry


class State(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """A request's tokens and pages.

    `arrival` is in seconds of the engine's clock; of equal arrivals the lower id is older.
    `share_prefix` false: nothing is taken from the prefix cache, as where the logits of the prompt are asked for.
    """

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    arrival: float = 0.0
    share_prefix: bool = True
    state: State = field(default=State.WAITING, init=False)
    tokens: list[int] = field(init=False)
    """All known tokens: the prompt, then the output."""
    computed: int = field(default=0, init=False)
    """How many positions have their keys and values stored."""
    block_table: list[int] = field(default_factory=list, init=False)
    """Page ids by page number; `DROPPED` where no later query sees the page."""
    handles: list[int] = field(default_factory=list, init=False)
    """The same for a swapped sequence: what lies outside, by page number."""
    settled: int = field(default=0, init=False)
    """How many leading pages have their final form."""
    published: int = field(default=0, init=False)
    """How many of them are known to the prefix cache."""
    entry: Entry | None = field(default=None, init=False)
    """The last of those."""
    turn: int = field(default=0, init=False)
    """Its place in the line of prompts that get a part computed."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> tuple[int, ...]:
        """The new tokens so far."""
        return tuple(self.tokens[len(self.prompt) :])

    @property
    def remaining(self) -> int:
        """Known tokens that are not stored yet: one while it decodes, more before that."""
        return len(self.tokens) - self.computed

    @property
    def age(self) -> tuple[float, int]:
        """The order of arrival."""
        return (self.arrival, self.id)
