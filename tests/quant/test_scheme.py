import pytest
import torch

from cann_llm_quant.errors import UsageError
from cann_llm_quant.quant.rtn import solve
from cann_llm_quant.quant.scheme import fitting_group_sizes, largest_fitting_group, scheme_for


def test_c02_minus_one_is_per_channel() -> None:
    scheme = scheme_for(4, -1, symmetric=True)
    assert (scheme.strategy, scheme.group_size, scheme.bits) == ("channel", None, 4)
    q = solve(torch.randn(5, 12, generator=torch.Generator().manual_seed(0)), scheme, torch.float16)
    assert q.scale.shape == (5, 1)


@pytest.mark.parametrize("group_size", [0, -2, -128])
def test_c02_other_group_sizes_are_refused(group_size: int) -> None:
    with pytest.raises(UsageError, match=f"{group_size} is not a positive"):
        scheme_for(4, group_size, symmetric=True)


def test_unknown_bits_are_refused() -> None:
    with pytest.raises(UsageError, match=r"7 bits.*2, 3, 4, 5, 6, 8"):
        scheme_for(7, 64, symmetric=True)


def test_c01_sizes_that_fit() -> None:
    assert fitting_group_sizes(176) == [16]
    assert fitting_group_sizes(576) == [16, 32, 64]
    assert fitting_group_sizes(100) == []
    assert largest_fitting_group(176, 128) == 16
    assert largest_fitting_group(576, 128) == 64
    assert largest_fitting_group(576, 48) == 48
    assert largest_fitting_group(100, 64) is None
    with pytest.raises(UsageError, match="128 does not divide 176"):
        scheme_for(4, 128, symmetric=True).columns_per_scale(176)
