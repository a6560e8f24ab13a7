"""What the engine computes next: a state machine over sequences and pages, without tensors, I/O or a clock.

    add ──> waiting ──> running ──> finished          step = schedule(now);  compute it;  commit(step, new tokens)

One step, of at most `max_batch_tokens` tokens:

1. Each running sequence that decodes gets its one token, oldest first. Where pages run short the youngest running
   sequence that is not in the step yet is preempted: its pages move outside (swap) or are given up (recompute).
2. Unless pages ran short, waiting sequences are admitted in the order of arrival as long as all their known tokens
   would fit, beginning with what the prefix cache holds of them. One whose next page a running sequence is about to
   compute is passed over until it can share that page.
3. What is left of the tokens goes to prompts, in chunks. They take turns: whoever was served longest ago comes first,
   so neither a long prompt nor a stream of short ones keeps the others waiting. Decodes are at most
   `max_batch_size - 1` beside a prompt, so at least one token is left for it.

A sequence that could not run even alone is refused by `add`; one that turns out to need more float pages than there are
(sensitive tokens in its output) ends as `exhausted`.
"""

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from cann_llm_quant.errors import OverloadedError, RequestError, UsageError
from cann_llm_quant.runner.page_policy import Kind, Need, PagePolicy
from cann_llm_quant.runner.page_table import Move, PageTable
from cann_llm_quant.runner.prefix_cache import Entry
from cann_llm_quant.runner.sequence import Sequence, State
from cann_llm_quant.runner.spans import DROPPED, Span

Preemption = Literal["recompute", "swap"]


@dataclass(frozen=True)
class Limits:
    """`gather_seconds`: how long an idle engine waits for company after a request has come."""

    max_batch_size: int = 16
    max_batch_tokens: int = 512
    max_waiting: int = 1024
    max_context: int = 2048
    gather_seconds: float = 0.0
    preemption: str = "recompute"

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_waiting", "max_context"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)} must be at least 1")
        if self.max_batch_tokens < self.max_batch_size:
            raise UsageError(
                f"max_batch_tokens {self.max_batch_tokens} must be at least max_batch_size {self.max_batch_size}, "
                "one token for each sequence"
            )
        if not 0 <= self.gather_seconds < float("inf"):
            raise UsageError(f"gather_seconds {self.gather_seconds} must be a number of seconds, 0 or more")
        if self.preemption not in get_args(Preemption):
            raise UsageError(f"unknown preemption {self.preemption!r}; known are recompute, swap")


@dataclass(frozen=True)
class Work:
    """One sequence's part of a step: `tokens` at the span's positions.

    `samples`: the logits of the last one give a new token.
    """

    sequence: Sequence
    tokens: tuple[int, ...]
    span: Span
    samples: bool


@dataclass(frozen=True)
class Step:
    """What to compute, after carrying out `moves` in order. `exhausted` have ended: their pages did not suffice.

    `wake`: nothing to compute before that time, unless another request comes.
    """

    work: tuple[Work, ...] = ()
    moves: tuple[Move, ...] = ()
    exhausted: tuple[Sequence, ...] = ()
    wake: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(len(work.tokens) for work in self.work)


class Scheduler:
    """Sequences and the pages they hold. One step is under way at a time; `commit` or `discard` ends it."""

    def __init__(self, limits: Limits, table: PageTable, policy: PagePolicy) -> None:
        self.limits = limits
        self.table = table
        self.policy = policy
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._turns = 0
        self._work: dict[int, Work] = {}
        self._under_way = False

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises RequestError where it could never be computed, OverloadedError where the queue is full.
        """
        self._check(sequence)
        if len(self.waiting) >= self.limits.max_waiting:
            raise OverloadedError(
                f"{len(self.waiting)} requests are waiting already; try again later or raise max_waiting"
            )
        insort(self.waiting, sequence, key=lambda each: each.age)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, in whatever state it is, and give back what it holds.

        What is being computed at this moment is given back when the step ends. Ending twice does nothing.
        """
        if sequence.state is State.FINISHED:
            return
        (self.running if sequence.state is State.RUNNING else self.waiting).remove(sequence)
        sequence.state = State.FINISHED
        if sequence.id not in self._work:
            self._give_back(sequence)

    def abort(self, sequence_id: int) -> bool:
        """`finish` by id; False where no such sequence is waiting or running (any more)."""
        for sequence in (*self.running, *self.waiting):
            if sequence.id == sequence_id:
                self.finish(sequence)
                return True
        return False

    def schedule(self, now: float) -> Step:
        """The next step; it has to be ended before the next call. Without work there is nothing to do at `now`."""
        assert not self._under_way, "the step before has not been ended"
        self._under_way = True
        wake = self._gather_until(now)
        if wake is not None:
            return Step(moves=self.table.take_moves(), wake=wake)
        if self._decode():
            self._admit()
        self._prefill()
        exhausted: list[Sequence] = []
        while self.running and not self._work:
            # All wait for pages that the others hold: the oldest gets those of the youngest.
            if len(self.running) > 1:
                self._preempt(self.running[-1])
                self._prefill()
            else:
                exhausted.append(self.running[0])
                self.finish(self.running[0])
        return Step(tuple(self._work.values()), self.table.take_moves(), tuple(exhausted))

    def commit(self, step: Step, new_tokens: Mapping[int, int]) -> None:
        """End a step that was computed; `new_tokens` by sequence id, for all that sample and have not ended since."""
        self._end_step()
        for work in step.work:
            sequence, span = work.sequence, work.span
            self.table.release([old for old, new in zip(span.before, span.after, strict=False) if old != new])
            sequence.block_table = list(span.after)
            sequence.computed = span.start + span.count
            self._publish(sequence, max(sequence.settled, self.policy.settled(sequence.computed)))
            if sequence.state is State.FINISHED:
                self._give_back(sequence)
            elif work.samples:
                sequence.tokens.append(new_tokens[sequence.id])

    def discard(self, step: Step) -> None:
        """End a step that failed: its sequences are as they were before it. `restart` where its moves failed."""
        self._end_step()
        for work in step.work:
            held = set(work.span.before)
            self.table.release([page for page in work.span.after if page not in held])
            if work.sequence.state is State.FINISHED:
                self._give_back(work.sequence)

    def restart(self) -> None:
        """After moves that failed, when nobody knows what lies where: all give up their pages and begin again."""
        for sequence in (*self.running, *self.waiting):
            self._give_back(sequence)
            sequence.state = State.WAITING
        self.waiting = sorted((*self.running, *self.waiting), key=lambda each: each.age)
        self.running = []
        self.table.forget_contents()

    def _check(self, sequence: Sequence) -> None:
        """Refuse what could not be computed even alone."""
        prompt, new = len(sequence.prompt), sequence.max_new_tokens
        if not prompt:
            raise RequestError("prompt", "the prompt has no tokens")
        if new < 1:
            raise RequestError("max_new_tokens", f"max_new_tokens {new} must be at least 1")
        asked, context = f"{prompt} prompt tokens and {new} new ones", self.limits.max_context
        if prompt + new > context:
            field = "prompt" if prompt >= context else "max_new_tokens"
            raise RequestError(field, f"{asked} exceed the context of {context}; ask for fewer or raise max_context")
        need, total = self.policy.peak(sequence.prompt, prompt + new - 1), self.table.total()
        for kind, wanted, have in (("sealed", need.sealed, total.sealed), ("float", need.floats, total.floats)):
            if wanted > have:
                field = "max_new_tokens" if self.policy.peak(sequence.prompt, prompt).within(total) else "prompt"
                pages = f"{wanted} {kind} pages of {self.policy.page_size} tokens"
                raise RequestError(field, f"{asked} need {pages} and there are {have}; ask for fewer or raise kv_pages")

    def _end_step(self) -> None:
        assert self._under_way, "no step is under way"
        self._under_way = False
        self._work.clear()

    def _gather_until(self, now: float) -> float | None:
        """When an idle engine stops waiting for company; None: now, or there is nothing to wait with."""
        if self.running or not self.waiting or len(self.waiting) >= self.limits.max_batch_size:
            return None
        until = self.waiting[0].arrival + self.limits.gather_seconds
        return until if now < until else None

    def _budget(self) -> int:
        return self.limits.max_batch_tokens - sum(len(work.tokens) for work in self._work.values())

    def _decode(self) -> bool:
        """Put all that decode into the step; whether the pages sufficed."""
        enough = True
        for sequence in [each for each in self.running if each.remaining == 1]:
            while sequence.state is State.RUNNING and not self._assign(sequence, 1):
                enough = False
                victim = next(each for each in reversed(self.running) if each.id not in self._work)
                if len(self.running) == 1:
                    break
                self._preempt(victim)
        return enough

    def _admit(self) -> None:
        """Start waiting sequences, first come first served, while they fit."""
        for sequence in list(self.waiting):
            if len(self.running) >= self.limits.max_batch_size:
                break
            hits = self._hits(sequence)
            if self._can_share_soon(sequence, hits):
                continue
            if not self._fits(sequence, hits):
                if self.running:
                    break
                hits = []  # what is cached for it may stand in its own way
            self.waiting.remove(sequence)
            self._start(sequence, hits)
            insort(self.running, sequence, key=lambda each: each.age)

    def _prefill(self) -> None:
        """Share what is left of the step's tokens among the prompts, by turns."""
        for sequence in sorted(
            (each for each in self.running if each.id not in self._work), key=lambda each: each.turn
        ):
            count = min(self._budget(), sequence.remaining)
            if not count or not self._assign(sequence, count):
                break
            self._to_the_end_of_the_line(sequence)

    def _to_the_end_of_the_line(self, sequence: Sequence) -> None:
        self._turns += 1
        sequence.turn = self._turns

    def _assign(self, sequence: Sequence, most: int) -> bool:
        """Put up to `most` tokens of a sequence into the step, fewer where pages are short; False: none fit."""
        for page in reversed(self.policy.dropped(sequence.computed)):
            if sequence.block_table[page] == DROPPED:
                break
            self.table.release([sequence.block_table[page]])
            sequence.block_table[page] = DROPPED
        start, end = sequence.computed, sequence.computed + most
        wanted = self._wanted(sequence, sequence.settled, end)
        while not Need.of(list(wanted.values())).within(self.table.available()):
            end = (end - 1) // self.policy.page_size * self.policy.page_size
            if end <= start:
                return False
            wanted = self._wanted(sequence, sequence.settled, end)
        after = sequence.block_table + [DROPPED] * (self.policy.pages(end) - len(sequence.block_table))
        for number, kind in wanted.items():
            after[number] = self.table.allocate(kind)
        span = Span(start, end - start, tuple(sequence.block_table), tuple(after))
        self._work[sequence.id] = Work(sequence, tuple(sequence.tokens[start:end]), span, end == len(sequence.tokens))
        return True

    def _wanted(self, sequence: Sequence, settled: int, end: int) -> dict[int, Kind]:
        """The pages, by number, that a sequence lacks behind `settled` ones to have its tokens up to `end` stored."""
        table = sequence.block_table
        return {
            number: kind
            for number, kind in enumerate(self.policy.kinds(sequence.tokens, settled, end), settled)
            if number >= len(table) or (table[number] != DROPPED and self.table.kind(table[number]) != kind)
        }

    def _hits(self, sequence: Sequence) -> list[Entry]:
        """What the prefix cache holds of a sequence; of a swapped one only what had its final form already."""
        if not sequence.share_prefix:
            return []
        hits = self.table.match(sequence.tokens)
        return hits[: sequence.settled] if sequence.state is State.SWAPPED else hits

    def _can_share_soon(self, sequence: Sequence, hits: list[Entry]) -> bool:
        """Whether a running sequence is about to compute a page that this one would compute as well."""
        if self.table.prefix is None or not sequence.share_prefix or sequence.state is State.SWAPPED:
            return False
        size = self.policy.page_size
        for other in self.running:
            page = other.computed // size
            end = (page + 1) * size
            if (
                other.remaining > 1
                and len(hits) <= page < self.policy.settled(len(other.tokens))
                and end < len(sequence.tokens)
                and sequence.tokens[page * size : end] == other.tokens[page * size : end]
                and sequence.tokens[:end] == other.tokens[:end]
            ):
                return True
        return False

    def _fits(self, sequence: Sequence, hits: list[Entry]) -> bool:
        """Whether all known tokens fit beside those of the running prompts, and each that runs can go on by a page."""
        need = self.table.cost(hits)
        if sequence.state is State.SWAPPED:
            rest = [handle for handle in sequence.handles[len(hits) :] if handle != DROPPED]
            need += Need.of([self.table.outside.kind(handle) for handle in rest])
        else:
            need += self._lacks(sequence, len(hits))
        for other in self.running:
            need += self._lacks(other, other.settled)
        margin = len(self.running)
        need += Need(margin if self.policy.quantizes else 0, margin)
        return need.within(self.table.available())

    def _lacks(self, sequence: Sequence, settled: int) -> Need:
        """The pages that a sequence lacks behind `settled` ones for all its known tokens."""
        length = len(sequence.tokens)
        unseen = self.policy.dropped(length)
        wanted = self._wanted(sequence, settled, length)
        return Need.of([kind for number, kind in wanted.items() if number not in unseen])

    def _start(self, sequence: Sequence, hits: list[Entry]) -> None:
        """Take the cached pages, bring back those outside, and let a sequence run."""
        swapped = sequence.state is State.SWAPPED
        if not swapped:
            sequence.computed = len(hits) * self.policy.page_size
            sequence.settled = len(hits)
            if self.table.prefix is not None and sequence.share_prefix:
                self.table.prefix.count_query(len(sequence.tokens), hits)
        sequence.block_table = self.table.take(hits, self.policy.dropped(sequence.computed))
        if swapped:
            self.table.drop(sequence.handles[: len(hits)])
            sequence.block_table += self.table.swap_in(sequence.handles[len(hits) :])
            sequence.handles = []
        sequence.published, sequence.entry = len(hits), hits[-1] if hits else None
        self._publish(sequence, sequence.settled)
        sequence.state = State.RUNNING
        self._to_the_end_of_the_line(sequence)

    def _publish(self, sequence: Sequence, settled: int) -> None:
        """Note that the first `settled` pages have their final form, and offer the new ones among them for sharing."""
        sequence.settled = settled
        size = self.policy.page_size
        for page in range(sequence.published, settled):
            if sequence.block_table[page] == DROPPED:
                return
            tokens = tuple(sequence.tokens[page * size : (page + 1) * size])
            entry = self.table.publish(sequence.entry, tokens, sequence.block_table[page])
            if entry is None or entry.page is None:
                return
            sequence.block_table[page] = entry.page
            sequence.published, sequence.entry = page + 1, entry

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's pages away; it waits in the order of its arrival to go on."""
        self.preemptions += 1
        self.running.remove(sequence)
        swaps = self.limits.preemption == "swap" and sequence.computed
        handles = self.table.swap_out(sequence.block_table) if swaps else None
        if handles is not None:
            sequence.handles, sequence.block_table, sequence.state = handles, [], State.SWAPPED
        else:
            self._give_back(sequence)
            sequence.state = State.WAITING
        insort(self.waiting, sequence, key=lambda each: each.age)

    def _give_back(self, sequence: Sequence) -> None:
        self.table.release(sequence.block_table)
        self.table.drop(sequence.handles)
        sequence.block_table, sequence.handles = [], []
        sequence.computed = sequence.settled = sequence.published = 0
        sequence.entry = None
