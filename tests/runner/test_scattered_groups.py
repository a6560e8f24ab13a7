"""Groups that are scattered over the columns (act-order): dequantized and multiplied as a literal loop does."""

import pytest
import torch

from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.scheme import ActivationScheme, QuantizedTensor, Scheme
from cann_llm_quant.runner.kernels.reordered import ReorderedLinear
from cann_llm_quant.runner.linear import packed_linear

OUT, COLUMNS, GROUP = 16, 64, 32


def scattered(symmetric: bool, groups: list[int]) -> QuantizedTensor:
    g = torch.Generator().manual_seed(1)
    codes = torch.randint(-8, 8, (OUT, COLUMNS), generator=g, dtype=torch.int8)
    scale = torch.rand(OUT, 2, generator=g) * 0.1 + 0.01
    zero = None if symmetric else torch.randint(-8, 8, (OUT, 2), generator=g, dtype=torch.int8)
    index = torch.tensor(groups, dtype=torch.int32)
    return QuantizedTensor(codes, scale, zero, Scheme("int4", symmetric, "group", GROUP), group_index=index)


def by_hand(weight: QuantizedTensor) -> torch.Tensor:
    w = torch.empty(OUT, COLUMNS, dtype=torch.float64)
    for n in range(OUT):
        for k in range(COLUMNS):
            group = int(weight.group_index[k])
            zero = 0 if weight.zero_point is None else int(weight.zero_point[n, group])
            w[n, k] = (int(weight.codes[n, k]) - zero) * float(weight.scale[n, group])
    return w


def alternating() -> list[int]:
    return [k % 2 for k in range(COLUMNS)]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("groups", [alternating(), [0] * 40 + [1] * 24], ids=["equal", "unequal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c20_products_follow_each_columns_group(symmetric: bool, groups: list[int], dtype: torch.dtype) -> None:
    weight = scattered(symmetric, groups)
    expected = by_hand(weight)
    torch.testing.assert_close(weight.dequantize().double(), expected, rtol=1e-6, atol=1e-7)
    linear = packed_linear(weight, torch.ones(OUT), device=torch.device("cpu"), dtype=dtype)
    assert isinstance(linear, ReorderedLinear) is (groups == alternating())
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(2)).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(linear(x).double(), x.double() @ expected.t() + 1, rtol=tolerance, atol=tolerance)


def test_quantized_inputs_are_gathered_with_their_own_scales() -> None:
    weight = scattered(True, alternating())
    inputs = InputQuantizer(ActivationScheme("int8"))
    linear = packed_linear(weight, None, device=torch.device("cpu"), dtype=torch.float32, inputs=inputs)
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(3))
    expected = inputs(x).dequantize().double() @ by_hand(weight).t()
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-4, atol=1e-4)
