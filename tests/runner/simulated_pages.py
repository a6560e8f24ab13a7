"""A model whose keys and values are the tokens themselves, to drive the scheduler and check what it hands out.

The next token is a function of the positions and tokens that the last query sees, read from the pages of the span and
from the step's own tokens. A page that is shared, moved, reused or dropped wrongly therefore changes the text. Every
step is checked against the contract of `Span` and against the page policy, written out literally.
"""

from collections import Counter
from collections.abc import Iterable

from cann_llm_quant.runner.page_table import Move
from cann_llm_quant.runner.scheduler import Scheduler, Step, Work
from cann_llm_quant.runner.sequence import Sequence, State
from cann_llm_quant.runner.spans import DROPPED, Pattern

VOCAB = 97
Cells = dict[int, int]  # position -> token


def seen(query: int, pattern: Pattern | None) -> Iterable[int]:
    """The keys of a query, one comparison at a time."""
    keys = range(query + 1)
    if pattern is None:
        return keys
    return [key for key in keys if key < pattern.first or key > query - pattern.window]


def next_token(cells: Cells, query: int, pattern: Pattern | None) -> int:
    state = 17
    for key in seen(query, pattern):
        state = (state * 31 + cells[key] * 7 + key) % 1_000_003
    return state % VOCAB


def generate_alone(prompt: tuple[int, ...], new: int, pattern: Pattern | None = None) -> tuple[int, ...]:
    """The text without pages, batch or cache."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(next_token(dict(enumerate(tokens)), len(tokens) - 1, pattern))
    return tuple(tokens[len(prompt) :])


class SimulatedEngine:
    """Runs a scheduler to the end; `texts` are the outputs by id, `history` each step's (id, start, count)."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.pages: dict[int, Cells] = {}
        self.outside: dict[int, Cells] = {}
        self.texts: dict[int, tuple[int, ...]] = {}
        self.exhausted: list[int] = []
        self.history: list[list[tuple[int, int, int]]] = []

    def add(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence)

    def run(self, limit: int = 10_000) -> None:
        while self.scheduler.running or self.scheduler.waiting:
            self.step()
            assert len(self.history) < limit, "the scheduler does not get anywhere"

    def step(self, now: float = 1e6) -> Step:
        step = self.scheduler.schedule(now)
        self.compute(step)
        self.end(step)
        return step

    def compute(self, step: Step) -> None:
        for move in step.moves:
            self.apply(move)
        self.check_counts(step)
        self.history.append([(work.sequence.id, work.span.start, work.span.count) for work in step.work])
        self.exhausted += [sequence.id for sequence in step.exhausted]
        self.new = {}
        for work in step.work:
            token = self.forward(work)
            if work.samples:
                self.new[work.sequence.id] = token

    def end(self, step: Step) -> None:
        self.scheduler.commit(step, self.new)
        for work in step.work:
            sequence = work.sequence
            if sequence.state is State.RUNNING and len(sequence.output) == sequence.max_new_tokens:
                self.texts[sequence.id] = sequence.output
                self.scheduler.finish(sequence)
        self.check_table()

    def apply(self, move: Move) -> None:
        if move.kind == "out":
            assert move.handle not in self.outside
            self.outside[move.handle] = dict(self.pages[move.page])
        elif move.kind == "in":
            self.pages[move.page] = self.outside.pop(move.handle)
        else:
            del self.outside[move.handle]

    def check_counts(self, step: Step) -> None:
        """No page that the step writes is seen by anyone else; the limits hold."""
        limits = self.scheduler.limits
        assert step.tokens <= limits.max_batch_tokens
        assert len(step.work) <= limits.max_batch_size
        written = Counter[int]()
        for work in step.work:
            first = work.span.start // self.scheduler.policy.page_size
            before = work.span.before
            written.update(page for page in work.span.after[first:] if page != DROPPED)
            written.update(new for q, new in enumerate(work.span.after[:first]) if q >= len(before) or before[q] != new)
        assert all(count == 1 for count in written.values())
        for work in step.work:
            first = work.span.start // self.scheduler.policy.page_size
            own = set(work.span.after[first:])
            assert not (set(work.span.before) - own - {DROPPED}) & set(written)

    def forward(self, work: Work) -> int:
        span, size = work.span, self.scheduler.policy.page_size
        end = span.start + span.count
        pattern = self.scheduler.policy.pattern
        assert len(span.before) == -(-span.start // size)
        assert len(span.after) == -(-end // size)
        self.check_forms(work)
        cells: Cells = {}
        for number, page in enumerate(span.before):
            if page == DROPPED:
                lost = range(number * size, min((number + 1) * size, span.start))
                assert not set(lost) & set(seen(span.start, pattern)), "a page was dropped that is still seen"
                continue
            held = {key: token for key, token in self.pages[page].items() if key < span.start}
            assert sorted(held) == list(range(number * size, min((number + 1) * size, span.start)))
            cells |= held
        cells |= dict(zip(range(span.start, end), work.tokens, strict=True))
        for number, page in enumerate(span.after):
            if page != DROPPED:
                keys = range(number * size, min((number + 1) * size, end))
                self.pages[page] = {key: cells[key] for key in keys}
        return next_token(cells, end - 1, pattern)

    def check_forms(self, work: Work) -> None:
        policy, first_float = self.scheduler.policy, self.scheduler.table.pools["float"].first
        size, end = policy.page_size, work.span.start + work.span.count
        tokens = work.sequence.tokens
        for number, page in enumerate(work.span.after):
            if page == DROPPED:
                continue
            protected = number * size < policy.sink_tokens or bool(
                policy.sensitive & set(tokens[number * size : (number + 1) * size])
            )
            full = (number + 1) * size <= end
            left = number < end // size - (-(-policy.recent_tokens // size))
            if policy.quantizes and full and left and not protected:
                assert page < first_float
            elif protected or not policy.quantizes or not full:
                assert page >= first_float
            # else: recent and full; float, unless a prefix hit found it sealed

    def check_table(self) -> None:
        stats = self.scheduler.table.stats()
        assert stats.free + stats.cached + stats.referenced == stats.total
        held = Counter(page for each in self.scheduler.running for page in each.block_table if page != DROPPED)
        for pool in self.scheduler.table.pools.values():
            assert pool._counts == [held[page] for page in range(pool.first, pool.first + pool.total)]

    def check_empty(self) -> None:
        """Nothing is held; what is cached can be given up."""
        table = self.scheduler.table
        assert table.stats().referenced == 0
        table.clear_cache()
        for move in table.take_moves():
            self.apply(move)
        assert table.stats().free == table.stats().total
        assert table.stats().outside_bytes == 0
        assert not self.outside
        assert table.outside.pages == 0
        if table.prefix is not None:
            assert table.prefix.entries == 0
