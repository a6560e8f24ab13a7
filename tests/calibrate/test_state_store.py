"""States by slot and window come back as they were stored, whatever lies in memory and whatever in files."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_llm_quant.calibrate.state_store import StateStore
from cann_llm_quant.errors import CannQuantError

CPU = torch.device("cpu")
STATE_BYTES = 6 * 4


def state(value: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(6, dtype=torch.float32) + value).to(dtype).view(1, 2, 3)


actions = st.lists(
    st.tuples(st.sampled_from(["put", "drop"]), st.sampled_from(["a", "b"]), st.integers(0, 2)), max_size=25
)


@settings(max_examples=60, deadline=None)
@given(actions, st.integers(0, 4))
def test_it_behaves_like_a_dictionary_and_keeps_its_budget(what: list[tuple[str, str, int]], states: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = StateStore(3, budget=states * STATE_BYTES, scratch=Path(folder), device=CPU)
        expected: dict[tuple[str, int], torch.Tensor] = {}
        for number, (action, slot, window) in enumerate(what):
            if action == "put":
                expected[slot, window] = state(number)
                store.put(slot, window, state(number))
            else:
                expected = {key: value for key, value in expected.items() if key[0] != slot}
                store.drop(slot)
            files = len(list(Path(folder).iterdir()))
            assert len(expected) - files <= states
        for (slot, window), value in expected.items():
            assert torch.equal(store.get(slot, window), value)


def test_half_precision_survives_a_file(tmp_path: Path) -> None:
    store = StateStore(1, budget=0, scratch=tmp_path, device=CPU)
    store.put("a", 0, state(3, torch.bfloat16))
    assert torch.equal(store.get("a", 0), state(3, torch.bfloat16))
    assert [s.dtype for s in store.all("a")] == [torch.bfloat16]
    with pytest.raises(KeyError):
        store.get("a", 1)


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    store = StateStore(1, budget=0, scratch=tmp_path / "missing", device=CPU)
    with pytest.raises(CannQuantError, match=r"cannot write .*missing.*--activation-budget"):
        store.put("a", 0, state(0))
