"""The corrected target against numpy's least squares on the tokens themselves."""

import numpy as np
import pytest
import torch

from cann_llm_quant.quant.drift import drift_target


def test_the_whole_correction_is_the_least_squares_answer() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 12, generator=generator)
    y = x + 0.1 * torch.randn(300, 12, generator=generator)
    r_x = torch.randn(300, 5, generator=generator)
    r_y = r_x + 0.1 * torch.randn(300, 5, generator=generator)
    w = torch.randn(5, 12, generator=generator)
    missing = (x - y) @ w.T + r_x - r_y
    target = drift_target(w, y.T @ y, missing.T @ y, strength=1.0, ridge=0.0)
    wanted = (x @ w.T + r_x - r_y).double().numpy()
    best = np.linalg.lstsq(y.double().numpy(), wanted, rcond=None)[0].T
    assert target.numpy() == pytest.approx(best, abs=1e-4)


def test_without_a_stream_only_the_input_is_corrected() -> None:
    generator = torch.Generator().manual_seed(1)
    y = torch.randn(100, 6, generator=generator)
    w = torch.randn(4, 6, generator=generator)
    # The float model's input is twice the quantized one's, so the weight has to double.
    target = drift_target(w, y.T @ y, w @ y.T @ y, strength=1.0, ridge=0.0)
    assert target.numpy() == pytest.approx((2 * w).numpy(), abs=1e-4)
    half = drift_target(w, y.T @ y, w @ y.T @ y, strength=0.5, ridge=0.0)
    assert half.numpy() == pytest.approx((1.5 * w).numpy(), abs=1e-4)


def test_a_ridge_pulls_toward_the_weight() -> None:
    w = torch.ones(2, 3)
    hessian = torch.eye(3)
    target = drift_target(w, hessian, w, strength=1.0, ridge=1.0)
    assert target.numpy() == pytest.approx(1.5 * np.ones((2, 3)))


@pytest.mark.parametrize("hessian", [torch.zeros(3, 3), torch.full((3, 3), torch.nan)])
def test_nothing_known_changes_nothing(hessian) -> None:
    w = torch.ones(2, 3)
    assert torch.equal(drift_target(w, hessian, torch.ones(2, 3)), w)
