"""Paged attention against attention over whole sequences, one query and one key at a time."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cann_llm_quant.models import attention
from cann_llm_quant.models.attention import masked_attention
from cann_llm_quant.quant.kv import KvPlan, KvScales, KvScheme, LayerKv, decode, encode, kv_scale, page_range
from cann_llm_quant.runner import paged_attention
from cann_llm_quant.runner.kv_store import KvStore
from cann_llm_quant.runner.paged_attention import PagedAttend
from cann_llm_quant.runner.spans import Pattern, Span

HEADS, KV, DIM, SIZE, SCALE = 4, 2, 8, 4, 0.4
INT4_K = KvScheme("int4", False, "channel", None, True)
INT4_V = KvScheme("int4", True, "group", 4, True)
# one layer in two formats, one with plain values, one that is not quantized
LAYERS = (LayerKv(INT4_K, INT4_V), LayerKv(KvScheme("fp8_e5m2", True, "head"), None), LayerKv())


def quantizing_plan() -> KvPlan:
    scales = (KvScales(), KvScales(k_scale=torch.full((KV, 1, 1), 1e-3)), KvScales())
    return KvPlan(LAYERS, scales)


def new_store(plan: KvPlan, pages: int = 64, dtype: torch.dtype = torch.float64) -> KvStore:
    sealed = pages if plan.quantizes else 0
    place = torch.device("cpu")
    return KvStore(
        plan, kv_heads=KV, head_dim=DIM, page_size=SIZE, sealed=sealed, floats=pages, dtype=dtype, device=place
    )


@dataclass
class Owner:
    """One sequence's pages, given out at random and sealed by the rule; `eager` seals a page at the end of the step
    in which it leaves the window, else in the step that first reads it sealed. Freed float pages are spoiled."""

    store: KvStore
    free: list[int]
    recent: int = 0
    protected: frozenset[int] = frozenset()
    eager: bool = True
    pattern: Pattern | None = None
    table: list[int] = field(default_factory=list)
    length: int = 0
    scattered: int = 7

    def page(self, sealed: bool) -> int:
        fitting = [page for page in self.free if (page < self.store.sealed) == sealed]
        page = fitting[self.scattered % len(fitting)]
        self.free.remove(page)
        return page

    def span(self, count: int) -> Span:
        before, end = tuple(self.table), self.length + count
        limit = (end if self.eager else end - 1) // SIZE - self.recent
        after = []
        for number in range(-(-end // SIZE)):
            old = before[number] if number < len(before) else None
            newest = (number + 1) * SIZE - 1
            if self.pattern and number * SIZE >= self.pattern.first and newest <= self.length - self.pattern.window:
                after.append(-1)
                continue
            seal = self.store.sealed > 0 and newest < end and number < limit and number not in self.protected
            kept = old is not None and self.store.is_sealed(old) >= seal
            after.append(old if kept else self.page(seal))
        self.table = after
        span = Span(self.length, count, before, tuple(after))
        self.length = end
        return span

    def clean(self, span: Span) -> None:
        gone = [page for page in span.before if page >= 0 and page not in span.after]
        self.free.extend(gone)
        for page in gone:
            for tensor in (dump := self.store.dump(page)).values():
                tensor.view(torch.uint8).fill_(255)
            self.store.restore(page, dump)


def random_layers(tokens: int, layers: int, seed: int = 0) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    # float32 numbers, as the schemes encode them, in a wider type for the sums
    return [
        tuple(torch.randn(heads, tokens, DIM, generator=generator).double() for heads in (HEADS, KV, KV))  # type: ignore[misc]
        for _ in range(layers)
    ]


def pieces_of(total: int, cuts: list[int]) -> list[int]:
    pieces, left = [], total
    for cut in cuts:
        pieces.append(min(cut, left))
        left -= pieces[-1]
    return [piece for piece in [*pieces, left] if piece > 0]


def run(owner: Owner, layers, pieces: list[int], window: int | None = None) -> list[Tensor]:
    """Outputs [heads, tokens, dim] of each layer, chunk by chunk."""
    out: list[list[Tensor]] = [[] for _ in layers]
    start = 0
    for piece in pieces:
        span = owner.span(piece)
        attend = PagedAttend(owner.store, [span], recent_pages=owner.recent, pattern=owner.pattern)
        for index, qkv in enumerate(layers):
            q, k, v = (x[None, :, start : start + piece] for x in qkv)
            out[index].append(attend(index, q, k, v, scale=SCALE, window=window)[0])
        owner.clean(span)
        start += piece
    return [torch.cat(parts, 1) for parts in out]


def literal_seen(i: int, j: int, window: int | None, pattern: Pattern | None) -> bool:
    near = window is None or j > i - window
    return j <= i and near and (pattern is None or j < pattern.first or j > i - pattern.window)


def through(x: Tensor, scheme: KvScheme | None, scale: Tensor | None) -> Tensor:
    """One page [heads, tokens, dim] as it comes back from a sealed page."""
    if scheme is None:
        return x
    zero_point = None
    if scheme.dynamic:
        scale, zero_point = kv_scale(*page_range(x, scheme), scheme)
    return decode(encode(x, scheme, scale, zero_point), scheme, scale, zero_point, torch.float64)


def literal(qkv, layer: LayerKv, scales: KvScales, owner: Owner, window: int | None = None) -> Tensor:
    """Query by query and key by key; a key of page q is decoded iff q < b - recent and q is not protected."""
    q, k, v = qkv
    tokens = q.shape[1]
    whole = tokens // SIZE * SIZE
    stored_k, stored_v = k.clone(), v.clone()
    for first in range(0, whole, SIZE):
        page = slice(first, first + SIZE)
        stored_k[:, page] = through(k[:, page], layer.k, scales.k_scale)
        stored_v[:, page] = through(v[:, page], layer.v, scales.v_scale)
    out = torch.zeros_like(q)
    for i in range(tokens):
        seen = [j for j in range(i + 1) if literal_seen(i, j, window, owner.pattern)]
        sealed = [
            bool(owner.store.sealed) and j // SIZE < i // SIZE - owner.recent and j // SIZE not in owner.protected
            for j in seen
        ]
        choose = torch.tensor(sealed)[:, None]
        for head in range(HEADS):
            kv = head // (HEADS // KV)
            keys = torch.where(choose, stored_k[kv, seen], k[kv, seen])
            values = torch.where(choose, stored_v[kv, seen], v[kv, seen])
            out[head, i] = (keys @ q[head, i] * SCALE).softmax(0) @ values
    return out


windows = st.none() | st.integers(1, 14)
patterns = st.none() | st.builds(Pattern, window=st.integers(1, 9), first=st.integers(0, 7))
cuts = st.lists(st.integers(1, 11), max_size=12)


@settings(max_examples=25, deadline=None)
@given(cuts=cuts, window=windows, pattern=patterns, scattered=st.integers(0, 40))
def test_a_plain_plan_equals_attention_over_the_whole_sequence(cuts, window, pattern, scattered) -> None:
    tokens = 29
    layers = random_layers(tokens, 2)
    store = new_store(KvPlan.plain(2))
    owner = Owner(store, list(range(64)), pattern=pattern, scattered=scattered)
    outputs = run(owner, layers, pieces_of(tokens, cuts), window)
    dense = torch.tensor([[literal_seen(i, j, window, pattern) for j in range(tokens)] for i in range(tokens)])
    for out, (q, k, v) in zip(outputs, layers, strict=True):
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=dense, scale=SCALE, enable_gqa=True
        )[0]
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
        if pattern is None:
            whole = masked_attention(q[None], k[None], v[None], scale=SCALE, window=window)[0]
            torch.testing.assert_close(out, whole, rtol=1e-10, atol=1e-12)


policies = st.fixed_dictionaries(
    {
        "recent": st.integers(0, 3),
        "protected": st.frozensets(st.integers(0, 8), max_size=4),
        "eager": st.booleans(),
        "pattern": patterns,
        "scattered": st.integers(0, 40),
    }
)


@settings(max_examples=25, deadline=None)
@given(cuts=cuts, window=windows, policy=policies)
def test_a_quantized_plan_equals_decoding_page_by_page(cuts, window, policy) -> None:
    tokens = 35
    layers = random_layers(tokens, 3, seed=1)
    owner = Owner(new_store(quantizing_plan()), list(range(128)), **policy)
    outputs = run(owner, layers, pieces_of(tokens, cuts), window)
    for index, out in enumerate(outputs):
        expected = literal(layers[index], LAYERS[index], owner.store.plan.scales[index], owner, window)
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)


def one_row_at_a_time(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False) -> Tensor:
    """Attention whose bits depend on nothing but the set of keys and values that a query sees."""
    _, heads, count, _ = q.shape
    keys = k.shape[2]
    seen = torch.ones(count, keys, dtype=torch.bool)
    if is_causal:
        seen = seen.tril()
    if attn_mask is not None:
        seen = attn_mask[0, 0].expand(count, keys)
    out = torch.zeros_like(q)
    for head in range(heads):
        kv = head // (heads // k.shape[1])
        for i in range(count):
            rows = torch.cat([k[0, kv, seen[i]], v[0, kv, seen[i]]], 1).tolist()
            both = torch.tensor(sorted(rows), dtype=q.dtype)
            weights = (both[:, :DIM] * q[0, head, i]).sum(1).mul(scale).softmax(0)
            out[0, head, i] = (weights[:, None] * both[:, DIM:]).sum(0)
    return out


@settings(max_examples=10, deadline=None)
@given(cuts=cuts, window=windows, policy=policies, other=st.booleans())
def test_every_chunking_reads_the_same_bits(cuts, window, policy, other) -> None:
    """The kernel's own rounding differs with the shape of a chunk; what it reads must not, in float32."""
    tokens = 26
    layers = [tuple(x.float() for x in qkv) for qkv in random_layers(tokens, 3, seed=2)]
    with pytest.MonkeyPatch.context() as patch:
        for module in (paged_attention, attention):
            patch.setattr(module, "scaled_dot_product_attention", one_row_at_a_time)
        outputs = []
        for pieces in ([tokens], [1] * tokens if other else [7] * 3 + [5], pieces_of(tokens, cuts)):
            store = new_store(quantizing_plan(), dtype=torch.float32)
            outputs.append(run(Owner(store, list(range(128)), **policy), layers, pieces, window))
    for one, two, three in zip(*outputs, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


@pytest.mark.parametrize("plan", [KvPlan.plain(3), quantizing_plan()], ids=["plain", "quantized"])
def test_c68_batch_mates_change_no_bit(plan: KvPlan) -> None:
    """Prompts of several lengths and single tokens in one step, against each sequence in a store of its own."""
    sequences = [random_layers(tokens, 3, seed) for seed, tokens in enumerate((13, 9, 22))]
    counts = [[4, 1, 1, 6, 1], [8, 1], [3, 7, 1, 1, 10]]
    total = 128 if plan.quantizes else 64
    alone = []
    for layers, pieces in zip(sequences, counts, strict=True):
        alone.append(run(Owner(new_store(plan), list(range(total))), layers, pieces))
    store = new_store(plan)
    free = list(range(total))
    owners = [Owner(store, free) for _ in sequences]
    for step in range(5):
        active = [i for i in range(3) if step < len(counts[i])]
        starts = [owners[i].length for i in active]
        spans = [owners[i].span(counts[i][step]) for i in active]
        attend = PagedAttend(store, spans, recent_pages=0)
        for index in range(3):
            parts = [
                [x[:, start : start + span.count] for x in sequences[i][index]]
                for i, start, span in zip(active, starts, spans, strict=True)
            ]
            q, k, v = (torch.cat(x, 1)[None] for x in zip(*parts, strict=True))
            out = attend(index, q, k, v, scale=SCALE, window=None)[0]
            for i, start, part in zip(active, starts, out.split([span.count for span in spans], 1), strict=True):
                assert torch.equal(part, alone[i][index][:, start : start + part.shape[1]])
        for i, span in zip(active, spans, strict=True):
            owners[i].clean(span)


@pytest.mark.parametrize("plan", [KvPlan.plain(3), quantizing_plan()], ids=["plain", "quantized"])
def test_c67_a_sequence_that_starts_on_shared_pages_reads_what_it_would_have_written(plan: KvPlan) -> None:
    layers = random_layers(21, 3)
    owner = Owner(new_store(plan), list(range(128 if plan.quantizes else 64)))
    whole = run(owner, layers, [21])
    shared = 3 * SIZE
    hit = Owner(owner.store, owner.free, table=owner.table[:3], length=shared)
    rest = [tuple(x[:, shared:] for x in qkv) for qkv in layers]
    for out, expected in zip(run(hit, rest, [5, 1, 3]), whole, strict=True):
        torch.testing.assert_close(out, expected[:, shared:], rtol=1e-10, atol=1e-12)


def test_recent_pages_of_a_shared_prefix_are_read_as_they_are_stored() -> None:
    layers = random_layers(21, 3)
    owner = Owner(new_store(quantizing_plan()), list(range(128)))
    run(owner, layers, [21])
    rest = [tuple(x[:, 3 * SIZE :] for x in qkv) for qkv in layers]
    hit = Owner(owner.store, owner.free, recent=2, table=owner.table[:3], length=3 * SIZE)
    outputs = run(hit, rest, [2, 1, 1, 1])
    for index, out in enumerate(outputs):
        # three shared pages sealed, everything after them float: the literal rule with pages 3 and later protected
        rule = Owner(owner.store, [], protected=frozenset(range(3, 6)))
        expected = literal([x[:, :17] for x in layers[index]], LAYERS[index], owner.store.plan.scales[index], rule)
        torch.testing.assert_close(out, expected[:, 3 * SIZE :], rtol=1e-9, atol=1e-11)


def test_a_pattern_reads_no_dropped_page_and_keeps_few() -> None:
    layers = random_layers(60, 1)
    pattern = Pattern(window=6, first=3)
    owner = Owner(new_store(KvPlan.plain(1), pages=6), list(range(6)), pattern=pattern)
    out = run(owner, layers, [5] * 12)[0]
    expected = literal(layers[0], LayerKv(), KvScales(), owner)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    assert sum(page >= 0 for page in owner.table) <= 4


def test_single_tokens_take_few_calls() -> None:
    """Per layer: two writes; per sequence and layer two reads, or their decoding, and one attention."""
    plan = KvPlan(
        (LayerKv(KvScheme("int8"), KvScheme("int8")),), (KvScales(torch.ones(1, 1, 1), None, torch.ones(1, 1, 1)),)
    )
    owner = Owner(new_store(plan, dtype=torch.float32), list(range(128)))
    layers = [tuple(x.float() for x in qkv) for qkv in random_layers(31, 1)]
    run(owner, layers, [30])
    attend = PagedAttend(owner.store, [owner.span(1)], recent_pages=0)
    q, k, v = (x[None, :, 30:] for x in layers[0])
    attend(0, q, k, v, scale=SCALE, window=None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attend(0, q, k, v, scale=SCALE, window=None)
    work = [e for e in profile.events() if e.cpu_parent is None and e.name.startswith("aten::")]
    views = {
        "aten::" + name
        for name in ("select", "slice", "flatten", "view", "reshape", "unsqueeze", "view_as", "transpose")
    }
    counted = [e.name for e in work if e.name not in views]
    assert len(counted) <= 24, counted
