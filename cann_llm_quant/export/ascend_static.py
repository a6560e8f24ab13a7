"""The tensors that only `W8A8` of the AscendV1 layout has: int8 products under one stored range of the input.

    x_q = round(x / input_scale + input_offset)
    y = (x_q @ W + quant_bias) * deq_scale
    deq_scale = input_scale * weight_scale
    quant_bias = round(bias / deq_scale - input_offset * sum_k W)

`input_offset` is our zero point. `deq_scale` is float32 for bfloat16 models and, for float16 ones, int64 that holds the
bits of the float32. The bias is stored twice, within `quant_bias`, which is all that runtimes read, and in float.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Float64, Int8, Int64
from torch import Tensor

from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.export.ascend_sums import code_sums
from cann_llm_quant.quant.activations import InputQuantizer

_INT32 = torch.iinfo(torch.int32)
# msModelSlim and we round the same exact number in float32 and in float64.
_ROUNDING, _FLOAT32_STEPS = 1.0, 2.0**-20


def encode_static(
    module: str, codes: Tensor, scale: Tensor, inputs: InputQuantizer | None, bias: Tensor | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """By suffix; `scale` is `[out, 1]`, `dtype` the model's. Raises UnsupportedError for a bias out of range."""
    assert inputs is not None, "a static linear has a stored range"
    assert inputs.fixed is not None, "a static linear has a stored range"
    input_scale = inputs.fixed.scale.to(torch.float32).view(1)
    zero_point = inputs.fixed.zero_point
    offset = torch.zeros(1) if zero_point is None else zero_point.to(torch.float32).view(1)
    deq_scale = scale.flatten() * input_scale
    quant_bias = exact_quant_bias(codes, deq_scale, offset, bias)
    if not bool((quant_bias.abs() <= _INT32.max).all()):  # NaN, where a scale underflows, is refused too
        raise UnsupportedError(
            f"{module}: its bias is over 2^31 steps of {float(deq_scale.min()):g}, too large for quant_bias; keep the "
            "linear in float or quantize its input dynamically"
        )
    return {
        "input_scale": input_scale,
        "input_offset": offset,
        "deq_scale": float_bits(deq_scale) if dtype == torch.float16 else deq_scale,
        "quant_bias": quant_bias.to(torch.int32),
    }


def exact_quant_bias(
    codes: Int8[Tensor, "out in"], deq_scale: Float[Tensor, "out"], offset: Float[Tensor, "1"], bias: Tensor | None
) -> Float64[Tensor, "out"]:
    """`round(bias / deq_scale - offset * sum_k codes)`."""
    exact = -offset.to(torch.float64) * code_sums(codes, codes.shape[1]).flatten()
    if bias is not None:
        exact = exact + bias.to(torch.float64) / deq_scale.to(torch.float64)
    return exact.round()


def float_bits(scale: Float[Tensor, "out"]) -> Int64[Tensor, "out"]:
    """The bits of float32 numbers, as int64."""
    return scale.view(torch.int32).to(torch.int64)


def from_float_bits(bits: Int64[Tensor, "out"]) -> Float[Tensor, "out"]:
    """The float32 numbers of `float_bits`."""
    return bits.to(torch.int32).view(torch.float32)


def deq_scale_of(tensors: Mapping[str, Tensor]) -> Float[Tensor, "out"]:
    """`deq_scale` in float32, however it is stored."""
    stored = tensors["deq_scale"].flatten()
    return from_float_bits(stored) if stored.dtype == torch.int64 else stored.to(torch.float32)


def check_static(
    module: str, codes: Int8[Tensor, "out in"], scale: Float[Tensor, "out 1"], tensors: Mapping[str, Tensor]
) -> None:
    """Whether the tensors, by suffix, agree with one another.

    Raises CheckpointError where they do not, UnsupportedError for a bias that lies in `quant_bias` alone.
    """
    deq_scale, bias = deq_scale_of(tensors), tensors.get("bias")
    product = scale.flatten() * tensors["input_scale"].to(torch.float32)
    if not bool(torch.isclose(deq_scale, product, rtol=2.0**-7, atol=0).all()):
        raise CheckpointError(f"{module}: deq_scale is not input_scale * weight_scale; the file is damaged")
    exact = exact_quant_bias(codes, deq_scale, tensors["input_offset"].to(torch.float32), bias)
    allowed = _ROUNDING + exact.abs() * _FLOAT32_STEPS
    if bool(((tensors["quant_bias"] - exact).abs() <= allowed).all()):
        return
    if bias is None:
        raise UnsupportedError(
            f"{module}: its bias is stored within quant_bias alone; add the float tensor {module}.bias, which "
            "msModelSlim writes beside it"
        )
    raise CheckpointError(f"{module}: quant_bias does not hold the bias and input_offset; the file is damaged")
