"""The prior against its formula, and the reason for it: few tokens must not end worse than plain rounding."""

import pytest
import torch

from cann_llm_quant.quant import rtn
from cann_llm_quant.quant.error import relative_output_error
from cann_llm_quant.quant.scheme import Scheme
from cann_llm_quant.quant.shrinkage import shrink_hessian


def test_formula() -> None:
    h = torch.tensor([[4.0, 1.0], [1.0, 2.0]])
    # k = 2 / 8, n = 5, mean of the diagonal 3: 0.05 * ((4 + 3) / 2, (2 + 3) / 2) is added
    expected = torch.tensor([[4.0 + 0.05 * 3.5, 1.0], [1.0, 2.0 + 0.05 * 2.5]])
    torch.testing.assert_close(shrink_hessian(h, 5), expected)
    assert h.tolist() == [[4.0, 1.0], [1.0, 2.0]]


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_c52_few_tokens_end_better_than_plain_rounding_on_inputs_not_seen(tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    columns, scheme = 128, Scheme("int4", True, "group", 128)
    spread = torch.empty(columns).log_normal_(0.0, 1.0, generator=generator)
    mixing = torch.eye(columns) + torch.randn(columns, columns, generator=generator) / columns**0.5
    w = torch.randn(96, columns, generator=generator)
    unseen = torch.randn(2048, columns, generator=generator) @ mixing * spread
    truth = unseen.T @ unseen
    seen = torch.randn(tokens, columns, generator=generator) @ mixing * spread
    hessian = shrink_hessian(seen.T @ seen, tokens)
    plain = rtn.solve(w, scheme, torch.bfloat16)
    searched = rtn.solve(w, scheme, torch.bfloat16, clip="mse", hessian=hessian)
    errors = [relative_output_error(w, q.dequantize(), truth) for q in (searched, plain)]
    assert errors[0] < 0.85 * errors[1]
