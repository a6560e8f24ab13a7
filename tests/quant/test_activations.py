"""Quantized inputs against compressed-tensors' own fake quantization, and what no input may do."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp, generate_gparam
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_llm_quant.errors import UsageError
from cann_llm_quant.quant.activation_ranges import static_range, stored_range
from cann_llm_quant.quant.activations import InputRange, code_range, needs_range, quantize_input
from cann_llm_quant.quant.scheme import ActivationScheme
from cann_llm_quant.quant.value_sketch import ValueSketch, bucket_counts

DYNAMIC = {
    "int8-token": ActivationScheme(),
    "int8-token-asymmetric": ActivationScheme(symmetric=False),
    "int4-token": ActivationScheme("int4"),
    "int8-tensor": ActivationScheme(strategy="tensor"),
    "int8-group": ActivationScheme(strategy="group", group_size=16),
    "int8-group-asymmetric": ActivationScheme(symmetric=False, strategy="group", group_size=16),
    "fp8-token": ActivationScheme("fp8_e4m3"),
    "fp8-group128": ActivationScheme("fp8_e4m3", strategy="group", group_size=128),
    "mxfp8": ActivationScheme("fp8_e4m3", strategy="group", group_size=32),
    "mxfp4": ActivationScheme("fp4_e2m1", strategy="group", group_size=32),
}


def rows(seed: int, count: int = 5, columns: int = 128) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.empty(count, columns).log_normal_(0, 1.5, generator=generator)
    return torch.randn(count, columns, generator=generator) * sizes


def theirs(scheme: ActivationScheme) -> QuantizationArgs:
    micro = scheme.dtype != "int8" and scheme.group_size == 32
    return QuantizationArgs(
        num_bits=int(scheme.dtype[2 if scheme.dtype[0] == "f" else 3]),
        type="int" if scheme.dtype.startswith("int") else "float",
        symmetric=scheme.symmetric,
        strategy=scheme.strategy,
        dynamic=scheme.dynamic,
        group_size=scheme.group_size,
        scale_dtype=torch.uint8 if micro else None,
        zp_dtype=torch.uint8 if micro else None,
    )


@pytest.mark.parametrize("name", DYNAMIC)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_dynamic_values_are_those_of_compressed_tensors(name: str, seed: int) -> None:
    scheme, x = DYNAMIC[name], rows(seed)
    args = theirs(scheme)
    scale, zero_point = compute_dynamic_scales_and_zp(x[None], args, torch.nn.Linear(1, 1))
    expected = fake_quantize(x[None], scale, zero_point, args)[0]
    assert torch.equal(quantize_input(x, scheme).dequantize(), expected)


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_codes_are_the_integers_or_bytes_that_compressed_tensors_stores(dtype: str) -> None:
    scheme, x = ActivationScheme(dtype), rows(3)  # type: ignore[arg-type]
    args, stored = theirs(scheme), torch.int8 if dtype == "int8" else torch.float8_e4m3fn
    scale, zero_point = compute_dynamic_scales_and_zp(x[None], args, torch.nn.Linear(1, 1))
    expected = quantize(x[None], scale, zero_point, args, dtype=stored)[0]
    codes = quantize_input(x, scheme).codes
    assert torch.equal(codes.to(stored).view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(codes.to(stored).to(torch.float32), codes)


@pytest.mark.parametrize("scheme", [ActivationScheme("int8", s, False, "tensor") for s in (True, False)], ids=str)
def test_static_values_are_those_of_compressed_tensors(scheme: ActivationScheme) -> None:
    x, args = rows(0), theirs(scheme)
    scale, zero_point = calculate_qparams(torch.tensor(-3.0), torch.tensor(7.5), args)
    fixed = stored_range(-3.0, 7.5, scheme)
    assert torch.equal(fixed.scale, scale)
    if fixed.zero_point is not None:
        assert torch.equal(fixed.zero_point, zero_point)
    assert torch.equal(quantize_input(x, scheme, fixed).dequantize(), fake_quantize(x, scale, zero_point, args))


def test_nvfp4_groups_take_the_stored_factor_as_compressed_tensors_does() -> None:
    scheme, x = ActivationScheme("fp4_e2m1", strategy="group", group_size=16), rows(1)
    args = QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        dynamic="local",
        scale_dtype=torch.float8_e4m3fn,
        zp_dtype=torch.float8_e4m3fn,
    )
    assert needs_range(scheme)
    sketch = ValueSketch(bucket_counts(x), float(x.min()), float(x.max()), 0.0, 0.0, 5)
    fixed = static_range(sketch, scheme)
    factor = generate_gparam(x.min(), x.max())
    torch.testing.assert_close(fixed.scale, factor, rtol=1e-7, atol=0)
    scale, zero_point = compute_dynamic_scales_and_zp(x, args, torch.nn.Linear(1, 1), global_scale=factor)
    expected = fake_quantize(x, scale, zero_point, args, global_scale=factor)
    assert torch.equal(quantize_input(x, scheme, InputRange(factor)).dequantize(), expected)


@pytest.mark.parametrize("name", DYNAMIC)
def test_c13_rows_of_zeros_are_exact_and_nothing_is_nan(name: str) -> None:
    x = rows(0)
    x[2] = 0
    x[3] = 1e-42
    back = quantize_input(x, DYNAMIC[name]).dequantize()
    assert bool(back.isfinite().all())
    assert back[2].tolist() == [0.0] * 128


@pytest.mark.parametrize("name", [name for name in DYNAMIC if name != "int8-tensor"])
def test_nan_is_seen_in_its_row_and_only_there(name: str) -> None:
    x = rows(0)
    x[1, 7] = float("nan")
    back = quantize_input(x, DYNAMIC[name]).dequantize()
    assert back[1].isnan().any()
    assert bool(back[[0, 2, 3, 4]].isfinite().all())


@pytest.mark.parametrize("name", DYNAMIC)
def test_an_input_without_rows_gives_none(name: str) -> None:
    assert quantize_input(torch.empty(0, 128), DYNAMIC[name]).dequantize().shape == (0, 128)


@pytest.mark.parametrize("name", DYNAMIC)
def test_codes_stay_in_range_and_zero_is_exact(name: str) -> None:
    x = rows(5)
    x[:, ::3] = 0
    quantized = quantize_input(x, DYNAMIC[name])
    least, most = code_range(DYNAMIC[name])
    assert least <= float(quantized.codes.min())
    assert float(quantized.codes.max()) <= most
    assert float(quantized.dequantize()[:, ::3].abs().max()) == 0.0


def test_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UsageError, match="groups of 32 do not divide 40"):
        quantize_input(torch.zeros(1, 40), DYNAMIC["mxfp8"])


def test_a_static_scheme_without_its_range_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="needs the range"):
        quantize_input(torch.zeros(1, 4), ActivationScheme(dynamic=False, strategy="tensor"))
