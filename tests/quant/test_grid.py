"""Grids against compressed-tensors' own quantizer and a slow search, and where numbers end."""

import math

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cann_llm_quant.quant.grid import (
    choose_scale_dtype,
    minmax_grid,
    minmax_scale,
    quantize_codes,
    scale_fits,
    search_grid,
)
from cann_llm_quant.quant.rtn import solve
from cann_llm_quant.quant.scheme import QuantizedTensor, Scheme, scheme_for


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gram(width: int, seed: int = 1) -> Tensor:
    x = normal(4 * width, width, seed=seed) @ normal(width, width, seed=seed + 1)
    return x.T @ x


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [16, -1])
def test_minmax_grid_equals_compressed_tensors(symmetric: bool, bits: int, group_size: int) -> None:
    scheme = scheme_for(bits, group_size, symmetric)
    w = normal(6, 48)
    w[1] = w[1].abs() + 0.5
    scale, zero_point = minmax_grid(w, scheme, torch.float32)
    width = scheme.columns_per_scale(48)
    grouped = w.view(6, -1, width)
    args = QuantizationArgs(num_bits=bits, symmetric=symmetric, strategy="channel")
    their_scale, their_zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    torch.testing.assert_close(scale, their_scale.view_as(scale), rtol=1e-6, atol=0)
    if zero_point is None:
        assert symmetric
    else:
        assert torch.equal(zero_point.float(), their_zero.view_as(zero_point).float())


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=16, max_size=16),
    bits=st.sampled_from([2, 3, 4, 5, 6, 8]),
    symmetric=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_codes_are_nearest_on_the_rounded_grid(
    values: list[float], bits: int, symmetric: bool, dtype: torch.dtype
) -> None:
    scheme = scheme_for(bits, 8, symmetric)
    w = torch.tensor(values).view(2, 8)
    q = solve(w, scheme, dtype)
    assert q.scale.dtype == dtype
    assert bool(torch.isfinite(q.scale).all())
    assert bool((q.scale.float() >= torch.finfo(dtype).tiny).all())
    for i in range(2):
        s = float(q.scale[i, 0])
        z = 0 if q.zero_point is None else int(q.zero_point[i, 0])
        levels = [(code - z) * s for code in range(scheme.qmin, scheme.qmax + 1)]
        for j in range(8):
            x = float(w[i, j])
            chosen = (int(q.codes[i, j]) - z) * s
            best = min(abs(level - x) for level in levels)
            assert abs(chosen - x) <= best + 1e-5 * (s + abs(x))


def test_ties_round_to_even() -> None:
    w = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 100.0, -100.0, 0.0]])
    scale = torch.tensor([[1.0]])
    codes = quantize_codes(w, scale, None, scheme_for(4, 8, symmetric=True))
    assert codes.tolist() == [[0, 2, 2, 0, -2, 7, -8, 0]]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("clip", ["minmax", "mse"])
def test_c13_zero_groups_stay_exactly_zero(symmetric: bool, dtype: torch.dtype, clip: str) -> None:
    w = normal(4, 32)
    w[2] = 0
    w[3, :16] = 0
    q = solve(w, scheme_for(4, 16, symmetric), dtype, clip=clip, hessian=gram(32))  # type: ignore[arg-type]
    assert bool(torch.isfinite(q.scale).all())
    assert bool((q.scale > 0).all())
    assert bool((q.dequantize()[2] == 0).all())
    assert bool((q.dequantize()[3, :16] == 0).all())
    if symmetric:
        assert bool((q.codes[2] == 0).all())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_c15_subnormal_scales_are_floored(symmetric: bool, dtype: torch.dtype) -> None:
    w = torch.full((2, 16), 1e-39)
    w[1] = -1e-40
    for clip in ("minmax", "mse"):
        q = solve(w, scheme_for(4, 16, symmetric), dtype, clip=clip)  # type: ignore[arg-type]
        assert bool((q.scale.float() >= torch.finfo(dtype).tiny).all())
        assert bool(torch.isfinite(1 / q.scale.float()).all())
        assert bool((q.dequantize().abs() <= 2e-39).all())


def test_c08_scales_that_half_cannot_hold() -> None:
    scheme = scheme_for(4, 16, symmetric=True)
    # The case's own measurements: amax 1e-6 is off by 17 % in fp16 and 0.3 % in bf16, 1e-8 becomes 0.
    assert not scale_fits(torch.tensor([1e-6 / 7.5]), torch.float16)
    assert scale_fits(torch.tensor([1e-6 / 7.5]), torch.bfloat16)
    assert not scale_fits(torch.tensor([1e-8 / 7.5]), torch.float16)
    assert not scale_fits(torch.tensor([7e4]), torch.float16)
    assert not scale_fits(torch.tensor([1e-39]), torch.bfloat16)
    assert scale_fits(torch.tensor([0.0, 0.1]), torch.float16)
    w = normal(4, 32)
    assert choose_scale_dtype(w, scheme, torch.float16) == torch.float16
    w[1, :16] *= 1e-7
    assert choose_scale_dtype(w, scheme, torch.float16) == torch.bfloat16
    w[1, :16] = 1e-38
    assert choose_scale_dtype(w, scheme, torch.float16) == torch.float32
    assert choose_scale_dtype(normal(2, 16) * 1e7, scheme, torch.float16) == torch.bfloat16
    assert float(minmax_scale(torch.full((1, 16), 7.5), scheme)) == 1.0


def test_c08_scales_that_are_not_finite_fit_nowhere() -> None:
    for value in (math.inf, math.nan):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert not scale_fits(torch.tensor([1.0, value]), dtype)


@pytest.mark.parametrize("clip", ["minmax", "mse"])
def test_c08_a_range_wider_than_float32_has_a_finite_scale(clip: str) -> None:
    """high - low = 6e38 is infinite in float32; a fifteenth of it is 4e37."""
    w = torch.linspace(-3, 3, 16)[None] * 1e38
    scheme = scheme_for(4, 16, symmetric=False)
    assert float(minmax_scale(w, scheme)) == pytest.approx(4e37, rel=1e-6)
    assert scale_fits(minmax_scale(w, scheme), torch.bfloat16)
    assert choose_scale_dtype(w, scheme, torch.float16) == torch.bfloat16
    q = solve(w, scheme, torch.float32, clip=clip)  # type: ignore[arg-type]
    assert float((q.dequantize() - w).abs().max()) <= 0.51 * 4e37


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=8, max_size=8),
    st.sampled_from([2, 4, 8]),
)
def test_asymmetric_scale_is_the_rounded_quotient(values: list[float], bits: int) -> None:
    w = torch.tensor([values])
    low, high = min(0.0, float(w.min())), max(0.0, float(w.max()))
    expected = (high - low) / (2**bits - 1)
    assert float(minmax_scale(w, scheme_for(bits, 8, symmetric=False))) == pytest.approx(expected, rel=2e-7, abs=1e-44)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_float64_source_has_float32_scales(symmetric: bool) -> None:
    w = normal(4, 32).double()
    scheme = scheme_for(4, 16, symmetric)
    dtype = choose_scale_dtype(w, scheme, torch.float64)
    assert dtype == torch.float32
    q = solve(w, scheme, dtype, clip="mse")
    assert torch.equal(q.codes, solve(w.float(), scheme, dtype, clip="mse").codes)
    assert choose_scale_dtype(w * 1e-39, scheme, torch.float64) == torch.float32
    for grid in (minmax_grid, search_grid):
        with pytest.raises(ValueError, match="float64"):
            grid(w, scheme, torch.float64)


def dense_cost(w: Tensor, q: QuantizedTensor, weight: Tensor | None, hessian: Tensor | None) -> Tensor:
    """The criterion written out in float64, row by row and group by group; `[rows, groups]`."""
    e = (q.dequantize().double() - w.double()).view(w.shape[0], q.scale.shape[1], -1)
    width = e.shape[-1]
    cost = torch.zeros(e.shape[:2], dtype=torch.float64)
    for i in range(e.shape[0]):
        for g in range(e.shape[1]):
            columns = slice(g * width, (g + 1) * width)
            if hessian is not None:
                cost[i, g] = e[i, g] @ hessian[columns, columns].double() @ e[i, g]
            elif weight is not None:
                cost[i, g] = (weight[columns].double() * e[i, g] ** 2).sum()
            else:
                cost[i, g] = (e[i, g] ** 2).sum()
    return cost


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [16, -1])
@pytest.mark.parametrize("criterion", ["plain", "importance", "hessian"])
def test_search_is_never_worse_than_minmax_by_its_own_criterion(
    symmetric: bool, group_size: int, criterion: str
) -> None:
    scheme = scheme_for(4, group_size, symmetric)
    w = normal(40, 64) ** 3
    hessian = gram(64) if criterion == "hessian" else None
    weight = normal(64, seed=3).square() if criterion == "importance" else None

    def cost(grid: tuple[Tensor, Tensor | None]) -> Tensor:
        q = QuantizedTensor(quantize_codes(w, *grid, scheme), *grid, scheme)
        return dense_cost(w, q, weight, hessian)

    before = cost(minmax_grid(w, scheme, torch.bfloat16))
    after = cost(search_grid(w, scheme, torch.bfloat16, importance=weight, hessian=hessian))
    assert bool((after <= before * (1 + 1e-5)).all())
    assert float(after.sum()) < 0.98 * float(before.sum())


@pytest.mark.parametrize("symmetric", [True, False])
def test_search_finds_the_best_of_its_candidates(symmetric: bool) -> None:
    """Without refinement the result is the exhaustive minimum over the shrunken ranges, group by group."""
    scheme = scheme_for(3, 8, symmetric)
    w, hessian = normal(5, 24) ** 3, gram(24)
    scale, zero_point = search_grid(w, scheme, torch.float16, hessian=hessian, steps=7, shrink_to=0.4, refine=())
    codes = quantize_codes(w, scale, zero_point, scheme)
    found = dense_cost(w, QuantizedTensor(codes, scale, zero_point, scheme), None, hessian)
    best = torch.full_like(found, math.inf)
    for factor in torch.linspace(1, 0.4, 7):
        grid = minmax_grid(w.view(-1, 8) * factor, scheme, torch.float16)
        grid = (grid[0].view(5, 3), None if grid[1] is None else grid[1].view(5, 3))
        q = QuantizedTensor(quantize_codes(w, *grid, scheme), *grid, scheme)
        best = torch.minimum(best, dense_cost(w, q, None, hessian))
    torch.testing.assert_close(found, best, rtol=1e-4, atol=1e-9)


def test_wide_groups_are_judged_in_runs_of_128_columns() -> None:
    """A channel of 256 columns: correlations across column 128 play no part, so both halves weigh alone."""
    scheme = scheme_for(4, -1, symmetric=False)
    w, hessian = normal(3, 256) ** 3, gram(256)
    cut = torch.block_diag(hessian[:128, :128], hessian[128:, 128:])
    for whole, halves in zip(
        search_grid(w, scheme, torch.bfloat16, hessian=hessian),
        search_grid(w, scheme, torch.bfloat16, hessian=cut),
        strict=True,
    ):
        assert whole is not None
        assert halves is not None
        assert torch.equal(whole, halves)


@pytest.mark.parametrize("hessian", [None, gram(32)], ids=["plain", "hessian"])
def test_one_scale_for_the_whole_matrix(hessian: Tensor | None) -> None:
    scheme = Scheme("int8", False, "tensor", None)
    w = normal(7, 32) ** 3
    q = solve(w, scheme, torch.float32, clip="mse", hessian=hessian)
    plain = solve(w, scheme, torch.float32)
    assert q.scale.shape == (1, 1)
    assert q.zero_point is not None
    assert q.zero_point.shape == (1, 1)
    h = torch.eye(32) if hessian is None else hessian
    errors = [float(((d := p.dequantize().double() - w) @ h.double() * d).sum()) for p in (q, plain)]
    assert errors[0] <= errors[1]


def test_search_does_not_depend_on_how_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = scheme_for(4, 16, symmetric=False)
    w, importance = normal(13, 64), normal(64).square()
    whole = search_grid(w, scheme, torch.bfloat16, importance=importance)
    monkeypatch.setattr("cann_llm_quant.quant.grid._CHUNK_ELEMENTS", 100)
    for a, b in zip(whole, search_grid(w, scheme, torch.bfloat16, importance=importance), strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


@pytest.mark.parametrize("criterion", ["plain", "hessian"])
def test_c16_same_bits_with_one_and_two_threads(criterion: str) -> None:
    scheme = scheme_for(4, 64, symmetric=False)
    w, hessian = normal(256, 256), gram(256) if criterion == "hessian" else None
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(solve(w, scheme, torch.bfloat16, clip="mse", hessian=hessian))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0].codes, results[1].codes)
    assert torch.equal(results[0].scale, results[1].scale)
