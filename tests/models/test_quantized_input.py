"""Linears with quantized inputs against compressed-tensors' own quantized forward, in every compute dtype."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

from cann_llm_quant.models.decoder import DenseLinear, LinearOp
from cann_llm_quant.models.quantized_input import QuantizedInputLinear
from cann_llm_quant.quant.activation_ranges import stored_range
from cann_llm_quant.quant.activations import InputQuantizer
from cann_llm_quant.quant.scheme import ActivationScheme

TOKEN = ActivationScheme()
STATIC = ActivationScheme(dynamic=False, strategy="tensor", symmetric=False)


def case(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 7, 64, generator=generator) * torch.empty(64).log_normal_(0, 1, generator=generator)
    return x, torch.randn(32, 64, generator=generator), torch.randn(32, generator=generator)


@pytest.mark.parametrize("symmetric", [True, False])
def test_dynamic_product_is_that_of_compressed_tensors_values(symmetric: bool) -> None:
    x, weight, bias = case()
    scheme = ActivationScheme(symmetric=symmetric)
    linear = QuantizedInputLinear(DenseLinear(weight), InputQuantizer(scheme), bias)
    assert isinstance(linear, LinearOp)
    args = QuantizationArgs(num_bits=8, symmetric=symmetric, strategy="token", dynamic=True)
    values = fake_quantize(x, *compute_dynamic_scales_and_zp(x, args, torch.nn.Linear(1, 1)), args)
    expected = values.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_groups_are_dequantized_before_the_product() -> None:
    x, weight, bias = case()
    scheme = ActivationScheme("fp8_e4m3", strategy="group", group_size=32)
    inputs = InputQuantizer(scheme)
    expected = inputs(x.view(-1, 64)).dequantize().double() @ weight.double().T + bias.double()
    found = QuantizedInputLinear(DenseLinear(weight), inputs, bias)(x).view(-1, 32)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", [TOKEN, STATIC, ActivationScheme("fp8_e4m3")], ids=str)
def test_half_precision_rounds_products_not_codes(dtype: torch.dtype, scheme: ActivationScheme) -> None:
    """Weights of few bits are exact in `dtype`, so that only the rounding of the result (twice) remains."""
    x, weight, _ = case()
    x, weight = x.to(dtype), (weight * 4).round().to(dtype)
    inputs = InputQuantizer(scheme, None if scheme.dynamic else stored_range(-6.0, 9.0, scheme))
    expected = inputs(x.view(-1, 64)).dequantize().double() @ weight.double().T
    found = QuantizedInputLinear(DenseLinear(weight), inputs)(x).view(-1, 32).double()
    assert found.dtype == torch.float64
    assert float((found - expected).abs().max()) <= 2 * torch.finfo(dtype).eps * float(expected.abs().max())


def test_large_inputs_do_not_overflow_float16() -> None:
    x = torch.full((1, 4096), 3.0, dtype=torch.float16)
    weight = torch.full((2, 4096), 0.5, dtype=torch.float16)
    y = QuantizedInputLinear(DenseLinear(weight), InputQuantizer(TOKEN))(x)
    assert y[0].tolist() == pytest.approx([6144.0 * 127 / 127.5] * 2, rel=2e-3)


def test_a_scheme_of_compressed_tensors_accepts_these_inputs() -> None:
    args = QuantizationArgs(num_bits=8, strategy="tensor", dynamic=False, symmetric=False)
    assert QuantizationScheme(targets=["Linear"], input_activations=args).input_activations is not None
