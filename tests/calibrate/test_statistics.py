"""Statistics against float64 sums, and their independence from everything but the order of windows."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_llm_quant.calibrate.statistics import StatisticsCollector


def test_sums_equal_float64_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    windows = [torch.randn(n, 12, generator=generator) for n in (5, 1, 9)]
    collector = StatisticsCollector(["down"])
    for x in windows:
        collector.observe("down", x)
    measured = collector.finish()["down"]
    x = torch.cat(windows).double()
    torch.testing.assert_close(measured.hessian.double(), x.T @ x, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(measured.mean_abs.double(), x.abs().mean(0), rtol=1e-6, atol=0)
    assert torch.equal(measured.amax.double(), x.abs().amax(0))
    assert measured.tokens == 15


def test_wide_sites_are_summed_by_strips_into_the_same_symmetric_matrix() -> None:
    x = torch.randn(40, 301, generator=torch.Generator().manual_seed(0))
    collector = StatisticsCollector(["down"])
    collector.observe("down", x[:25])
    collector.observe("down", x[25:])
    hessian = collector.finish()["down"].hessian
    torch.testing.assert_close(hessian.double(), x.double().T @ x.double(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(hessian, hessian.T, rtol=1e-6, atol=1e-6)


def test_only_wanted_sites_are_kept_and_an_unseen_expert_is_absent() -> None:
    collector = StatisticsCollector(["experts.0.down", "experts.1.down"])
    collector.observe("experts.0.down", torch.ones(2, 3))
    collector.observe("qkv", torch.ones(2, 3))
    assert list(collector.finish()) == ["experts.0.down"]


def test_bf16_input_is_accumulated_in_float32() -> None:
    x = torch.full((1000, 2), 1.0, dtype=torch.bfloat16)
    collector = StatisticsCollector(["o"])
    collector.observe("o", x)
    collector.observe("o", x)
    assert collector.finish()["o"].hessian.tolist() == [[2000.0, 2000.0], [2000.0, 2000.0]]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 16))
def test_the_sample_is_evenly_spaced_and_does_not_depend_on_windows(sizes: list[int], limit: int) -> None:
    total = sum(sizes)
    x = torch.arange(total, dtype=torch.float32)[:, None].repeat(1, 2)
    collector = StatisticsCollector(["o"], sample_rows=limit)
    for window in x.split(sizes):
        collector.observe("o", window)
    sample = collector.finish()["o"].sample
    assert sample is not None
    stride = next(2**power for power in range(12) if -(-total // 2**power) <= limit)
    assert torch.equal(sample, x[::stride])


def test_no_rows_are_kept_unless_asked_for() -> None:
    collector = StatisticsCollector(["o"])
    collector.observe("o", torch.ones(3, 2))
    assert collector.finish()["o"].sample is None
