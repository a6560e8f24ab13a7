"""Error feedback against the literal optimal brain surgeon in float64, and on Hessians that break naive versions."""

import pytest
import torch

from cann_llm_quant.quant import rtn
from cann_llm_quant.quant.error import output_error
from cann_llm_quant.quant.gptq import factorize, feed_back
from cann_llm_quant.quant.scheme import MXFP4, NVFP4, Scheme

SCHEMES = [
    Scheme("int4", True, "group", 16),
    Scheme("int4", False, "group", 16),
    Scheme("int3", False, "channel", None),
    Scheme("int8", True, "tensor", None),
    Scheme("fp8_e4m3", True, "channel", None),
    Scheme("fp8_e4m3", True, "tile", None),
    MXFP4,
    NVFP4,
]


def correlated(columns: int, tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) * torch.logspace(0, -1.5, columns)
    x = torch.randn(tokens, columns, generator=generator) @ mix
    return x.T @ x


def surgeon(w, hessian, weight, damping):
    """Optimal brain surgeon: columns by falling diagonal, the inverse updated after each."""
    h = hessian.double().clone()
    h.diagonal().add_(damping * h.diagonal().mean())
    inverse = torch.linalg.inv(h)
    work, out = w.double().clone(), torch.empty_like(w, dtype=torch.float64)
    scale = weight.scale.double()
    zeros = torch.zeros_like(scale) if weight.zero_point is None else weight.zero_point.double()
    width = weight.scheme.columns_per_scale(w.shape[1])
    rows = scale.shape[0] == w.shape[0]
    for j in hessian.diagonal().argsort(descending=True, stable=True).tolist():
        s, z = (t[:, j // width] if rows else t[0, 0] for t in (scale, zeros))
        q = ((work[:, j] / s + z).round().clamp(weight.scheme.qmin, weight.scheme.qmax) - z) * s
        out[:, j] = q
        work -= torch.outer((work[:, j] - q) / inverse[j, j], inverse[j])
        inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return out


@pytest.mark.parametrize("scheme", SCHEMES[:4])
def test_blocked_updates_equal_the_literal_surgeon(scheme) -> None:
    w = torch.randn(24, 160, generator=torch.Generator().manual_seed(1))
    hessian = correlated(160, 400)
    rounded = rtn.solve(w, scheme, torch.float32)
    factor = factorize(hessian, 0.01)
    assert factor is not None
    ours = feed_back(rounded, w, factor).dequantize().double()
    literal = surgeon(w, hessian, rounded, 0.01)
    # A value within float32 noise of a rounding boundary may fall on its other side, and its row then differs.
    equal = (ours - literal).abs().amax(1) < 1e-4
    assert equal.double().mean() > 0.9
    losses = [float(((e - w.double()) @ hessian.double() * (e - w.double())).sum()) for e in (ours, literal)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.label())
def test_feedback_lowers_the_output_error_on_every_grid(scheme) -> None:
    w = torch.randn(48, 128, generator=torch.Generator().manual_seed(2))
    hessian = correlated(128, 512, seed=3)
    rounded = rtn.solve(w, scheme, torch.bfloat16)
    factor = factorize(hessian)
    assert factor is not None
    better = feed_back(rounded, w, factor)
    assert better.codes.dtype == rounded.codes.dtype
    assert output_error(better.dequantize() - w, hessian) < 0.8 * output_error(rounded.dequantize() - w, hessian)


def test_stacked_matrices_are_solved_as_if_alone() -> None:
    generator = torch.Generator().manual_seed(4)
    a, b = torch.randn(8, 64, generator=generator), torch.randn(16, 64, generator=generator)
    factor = factorize(correlated(64, 200))
    assert factor is not None
    scheme = Scheme("int4", False, "group", 32)
    both = feed_back(rtn.solve(torch.cat([a, b]), scheme, torch.float16), torch.cat([a, b]), factor)
    alone = feed_back(rtn.solve(b, scheme, torch.float16), b, factor)
    assert torch.equal(both.codes[8:], alone.codes)


@pytest.mark.parametrize("damping", [0.0, 0.01])
def test_c05_fewer_tokens_than_columns_raise_the_damping(damping) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(5))
    factor = factorize(x.T @ x, damping)
    assert factor is not None
    assert factor.damping >= damping
    assert torch.isfinite(factor.upper).all()
    if damping == 0.0:
        assert factor.damping > 0


def test_c05_a_hessian_of_zeros_cannot_be_factorized() -> None:
    assert factorize(torch.zeros(16, 16)) is None


def test_c05_a_hessian_with_nan_is_not_damped_into_shape() -> None:
    hessian = correlated(16, 64)
    hessian[3, 3] = torch.nan
    assert factorize(hessian) is None


def test_c07_extreme_features_leave_weights_finite() -> None:
    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(6))
    x[:, 5] *= 1e12
    x[:, 9] *= 1e-12
    w = torch.randn(8, 32, generator=torch.Generator().manual_seed(7))
    rounded = rtn.solve(w, Scheme("int4", True, "channel", None), torch.float32)
    factor = factorize(x.T @ x, 0.0)
    assert factor is not None
    assert torch.isfinite(feed_back(rounded, w, factor).dequantize()).all()


def test_a_broken_pivot_is_counted_and_passes_nothing_on() -> None:
    factor = factorize(correlated(16, 64))
    assert factor is not None
    upper = factor.upper.clone()
    upper[3, 3] = 0.0
    broken = type(factor)(upper, factor.order, factor.damping)
    w = torch.randn(4, 16, generator=torch.Generator().manual_seed(8))
    rounded = rtn.solve(w, Scheme("int4", True, "channel", None), torch.float32)
    assert broken.broken_pivots == 1
    assert torch.isfinite(feed_back(rounded, w, broken).dequantize()).all()
