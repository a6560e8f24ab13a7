import math

import pytest
import torch

from cann_llm_quant.quant.error import block_output_error, output_error, relative_output_error


def test_equals_the_outputs_of_the_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 24, generator=generator, dtype=torch.float64)
    w = torch.randn(17, 24, generator=generator, dtype=torch.float64)
    w_hat = w + 0.1 * torch.randn(17, 24, generator=generator, dtype=torch.float64)
    h = (x.T @ x).float()
    expected = float(((x @ (w_hat - w).T) ** 2).sum())
    assert abs(output_error((w_hat - w).float(), h) / expected - 1) < 1e-5
    relative = expected / float(((x @ w.T) ** 2).sum())
    assert abs(relative_output_error(w.float(), w_hat.float(), h) / relative - 1) < 1e-5


def test_blocks_of_rows_add_up() -> None:
    delta = torch.ones(5000, 1000)
    assert output_error(delta, torch.eye(1000)) == 5_000_000


def test_no_energy_is_no_error() -> None:
    assert relative_output_error(torch.ones(2, 3), torch.zeros(2, 3), torch.zeros(3, 3)) == 0.0


@pytest.mark.parametrize(
    ("columns", "width", "block"), [(64, 16, 16), (96, 64, 96), (192, 192, 96), (7, 7, 7), (131, 131, 1)]
)
def test_block_error_leaves_out_products_between_blocks(columns: int, width: int, block: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(40, columns, generator=generator)
    delta = torch.randn(9, columns, generator=generator)
    expected = sum(
        float((x[:, c : c + block].double() @ delta[:, c : c + block].double().T).square().sum())
        for c in range(0, columns, block)
    )
    assert math.isclose(block_output_error(delta, x.T @ x, width), expected, rel_tol=1e-4)
