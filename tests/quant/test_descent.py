"""Coordinate descent against brute force, a literal loop in float64 and least squares of numpy."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_llm_quant.quant import rtn
from cann_llm_quant.quant.descent import descend_codes, refit_scales, row_losses
from cann_llm_quant.quant.scheme import MXFP4, QuantizedTensor, Scheme
from tests.quant.test_gptq import correlated


def loss(weight: QuantizedTensor, w: torch.Tensor, hessian: torch.Tensor) -> float:
    e = weight.dequantize().double() - w.double()
    return float((e @ hessian.double() * e).sum())


def literal_sweep(weight, w, hessian):
    """Every column in turn moved to its best code, the gradient computed anew each time."""
    codes = weight.codes.double().clone()
    width = weight.scheme.columns_per_scale(w.shape[1])
    scale = weight.scale.double().repeat_interleave(width, 1)
    zeros = 0 if weight.zero_point is None else weight.zero_point.double().repeat_interleave(width, 1)
    h = hessian.double()
    for j in hessian.diagonal().argsort(descending=True, stable=True).tolist():
        e = (codes - zeros) * scale - w.double()
        best = codes[:, j] - (e @ h[:, j]) / (h[j, j] * scale[:, j])
        codes[:, j] = best.round().clamp(weight.scheme.qmin, weight.scheme.qmax)
    return codes


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_sweep_equals_the_literal_loop(symmetric) -> None:
    w = torch.randn(12, 96, generator=torch.Generator().manual_seed(0))
    hessian = correlated(96, 300)
    weight = rtn.solve(w, Scheme("int4", symmetric, "group", 32), torch.float32)
    ours = descend_codes(weight, w, hessian).codes.double()
    literal = literal_sweep(weight, w, hessian)
    assert (ours == literal).all(1).double().mean() > 0.9


def test_a_fixed_point_is_optimal_in_every_single_code() -> None:
    w = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    hessian = correlated(8, 40)
    weight = rtn.solve(w, Scheme("int2", False, "channel", None), torch.float32)
    found = descend_codes(weight, w, hessian, sweeps=20)
    least = loss(found, w, hessian)
    for row, column, code in itertools.product(range(3), range(8), range(-2, 2)):
        codes = found.codes.clone()
        codes[row, column] = code
        other = QuantizedTensor(codes, found.scale, found.zero_point, found.scheme)
        assert loss(other, w, hessian) >= least * (1 - 1e-5)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000), tokens=st.sampled_from([4, 30, 200]), bits=st.sampled_from(["int2", "int4", "int8"])
)
def test_no_step_raises_the_loss(seed, tokens, bits) -> None:
    w = torch.randn(6, 48, generator=torch.Generator().manual_seed(seed))
    hessian = correlated(48, tokens, seed)
    weight = rtn.solve(w, Scheme(bits, False, "group", 16), torch.bfloat16)
    before = loss(weight, w, hessian)
    for step in (descend_codes, refit_scales, descend_codes):
        weight = step(weight, w, hessian)
        after = loss(weight, w, hessian)
        assert after <= before * (1 + 1e-4) + 1e-6
        before = after
    assert weight.scale.dtype == torch.bfloat16


def test_floats_descend_too() -> None:
    w = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    hessian = correlated(64, 300)
    weight = rtn.solve(w, MXFP4, torch.bfloat16)
    better = descend_codes(weight, w, hessian, sweeps=2)
    assert loss(better, w, hessian) < 0.8 * loss(weight, w, hessian)
    assert refit_scales(better, w, hessian) is better


def test_scales_are_the_least_squares_solution_where_storage_allows() -> None:
    w = torch.randn(5, 48, generator=torch.Generator().manual_seed(4))
    x = torch.randn(400, 48, generator=torch.Generator().manual_seed(5))
    weight = rtn.solve(w, Scheme("int3", False, "group", 16), torch.float32)
    refitted = refit_scales(weight, w, x.T @ x)
    levels = (weight.codes - weight.zero_point.repeat_interleave(16, 1)).double()
    for row in range(5):
        columns = [x[:, 16 * g : 16 * g + 16].double() @ levels[row, 16 * g : 16 * g + 16] for g in range(3)]
        best = np.linalg.lstsq(torch.stack(columns, 1).numpy(), (x.double() @ w[row].double()).numpy(), rcond=None)[0]
        assert refitted.scale[row].numpy() == pytest.approx(best, rel=5e-3)


def test_row_losses_sum_to_the_output_error() -> None:
    w = torch.randn(7, 32, generator=torch.Generator().manual_seed(6))
    hessian = correlated(32, 100)
    weight = rtn.solve(w, Scheme("int4", True, "group", 16), torch.float32)
    assert float(row_losses(weight, w, hessian).sum()) == pytest.approx(loss(weight, w, hessian), rel=1e-4)


def test_a_channel_that_carries_nothing_keeps_its_codes() -> None:
    w = torch.randn(4, 32, generator=torch.Generator().manual_seed(7))
    hessian = correlated(32, 100)
    hessian[5], hessian[:, 5] = 0, 0
    weight = rtn.solve(w, Scheme("int4", True, "channel", None), torch.float32)
    assert torch.equal(descend_codes(weight, w, hessian).codes[:, 5], weight.codes[:, 5])
