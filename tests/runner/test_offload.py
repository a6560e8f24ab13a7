"""Contents come back bit for bit from either tier; budgets hold; the folder goes away."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_pages import SimulatedEngine
from torch import Tensor

from cann_llm_quant.errors import CannQuantError, UsageError
from cann_llm_quant.runner.offload import OffloadStore, usable_bytes
from cann_llm_quant.runner.page_policy import PagePolicy
from cann_llm_quant.runner.page_table import Move, Outside, PageTable
from cann_llm_quant.runner.prefix_cache import PrefixCache
from cann_llm_quant.runner.scheduler import Limits, Scheduler
from cann_llm_quant.runner.sequence import Sequence


def page(value: int, size: int = 64) -> dict[str, Tensor]:
    return {"0.k": torch.full((size,), value, dtype=torch.uint8)}


def test_every_dtype_and_shape_comes_back_from_both_tiers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6)
    tensors = {
        "0.k": x.to(torch.float8_e4m3fn),
        "0.v": x.to(torch.float8_e5m2),
        "1.k": x.to(torch.bfloat16).transpose(1, 2),
        "1.v": x.to(torch.float16)[:, ::2],
        "1.scale": x,
        "2.k": torch.randint(-128, 128, (2, 4), dtype=torch.int8),
        "2.v": torch.randint(0, 256, (2, 4), dtype=torch.uint8),
    }
    for host in (0, 10_000):
        with OffloadStore(host_bytes=host, disk_bytes=10_000, folder=tmp_path) as store:
            store.put(1, tensors)
            assert (store.host_used > 0) == (host > 0)
            back = store.take(1)
            assert store.pages == store.host_used == store.disk_used == 0
        assert back.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert back[name].dtype == tensor.dtype
            assert back[name].shape == tensor.shape
            assert torch.equal(back[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))


def test_a_copy_is_kept_not_a_view_of_the_pool() -> None:
    store, pool = OffloadStore(host_bytes=100), torch.zeros(4, 8)
    store.put(1, {"k": pool[1]})
    pool.fill_(7)
    assert torch.equal(store.take(1)["k"], torch.zeros(8))


def test_the_oldest_goes_to_disk_when_the_host_is_full(tmp_path: Path) -> None:
    with OffloadStore(host_bytes=128, disk_bytes=128, folder=tmp_path) as store:
        for handle in range(4):
            store.put(handle, page(handle))
        assert (store.host_used, store.disk_used, store.pages) == (128, 128, 4)
        names = sorted(path.name for path in tmp_path.rglob("*.safetensors"))
        assert names == ["page-0.safetensors", "page-1.safetensors"]
        with pytest.raises(ValueError, match="64 bytes does not fit: 0 are left on disk"):
            store.put(4, page(4))
        assert [int(store.take(handle)["0.k"][0]) for handle in (3, 0, 2)] == [3, 0, 2]
        store.drop(1)
        assert (store.host_used, store.disk_used, store.pages) == (0, 0, 0)
        assert not list(tmp_path.rglob("*.safetensors"))


def test_close_removes_the_folder_and_all_that_is_left(tmp_path: Path) -> None:
    store = OffloadStore(host_bytes=64, disk_bytes=64, folder=tmp_path)
    store.put(0, page(0))
    store.put(1, page(1))
    assert list(tmp_path.iterdir())
    store.close()
    store.close()
    assert not list(tmp_path.iterdir())
    assert store.pages == 0


def test_without_a_disk_budget_there_is_no_folder(tmp_path: Path) -> None:
    with OffloadStore(host_bytes=64, folder=tmp_path):
        assert not list(tmp_path.iterdir())


def test_errors_name_the_folder_or_the_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere.*name another folder"):
        OffloadStore(host_bytes=0, disk_bytes=64, folder=tmp_path / "nowhere")
    with pytest.raises(UsageError, match="must not be negative"):
        OffloadStore(host_bytes=-1)
    with OffloadStore(host_bytes=0, disk_bytes=128, folder=tmp_path) as store:
        store.put(1, page(1))
        next(tmp_path.rglob("*.safetensors")).write_bytes(b"broken")
        with pytest.raises(CannQuantError, match=r"page-1.safetensors cannot be read back"):
            store.take(1)


@settings(max_examples=60, deadline=None)
@given(
    host=st.integers(0, 6),
    disk=st.integers(0, 6),
    plan=st.lists(st.tuples(st.booleans(), st.integers(1, 3), st.integers(0, 9)), max_size=25),
)
def test_what_is_promised_always_fits(host: int, disk: int, plan: list[tuple[bool, int, int]]) -> None:
    """Pages of 1 to 3 units come and go; as long as the promise is kept, no put fails."""
    promise = usable_bytes(host, disk, 3)
    sizes: dict[int, int] = {}
    with OffloadStore(host_bytes=host, disk_bytes=disk) as store:
        for handle, (comes, size, which) in enumerate(plan):
            if comes and sum(sizes.values()) + size <= promise:
                store.put(handle, page(handle, size))
                sizes[handle] = size
            elif sizes:
                gone = sorted(sizes)[which % len(sizes)]
                assert store.take(gone)["0.k"].tolist() == [gone] * sizes.pop(gone)
            assert store.host_used + store.disk_used == sum(sizes.values())
            assert store.host_used <= host
            assert store.disk_used <= disk


class TensorPages:
    """Pages of 16 tokens as tensors, filled from the simulated engine's cells."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine

    def dump(self, page: int) -> dict[str, Tensor]:
        cells = self.engine.pages[page]
        return {"key": torch.tensor([*cells] + [-1] * (16 - len(cells))), "token": torch.tensor([*cells.values()])}

    def restore(self, page: int, tensors: Mapping[str, Tensor]) -> None:
        keys = [key for key in tensors["key"].tolist() if key >= 0]
        self.engine.pages[page] = dict(zip(keys, tensors["token"].tolist(), strict=True))


def test_swapped_sequences_and_evicted_prefixes_pass_through_both_tiers(tmp_path: Path) -> None:
    table = PageTable(
        sealed=0,
        floats=6,
        prefix=PrefixCache(16),
        outside=Outside(usable_bytes(700, 1500, 256), sealed_bytes=256, float_bytes=256),
    )
    engine = SimulatedEngine(Scheduler(Limits(preemption="swap"), table, PagePolicy(16)))
    kinds = set[str]()
    with OffloadStore(host_bytes=700, disk_bytes=1500, folder=tmp_path) as store:
        contents = TensorPages(engine)

        def apply(move: Move) -> None:
            kinds.add(move.kind)
            store.apply([move], contents)

        engine.apply = apply  # type: ignore[method-assign]
        sequences = [Sequence(n, tuple(range(n % 2 * 40, n % 2 * 40 + 20)), 40, arrival=n / 8) for n in range(5)]
        engine.add(*sequences)
        engine.run()
        assert kinds == {"out", "in", "drop"}
        assert engine.scheduler.preemptions
        assert engine.texts[0] == engine.texts[2] == engine.texts[4] != engine.texts[1] == engine.texts[3]
        engine.check_empty()
        assert store.pages == 0
