"""Stored input ranges: names and shapes are those of compressed-tensors' own modules, broken ones are named."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.initialize import initialize_module_for_quantization

from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.export.native_inputs import decode_inputs, encode_range
from cann_llm_quant.quant.activation_ranges import stored_range
from cann_llm_quant.quant.activations import InputQuantizer, InputRange
from cann_llm_quant.quant.scheme import ActivationScheme

STATIC = ActivationScheme(dynamic=False, strategy="tensor")
ASYMMETRIC = ActivationScheme(dynamic=False, strategy="tensor", symmetric=False)
NV = ActivationScheme("fp4_e2m1", strategy="group", group_size=16)


@pytest.mark.parametrize("scheme", [STATIC, ASYMMETRIC], ids=str)
def test_names_shapes_and_types_are_those_that_compressed_tensors_makes_room_for(scheme: ActivationScheme) -> None:
    module = torch.nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    args = QuantizationArgs(num_bits=8, symmetric=scheme.symmetric, strategy="tensor", dynamic=False)
    theirs = QuantizationScheme(targets=["Linear"], input_activations=args)
    initialize_module_for_quantization(module, theirs, force_zero_point=False)
    expected = {name: (p.shape, p.dtype) for name, p in module.named_parameters() if name != "weight"}
    stored = encode_range("m", scheme, stored_range(-3.0, 5.0, scheme, torch.bfloat16))
    assert {name.removeprefix("m."): (t.shape, t.dtype) for name, t in stored.items()} == expected


def test_nvfp4_has_the_factor_that_compressed_tensors_makes_room_for() -> None:
    module = torch.nn.Linear(16, 16, bias=False)
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, dynamic="local")
    theirs = QuantizationScheme(targets=["Linear"], input_activations=args)
    initialize_module_for_quantization(module, theirs, force_zero_point=False)
    expected = {name: (p.shape, p.dtype) for name, p in module.named_parameters() if name != "weight"}
    stored = encode_range("m", NV, InputRange(torch.tensor([100.0])))
    assert {name.removeprefix("m."): (t.shape, t.dtype) for name, t in stored.items()} == expected


@pytest.mark.parametrize("scheme", [STATIC, ASYMMETRIC, NV], ids=str)
def test_decode_inverts_encode(scheme: ActivationScheme) -> None:
    fixed = InputRange(torch.tensor([7.0])) if scheme is NV else stored_range(-3.0, 5.0, scheme)
    back = decode_inputs("m", scheme, encode_range("m", scheme, fixed))
    assert back.scheme == scheme
    assert back.fixed is not None
    assert torch.equal(back.fixed.scale, fixed.scale)
    assert (back.fixed.zero_point is None) == (fixed.zero_point is None)


def test_dynamic_schemes_store_nothing() -> None:
    assert decode_inputs("m", ActivationScheme(), {}) == InputQuantizer(ActivationScheme())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "m.input_scale is missing"),
        ({"m.input_scale": torch.ones(4)}, r"m.input_scale has shape \[4\], expected one number"),
        ({"m.input_scale": torch.zeros(1)}, "m: the stored input range is 0.0"),
        ({"m.input_scale": torch.tensor([float("nan")])}, "a positive number is needed"),
        ({"m.input_scale": torch.ones(1)}, "m.input_zero_point is missing"),
    ],
)
def test_a_broken_range_is_named(tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        decode_inputs("m", ASYMMETRIC, tensors)
