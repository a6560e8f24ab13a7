"""The page store against the number formats applied page by page."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cann_llm_quant.errors import UsageError
from cann_llm_quant.quant.kv import KvPlan, KvScales, KvScheme, LayerKv, decode, encode, kv_scale, page_range
from cann_llm_quant.runner.kv_store import KvStore, page_bytes

KV, DIM, SIZE, SEALED, FLOATS = 2, 8, 4, 5, 6
SCHEMES = [
    KvScheme("int8", True, "head"),
    KvScheme("int8", False, "channel"),
    KvScheme("int8", False, "channel", None, True),
    KvScheme("int4", True, "tensor", None, True),
    KvScheme("int4", False, "group", 4, True),
    KvScheme("int4", False, "token", None, True),
    KvScheme("fp8_e4m3"),
    KvScheme("fp8_e5m2", True, "token", None, True),
    KvScheme("fp16"),
    None,
]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def static_scale(scheme: KvScheme | None) -> tuple[Tensor | None, Tensor | None]:
    if scheme is None or scheme.is_plain or scheme.dynamic:
        return None, None
    return kv_scale(*page_range(normal(KV, 200, DIM, seed=9), scheme), scheme)


def plan_of(*schemes: KvScheme | None) -> KvPlan:
    """One layer for each scheme, which stores both keys and values."""
    scales = tuple(KvScales(*static_scale(scheme), *static_scale(scheme)) for scheme in schemes)
    return KvPlan(tuple(LayerKv(scheme, scheme) for scheme in schemes), scales)


def new_store(plan: KvPlan, dtype: torch.dtype = torch.float32) -> KvStore:
    return KvStore(
        plan,
        kv_heads=KV,
        head_dim=DIM,
        page_size=SIZE,
        sealed=SEALED,
        floats=FLOATS,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def filled(plan: KvPlan, dtype: torch.dtype = torch.float32) -> tuple[KvStore, list[dict[int, tuple[Tensor, Tensor]]]]:
    """A store with something in every page, and what must be read back, by layer and page."""
    store, expected = new_store(plan, dtype), []
    for layer, scheme in enumerate(pair.k for pair in plan.layers):
        k, v = (normal(KV, SEALED + FLOATS, SIZE, DIM, seed=2 * layer + i).to(dtype) for i in range(2))
        store.seal(layer, torch.arange(SEALED), k[:, :SEALED], v[:, :SEALED])
        for page in range(SEALED, SEALED + FLOATS):
            for token in range(SIZE):
                slots = torch.tensor([store.slot(page, token)])
                store.write(layer, slots, k[:, page, token : token + 1], v[:, page, token : token + 1])
        pages = {}
        for page in range(SEALED + FLOATS):
            both = (k[:, page], v[:, page])
            pages[page] = tuple(through(x, scheme) for x in both) if page < SEALED else both
        expected.append(pages)
    return store, expected


def through(x: Tensor, scheme: KvScheme | None) -> Tensor:
    if scheme is None:
        return x
    scale, zero_point = static_scale(scheme)
    if scheme.dynamic:
        scale, zero_point = kv_scale(*page_range(x, scheme), scheme)
    return decode(encode(x, scheme, scale, zero_point), scheme, scale, zero_point, x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_mixture_of_pages_reads_back_in_order(dtype: torch.dtype) -> None:
    store, expected = filled(plan_of(*SCHEMES), dtype)
    for pages in ([0], [7], [3, 1, 2], [1, 2, 3], [6, 7, 8], [9, 5, 6], [0, 1, 8, 2, 6], [2, 2, 10, 10], []):
        selection = store.select(pages)
        for layer, by_page in enumerate(expected):
            for got, part in zip(store.read(layer, selection), range(2), strict=True):
                assert got.dtype == dtype
                assert got.shape == (KV, len(pages) * SIZE, DIM)
                for i, page in enumerate(pages):
                    assert torch.equal(got[:, i * SIZE : (i + 1) * SIZE], by_page[page][part])


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, SEALED + FLOATS - 1), max_size=12))
def test_reading_equals_reading_one_page_at_a_time(pages: list[int]) -> None:
    store, _ = filled(plan_of(SCHEMES[5], SCHEMES[1]))
    for layer in range(2):
        whole = store.read(layer, store.select(pages))
        single = [store.read(layer, store.select([page])) for page in pages]
        for got, parts in zip(whole, zip(*single, strict=True) if single else [[], []], strict=True):
            assert torch.equal(got, torch.cat(list(parts), 1) if parts else got.new_empty(KV, 0, DIM))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: "compute" if s is None else s.label())
def test_dumped_pages_come_back_bit_for_bit_in_other_pages(scheme: KvScheme | None) -> None:
    store, expected = filled(plan_of(scheme, None, KvScheme("fp8_e4m3", True, "token", None, True)))
    for page, other in ((1, 4), (6, 9)):
        kept = store.dump(page)
        kind = "sealed" if page < SEALED else "float"
        assert sum(tensor.nbytes for tensor in kept.values()) == store.page_bytes(kind)
        store.restore(other, kept)
        for layer, by_page in enumerate(expected):
            for got, part in zip(store.read(layer, store.select([other])), by_page[page], strict=True):
                assert torch.equal(got, part)


def test_bytes_are_known_before_there_is_a_store() -> None:
    plan = plan_of(*SCHEMES)
    store = new_store(plan, torch.bfloat16)
    for kind in ("sealed", "float"):
        assert page_bytes(plan, kind, KV, DIM, SIZE, torch.bfloat16) == store.page_bytes(kind)
    assert store.nbytes == SEALED * store.page_bytes("sealed") + FLOATS * store.page_bytes("float")
    values = KV * SIZE * DIM
    assert page_bytes(plan_of(KvScheme("int8")), "sealed", KV, DIM, SIZE, torch.float32) == 2 * values
    by_token = plan_of(KvScheme("int4", False, "token", None, True))
    assert page_bytes(by_token, "sealed", KV, DIM, SIZE, torch.float32) == 2 * (values // 2 + KV * SIZE * 4)


def test_c39_scales_of_another_shape_are_refused() -> None:
    scheme = KvScheme("int8", True, "head")
    plan = KvPlan((LayerKv(scheme, None),), (KvScales(torch.ones(3, 1, 1)),))
    with pytest.raises(UsageError, match=r"layer 0 keys: int8-head takes scales of shape \[2, 1, 1\], got \[3, 1, 1\]"):
        new_store(plan)


def test_c65_a_scheme_that_does_not_fit_the_heads_is_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match=r"choose from 2, 4, 8$"):
        new_store(plan_of(KvScheme("int8", True, "group", 3, True)))
