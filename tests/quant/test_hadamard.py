"""Hadamard matrices by their definition, and the fast rotation against the matrix written out."""

import pytest
import torch
from torch import Tensor

from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.quant.hadamard import hadamard_factors, random_rotation

ORDERS = [1, 2, 4, 12, 20, 24, 28, 36, 44, 60, 64, 76, 84, 96, 108, 128, 576, 640, 896, 1536]


def written_out(size: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for factor in hadamard_factors(size):
        matrix = torch.kron(matrix, factor)
    return matrix


@pytest.mark.parametrize("size", ORDERS)
def test_rows_of_plus_and_minus_one_are_orthogonal(size: int) -> None:
    h = written_out(size)
    assert h.shape == (size, size)
    assert bool((h.abs() == 1).all())
    assert torch.equal(h @ h.T, size * torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("size", [3, 6, 10, 30, 92, 2 * 23])
def test_other_orders_are_refused(size: int) -> None:
    with pytest.raises(UnsupportedError, match=f"order {size} "):
        hadamard_factors(size)


@pytest.mark.parametrize(("size", "parts"), [(8, 1), (12, 3), (72, 1), (256, 2), (4096, 1)])
def test_rotating_is_multiplying_by_the_matrix(size: int, parts: int) -> None:
    rotation = random_rotation(size, seed=size)
    x = torch.randn(5, parts * size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    literal = rotation.signs.unsqueeze(1) * written_out(size) / size**0.5
    expected = torch.cat([part @ literal for part in x.split(size, dim=1)], dim=1)
    torch.testing.assert_close(rotation.rotate(x), expected)
    torch.testing.assert_close(rotation.rotate(x).square().sum(1), x.square().sum(1))


def test_signs_come_from_the_seed_and_one_outlier_is_spread() -> None:
    a, b, c = (random_rotation(64, seed) for seed in (5, 5, 6))
    assert torch.equal(a.signs, b.signs)
    assert not torch.equal(a.signs, c.signs)
    outlier = torch.zeros(1, 64)
    outlier[0, 7] = 100.0
    assert torch.allclose(a.rotate(outlier).abs(), torch.full((1, 64), 12.5))
