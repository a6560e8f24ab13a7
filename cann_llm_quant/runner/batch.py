"""The engine's core, without threads: requests in, steps of the model over pages, chunks of text out.

    schedule (what to compute)  →  compute (forward pass, sampling)  →  commit (tokens to texts, pages to their owners)

Only `compute` takes long, and it touches nothing that `add` and `abort` do: whoever runs steps in a thread of its own
holds a lock around the other three (service.py).
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cann_llm_quant.errors import CannQuantError
from cann_llm_quant.models.decoder import DecoderModel, Rotation, head, rotation_of
from cann_llm_quant.quant.kv import KvPlan
from cann_llm_quant.runner.answer import Answer, Chunk, Vocabulary
from cann_llm_quant.runner.kv_store import KvStore
from cann_llm_quant.runner.offload import OffloadStore, usable_bytes
from cann_llm_quant.runner.options import EngineOptions, PageCounts
from cann_llm_quant.runner.page_table import Outside, PageStats, PageTable
from cann_llm_quant.runner.paged_attention import PagedAttend
from cann_llm_quant.runner.pattern import parse_pattern
from cann_llm_quant.runner.prefix_cache import PrefixCache, PrefixStats
from cann_llm_quant.runner.sampler import Sampled, make_generator, sample
from cann_llm_quant.runner.scheduler import Scheduler, Step, Work
from cann_llm_quant.runner.sequence import Sequence
from cann_llm_quant.runner.settings import GenerationSettings
from cann_llm_quant.runner.weights import LoadedModel

Outcome = Sampled | CannQuantError


class PagesLostError(CannQuantError):
    """Moving pages failed midway, so that what lies in them or outside is not what the page table says."""


class Request:
    """One request: its place in the schedule, its settings, its own randomness and its answer so far."""

    def __init__(self, sequence: Sequence, settings: GenerationSettings, answer: Answer) -> None:
        self.sequence, self.settings, self.answer = sequence, settings, answer
        self.generator = make_generator(settings)
        self.cached_tokens: int | None = None


@dataclass(frozen=True)
class Output:
    """What a step gave one request: a chunk, or the error that ended it."""

    request: Request
    chunk: Chunk | CannQuantError


@dataclass(frozen=True)
class EngineStats:
    """A moment's view of the engine; token and preemption counts are since it was made."""

    running: int
    waiting: int
    prompt_tokens: int
    generated_tokens: int
    steps: int
    preemptions: int
    pages: PageStats
    prefix: PrefixStats | None
    kv_bytes: int


class Batch:
    """All requests of one model."""

    def __init__(self, loaded: LoadedModel, plan: KvPlan, options: EngineOptions) -> None:
        self.model: DecoderModel = loaded.model
        self.vocabulary = Vocabulary(loaded.tokenizer, loaded.end_ids)
        arch, table = self.model.arch, self.model.embedding
        self.limits, self.policy = options.limits(arch), options.policy(arch, plan)
        self._pattern = parse_pattern(options.attention_pattern)
        counts = PageCounts.of(options, arch, plan, table.dtype, table.device)
        self.store = KvStore(
            plan,
            kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            page_size=options.page_size,
            sealed=counts.sealed,
            floats=counts.floats,
            dtype=table.dtype,
            device=table.device,
        )
        self._outside = OffloadStore(
            host_bytes=options.host_offload, disk_bytes=options.disk_offload, folder=options.offload_folder
        )
        # Dynamic RoPE turns a prefix by the length of the whole prompt: equal beginnings have different keys.
        shares = options.prefix_cache and arch.rope.kind != "dynamic"
        self._prefix: PrefixCache | None = None
        if shares:
            self._prefix = PrefixCache(
                options.page_size, min_prefix_len=options.min_prefix_len, eviction=options.eviction
            )
        room = usable_bytes(options.host_offload, options.disk_offload, max(counts.sealed_bytes, counts.float_bytes))
        outside = Outside(room, sealed_bytes=counts.sealed_bytes, float_bytes=counts.float_bytes)
        self.table = PageTable(sealed=counts.sealed, floats=counts.floats, prefix=self._prefix, outside=outside)
        self.scheduler = Scheduler(self.limits, self.table, self.policy)
        self._requests: dict[int, Request] = {}
        self._ids = self._prompt_tokens = self._generated_tokens = self._steps = 0

    def add(self, prompt: tuple[int, ...], settings: GenerationSettings, now: float) -> Request:
        """Queue a request.

        Raises RequestError where it can never be computed, OverloadedError where the queue is full.
        """
        sequence = Sequence(self._ids, prompt, settings.max_new_tokens, now)
        request = Request(sequence, settings, Answer(self.vocabulary, prompt, settings))
        self.scheduler.add(sequence)
        self._ids += 1
        self._prompt_tokens += len(prompt)
        self._requests[sequence.id] = request
        return request

    def abort(self, request: Request) -> Chunk | None:
        """End a request early and give its pages back; returns its last chunk, None where it has ended already."""
        if self._requests.pop(request.sequence.id, None) is None:
            return None
        self.scheduler.finish(request.sequence)
        return request.answer.cancel()

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._requests)

    def schedule(self, now: float) -> tuple[Step, list[Output]]:
        """The next step, and the requests that turned out to need more pages than there are."""
        step = self.scheduler.schedule(now)
        for work in step.work:
            request = self._requests[work.sequence.id]
            if request.cached_tokens is None:
                request.cached_tokens = work.span.start
        return step, [
            Output(self._requests.pop(sequence.id), CannQuantError(_exhausted(sequence))) for sequence in step.exhausted
        ]

    @torch.no_grad()
    def compute(self, step: Step) -> dict[int, Outcome]:
        """Run the model over the step's tokens; a sampled token (or its error) by sequence id."""
        try:
            self._outside.apply(step.moves, self.store)
        except Exception as error:
            raise PagesLostError(f"pages could not be moved outside or back: {error}") from error
        if not step.work:
            return {}
        spans = [work.span for work in step.work]
        attend = PagedAttend(self.store, spans, recent_pages=self.policy.recent_pages, pattern=self._pattern)
        device = self.model.embedding.device
        ids = torch.tensor([[token for work in step.work for token in work.tokens]], device=device)
        positions = torch.tensor(
            [[position for span in spans for position in range(span.start, span.start + span.count)]], device=device
        )
        hidden = self.model.hidden(ids, positions, attend, rotation=self._rotation(step.work, positions))
        return self._sample(step, hidden)

    def commit(self, step: Step, outcomes: dict[int, Outcome]) -> list[Output]:
        """End a computed step; returns what its requests get."""
        self._steps += bool(step.work)
        tokens = {key: outcome.token_id for key, outcome in outcomes.items() if isinstance(outcome, Sampled)}
        failed = {key: outcome for key, outcome in outcomes.items() if isinstance(outcome, CannQuantError)}
        for key in failed.keys() & self._requests.keys():
            self.scheduler.finish(self._requests[key].sequence)
        self.scheduler.commit(step, tokens)
        outputs = []
        for key, outcome in outcomes.items():
            request = self._requests.get(key)
            if request is None:
                continue  # cancelled while the step was computed
            if isinstance(outcome, CannQuantError):
                outputs.append(Output(self._requests.pop(key), outcome))
                continue
            self._generated_tokens += 1
            chunk = request.answer.push(outcome)
            if chunk.finish_reason is not None:
                self.scheduler.finish(self._requests.pop(key).sequence)
            outputs.append(Output(request, chunk))
        return outputs

    def fail(self, step: Step, error: CannQuantError) -> list[Output]:
        """End a step that could not be computed, and all requests in it.

        Where pages were lost on their way outside or back, all others begin again, and nothing stays cached.
        """
        self.scheduler.discard(step)
        requests = [self._requests.pop(work.sequence.id, None) for work in step.work]
        for request in requests:
            if request is not None:
                self.scheduler.finish(request.sequence)
        if isinstance(error, PagesLostError):
            self.scheduler.restart()
            self._outside.clear()
        return [Output(request, error) for request in requests if request is not None]

    def stats(self) -> EngineStats:
        """Counts of requests, tokens and pages."""
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            steps=self._steps,
            preemptions=self.scheduler.preemptions,
            pages=self.table.stats(),
            prefix=None if self._prefix is None else self._prefix.stats,
            kv_bytes=self.store.nbytes,
        )

    def close(self) -> None:
        """Remove what lies on disk."""
        self._outside.close()

    def _rotation(self, work: Tokens[Work], positions: Int[Tensor, "1 total"]) -> Rotation | None:
        """Dynamic RoPE takes a prompt's length for all of the prompt, and for a later token the length it makes."""
        arch = self.model.arch
        if arch.rope.kind != "dynamic":
            return None
        dtype = self.model.embedding.dtype
        parts = []
        for row in work:
            prompt = len(row.sequence.prompt)
            for position in range(row.span.start, row.span.start + row.span.count):
                at = torch.tensor([[position]], device=positions.device)
                parts.append(rotation_of(arch, at, dtype, max(prompt, position + 1)))
        cos, sin = (torch.cat(each, 1) for each in zip(*parts, strict=True))
        return cos, sin

    def _sample(self, step: Step, hidden: Float[Tensor, "1 total hidden"]) -> dict[int, Outcome]:
        """A token for each sequence whose last known token was computed; only those rows go through the head."""
        ends, total = [], 0
        for work in step.work:
            total += work.span.count
            ends.append(total - 1)
        rows = [(work, end) for work, end in zip(step.work, ends, strict=True) if work.samples]
        if not rows:
            return {}
        last = hidden[:, [end for _, end in rows]]
        logits = head(self.model.arch, self.model.norm, self.model.head_op, last)[0]
        outcomes: dict[int, Outcome] = {}
        for (work, _), row in zip(rows, logits, strict=True):
            request = self._requests.get(work.sequence.id)
            if request is None:
                continue  # cancelled since the step was scheduled
            sequence = work.sequence
            try:
                outcomes[sequence.id] = sample(
                    row, request.settings, request.generator, sequence.prompt, sequence.output
                )
            except CannQuantError as error:
                outcomes[sequence.id] = error
        return outcomes


def _exhausted(sequence: Sequence) -> str:
    return (
        f"the answer ended after {len(sequence.output)} tokens: its sensitive tokens need more float pages than there "
        "are; raise kv_pages, or name fewer sensitive classes"
    )
