"""The integer kernel against int64 sums, at the corners where float32 would begin to round."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_llm_quant.models.decoder import DenseLinear
from cann_llm_quant.models.quantized_input import QuantizedInputLinear
from cann_llm_quant.quant.activation_ranges import stored_range
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.scheme import ActivationScheme, QuantizedTensor, Scheme
from cann_llm_quant.runner.kernels.integer import IntegerLinear, integer_fits


def weights(out: int, columns: int, *, symmetric: bool = True, seed: int = 0, strategy: str = "channel"):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (out, columns), generator=generator, dtype=torch.int8)
    rows = out if strategy == "channel" else 1
    scale = (torch.rand(rows, 1, generator=generator) + 0.1) / 100
    zeros = None if symmetric else torch.randint(-128, 128, (rows, 1), generator=generator, dtype=torch.int8)
    return QuantizedTensor(codes, scale, zeros, Scheme("int8", symmetric, strategy, None))  # type: ignore[arg-type]


def expected(linear: IntegerLinear, weight: QuantizedTensor, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Sums in int64, rounded once to float32, then the scales as the kernel applies them."""
    quantized = linear.inputs(x)
    w = weight.codes.long() - (0 if weight.zero_point is None else weight.zero_point.long())
    sums = quantized.centered().long() @ w.T
    return sums.to(torch.float32) * quantized.scale * weight.scale[:, 0].expand(len(w)) + bias


SCHEMES = [
    ActivationScheme(),
    ActivationScheme(symmetric=False),
    ActivationScheme(dynamic=False, strategy="tensor"),
    ActivationScheme(dynamic=False, strategy="tensor", symmetric=False),
]


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(SCHEMES),
    st.booleans(),
    st.sampled_from(["channel", "tensor"]),
    st.sampled_from([1, 64, 257, 1024, 1025, 3000]),
    st.integers(0, 99),
)
def test_sums_are_those_of_int64(scheme: ActivationScheme, symmetric: bool, strategy: str, columns: int, seed: int):
    weight = weights(9, columns, symmetric=symmetric, seed=seed, strategy=strategy)
    generator = torch.Generator().manual_seed(seed)
    x, bias = torch.randn(4, columns, generator=generator) * 3, torch.randn(9, generator=generator)
    fixed = None if scheme.dynamic else stored_range(-5.0, 8.0, scheme)
    linear = IntegerLinear(weight, InputQuantizer(scheme, fixed), bias)
    assert torch.equal(linear(x), expected(linear, weight, x, bias))


@pytest.mark.parametrize("columns", [1024, 5000])
def test_the_largest_codes_of_one_sign_are_summed_exactly(columns: int) -> None:
    """128 * 128 a column: beyond 2^24 after 1024 columns, where float32 skips odd numbers."""
    codes = torch.full((2, columns), -128, dtype=torch.int8)
    codes[1, 0] = -127
    weight = QuantizedTensor(codes, torch.ones(2, 1), None, Scheme("int8", True, "channel", None))
    static = ActivationScheme(dynamic=False, strategy="tensor")
    linear = IntegerLinear(weight, InputQuantizer(static, stored_range(-1.0, 1.0, static)), None)
    x = torch.full((1, columns), -2.0)
    quantized = linear.inputs(x)
    assert quantized.codes.unique().tolist() == [-128.0]
    sums = (quantized.codes.long() @ codes.long().T).to(torch.float32)
    assert torch.equal(linear(x), sums * quantized.scale)


def test_the_integer_kernel_and_the_float_product_agree() -> None:
    weight, inputs = weights(40, 300), InputQuantizer(ActivationScheme())
    x, bias = torch.randn(2, 5, 300, generator=torch.Generator().manual_seed(1)), torch.ones(40)
    plain = QuantizedInputLinear(DenseLinear(weight.dequantize()), inputs, bias)(x)
    torch.testing.assert_close(IntegerLinear(weight, inputs, bias)(x), plain, rtol=1e-5, atol=1e-5)


def test_bfloat16_inputs_are_summed_exactly_too_and_nan_stays_in_its_row() -> None:
    weight = weights(8, 64)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    x[1, 5] = float("nan")
    linear = IntegerLinear(weight, InputQuantizer(ActivationScheme()), None)
    y = linear(x)
    assert y.dtype == torch.bfloat16
    assert bool(y[1].isnan().all())
    assert torch.equal(y[[0, 2]], expected(linear, weight, x[[0, 2]], torch.zeros(8)).to(torch.bfloat16))


def test_other_schemes_are_left_to_other_kernels() -> None:
    inputs = InputQuantizer(ActivationScheme())
    grouped = QuantizedTensor(
        torch.zeros(4, 64, dtype=torch.int8), torch.ones(4, 2), None, Scheme("int8", True, "group", 32)
    )
    assert integer_fits(weights(4, 64), inputs)
    assert not integer_fits(grouped, inputs)
    assert not integer_fits(weights(4, 64), InputQuantizer(ActivationScheme("fp8_e4m3")))
    with pytest.raises(ValueError, match="one scale a row"):
        IntegerLinear(grouped, inputs, None)
