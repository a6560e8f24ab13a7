"""Small floats: every code by its specification, every tie by hand, and compressed-tensors' own numbers."""

import itertools
import math

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cann_llm_quant.errors import NumericError, UsageError
from cann_llm_quant.quant.grid import minmax_grid, quantize_codes, shared_amax
from cann_llm_quant.quant.number_formats import nearest_, to_codes, to_values
from cann_llm_quant.quant.ranges import global_scale
from cann_llm_quant.quant.rtn import solve
from cann_llm_quant.quant.scheme import MXFP4, MXFP8, NVFP4, QuantizedTensor, Scheme

CHANNEL8 = Scheme("fp8_e4m3", True, "channel", None)
TENSOR8 = Scheme("fp8_e4m3", True, "tensor", None)
TILE8 = Scheme("fp8_e4m3", True, "tile", None)
ALL = [CHANNEL8, TENSOR8, TILE8, Scheme("fp8_e4m3", True, "group", 32), MXFP4, MXFP8, NVFP4]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def e4m3(byte: int) -> float:
    """A byte by the words of the OCP specification: bias 7, subnormals, 0x7F and 0xFF NaN."""
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, (byte >> 3) & 15, byte & 7
    if byte & 127 == 127:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_every_code_has_the_value_of_its_specification() -> None:
    bytes_ = [b for b in range(256) if b & 127 != 127]
    codes = torch.tensor(bytes_, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = to_values(codes, "fp8_e4m3")
    assert values.tolist() == [e4m3(b) for b in bytes_]
    assert torch.equal(to_codes(values, "fp8_e4m3").view(torch.uint8), codes.view(torch.uint8))
    nibbles = torch.arange(16, dtype=torch.int8)
    assert to_values(nibbles, "fp4_e2m1").tolist() == E2M1 + [-v for v in E2M1]
    assert torch.equal(to_codes(to_values(nibbles, "fp4_e2m1"), "fp4_e2m1"), nibbles)


def test_fp4_ties_go_to_the_even_mantissa() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -0.25, -2.5, -5.0])
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 0.0, -2.0, -4.0]
    assert nearest_(ties, "fp4_e2m1").tolist() == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-600, 600, width=32), min_size=1, max_size=20), st.sampled_from(["fp8_e4m3", "fp4_e2m1"]))
def test_rounding_finds_the_nearest_value(numbers: list[float], dtype: str) -> None:
    levels = [e4m3(b) for b in range(256) if b & 127 != 127] if dtype == "fp8_e4m3" else E2M1 + [-v for v in E2M1]
    rounded = nearest_(torch.tensor(numbers), dtype).tolist()
    for x, y in zip(numbers, rounded, strict=True):
        assert abs(x - y) == min(abs(x - level) for level in levels)


def test_c14_nothing_beyond_448_becomes_nan_and_infinity_is_refused() -> None:
    w = normal(4, 64)
    w[0, 0] = 1e6
    half = torch.full((4, 1), float(w[1:].abs().max()) / 896)
    for scheme, scale in ((CHANNEL8, half), (CHANNEL8, torch.ones(4, 1))):
        codes = quantize_codes(w, scale, None, scheme).view(torch.uint8)
        assert not bool(((codes & 127) == 127).any())
    assert float(quantize_codes(torch.tensor([[466.0]]), torch.ones(1, 1), None, CHANNEL8).float()) == 448
    for bad, scheme in itertools.product((math.inf, -math.inf, math.nan), ALL):
        broken = normal(4, 64)
        broken[1, 3] = bad
        with pytest.raises(NumericError, match="NaN or infinity"):
            solve(broken, scheme, torch.float32)
        with pytest.raises(NumericError, match="NaN or infinity"):
            quantize_codes(broken, minmax_grid(normal(4, 64), scheme, torch.float32)[0], None, scheme)


@pytest.mark.parametrize("scheme", ALL, ids=Scheme.label)
@pytest.mark.parametrize("clip", ["minmax", "mse"])
def test_c13_zeros_stay_exactly_zero(scheme: Scheme, clip: str) -> None:
    for w in (normal(4, 64), torch.zeros(4, 64)):
        w[2] = 0
        q = solve(w, scheme, torch.bfloat16, clip=clip)  # type: ignore[arg-type]
        assert bool((q.scale > 0).all() and q.scale.isfinite().all() and (1 / q.scale.float()).isfinite().all())
        assert bool((q.dequantize()[2] == 0).all())


@pytest.mark.parametrize("scheme", ALL, ids=Scheme.label)
def test_c15_tiny_and_huge_weights_stay_finite(scheme: Scheme) -> None:
    for size in (1e-39, 1e-30, 1e30, 3e38):
        w = normal(4, 64).clamp(-1, 1) * size
        q = solve(w, scheme, torch.float32)
        assert bool((1 / q.scale).isfinite().all())
        assert bool(q.dequantize().isfinite().all())
        assert float((q.dequantize() - w).abs().max()) <= max(size, 1e-30)


def test_c35_tiles_are_indexed_by_row_and_column_over_128() -> None:
    """[192, 160] has 2 x 2 tiles; the edge ones hold 64 rows and 32 columns."""
    w = normal(192, 160)
    w[:128, 128:] *= 10
    w[128:, :128] *= 100
    q = solve(w, TILE8, torch.float32)
    assert q.scale.shape == (2, 2)
    back = q.dequantize()
    for i, j in itertools.product(range(2), range(2)):
        tile = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
        assert float(q.scale[i, j]) == pytest.approx(float(w[tile].abs().max()) / 448, rel=1e-6)
        assert torch.equal(back[tile], q.codes[tile].to(torch.float32) * q.scale[i, j])
    for i, j in ((0, 0), (127, 127), (128, 127), (127, 128), (191, 159)):
        assert float(back[i, j]) == float(q.codes[i, j].float() * q.scale[i // 128, j // 128])


def ct_args(scheme: Scheme) -> QuantizationArgs:
    kind = {"e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn, "float": None}[scheme.scale_type]
    strategy = {"tile": "block", "group": "tensor_group" if scheme.scale_type == "e4m3" else "group"}
    return QuantizationArgs(
        num_bits=scheme.bits,
        type="float",
        strategy=strategy.get(scheme.strategy, scheme.strategy),
        group_size=scheme.group_size,
        block_structure=[128, 128] if scheme.strategy == "tile" else None,
        scale_dtype=kind,
    )


@pytest.mark.parametrize("scheme", ALL, ids=Scheme.label)
def test_codes_equal_compressed_tensors_on_the_same_scales(scheme: Scheme) -> None:
    w = normal(130, 256, seed=3)
    q = solve(w, scheme, torch.float32)
    scale = q.scale if q.global_scale is None else q.scale * q.global_scale
    theirs = quantize(
        w, scale.view(-1) if scheme.strategy == "tensor" else scale, None, ct_args(scheme), global_scale=q.global_scale
    )
    assert torch.equal(to_values(q.codes, scheme.dtype), theirs)
    if scheme.dtype == "fp4_e2m1":
        packed = pack_fp4_to_uint8(theirs)
        low, high = q.codes[:, ::2].to(torch.uint8), q.codes[:, 1::2].to(torch.uint8)
        assert torch.equal(packed, low | high << 4)


def test_nvfp4_scales_equal_compressed_tensors() -> None:
    w = normal(8, 64, seed=5)
    theirs = generate_gparam(w.amin(), w.amax())
    assert float(global_scale(w, NVFP4)) == pytest.approx(float(theirs), rel=1e-6)
    groups = w.view(8, -1, 16)
    expected, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), ct_args(NVFP4), global_scale=theirs)
    scale, _ = minmax_grid(w, NVFP4, torch.float32)
    torch.testing.assert_close(scale * theirs, expected.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("scheme", "largest_exponent"), [(MXFP4, 2), (MXFP8, 8)])
def test_mx_scales_follow_the_specification(scheme: Scheme, largest_exponent: int) -> None:
    """X = 2^(floor(log2(amax)) - emax), exact where the maximum is a power of two; at most clamped to 2^-126."""
    w = torch.zeros(6, 32)
    for row, top in enumerate((1.0, 1.99, 2.0, 0.3, 7e-5, 2.0**-130)):
        w[row, 5] = -top
    scale, _ = minmax_grid(w, scheme, torch.bfloat16)
    tops = (0, 0, 1, -2, -14, -130)
    assert scale.flatten().tolist() == [2.0 ** max(top - largest_exponent, -126) for top in tops]
    assert scale.dtype == torch.float32


@pytest.mark.parametrize("scheme", ALL, ids=Scheme.label)
@pytest.mark.parametrize("size", [(5, 96), (130, 160)])
def test_the_search_is_never_worse_than_min_max_and_stays_on_storable_scales(
    scheme: Scheme, size: tuple[int, int]
) -> None:
    w = normal(*size, seed=7) * torch.linspace(0.2, 3, size[1])
    x = normal(4 * size[1], size[1], seed=8) @ normal(size[1], size[1], seed=9)
    h = x.T @ x
    plain = solve(w, scheme, torch.bfloat16).dequantize() - w
    for hessian in (None, h):
        q = solve(w, scheme, torch.bfloat16, clip="mse", hessian=hessian)
        e = q.dequantize() - w
        cost = (lambda d: float(d.square().sum())) if hessian is None else (lambda d: block_cost(d, h, scheme))
        assert cost(e) <= cost(plain) * (1 + 1e-5)
        if scheme.scale_type == "e8m0":
            assert bool((torch.frexp(q.scale).mantissa == 0.5).all())
        if q.global_scale is not None:
            local = q.scale * q.global_scale
            assert torch.equal(local.to(torch.float8_e4m3fn).float() / q.global_scale, q.scale)


def block_cost(e: Tensor, h: Tensor, scheme: Scheme) -> float:
    """The error of outputs within groups of up to 128 columns, literally."""
    width = scheme.columns_per_scale(e.shape[1])
    if width > 128:
        width = max(c for c in range(1, 129) if width % c == 0)
    blocks = range(0, e.shape[1], width)
    return sum(
        float((e[:, b : b + width] @ h[b : b + width, b : b + width] * e[:, b : b + width]).sum()) for b in blocks
    )


def test_fp4_may_put_the_extreme_on_four() -> None:
    """A group of 4 and 3s: 6/4 of the min-max scale holds both exactly, min-max (and shrinking) neither 3."""
    w = torch.full((1, 16), 3.0)
    w[0, 0] = 4.0
    w = torch.cat([w, torch.full((1, 16), 24.0)])
    q = solve(w, NVFP4, torch.float32, clip="mse")
    assert float((q.dequantize()[0] - w[0]).abs().max()) < 0.05
    plain = solve(w, NVFP4, torch.float32)
    assert float((plain.dequantize()[0] - w[0]).abs().max()) > 0.2


def test_c24_fused_matrices_share_the_scale_of_the_largest() -> None:
    q, k, v = (normal(8, 32, seed=i) * size for i, size in enumerate((1, 10, 0.1)))
    amax = shared_amax([q, k, v])
    assert amax == float(k.abs().max())
    for scheme, clip in itertools.product((TENSOR8, Scheme("int8", True, "tensor", None)), ("minmax", "mse")):
        scales = {float(solve(w, scheme, torch.float32, clip=clip, amax=amax).scale) for w in (q, k, v)}  # type: ignore[arg-type]
        assert len(scales) == 1
        assert scales.pop() == pytest.approx(amax / scheme.reach, rel=1e-6)
    solved = [solve(w, NVFP4, torch.float32, amax=amax) for w in (q, k, v)]
    assert len({float(s.global_scale) for s in solved if s.global_scale is not None}) == 1
    assert float((solved[2].dequantize() - v).abs().max()) < 0.2 * float(v.abs().max())


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(UsageError, match="no zero points"):
        Scheme("fp8_e4m3", False, "channel", None)
    for scheme in (("int4", 32, "e8m0"), ("fp4_e2m1", 16, "e8m0"), ("fp8_e4m3", 16, "e4m3"), ("fp4_e2m1", 32, "float")):
        with pytest.raises(UsageError, match="no file format holds"):
            Scheme(scheme[0], True, "group", *scheme[1:])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="takes no group size"):
        Scheme("fp8_e4m3", True, "tile", 128)


def test_sizes_count_every_scale() -> None:
    assert MXFP4.bits_per_weight(64, 64) == 4.25
    assert MXFP8.bits_per_weight(64, 64, 32) == 8.25
    assert NVFP4.bits_per_weight(64, 64) == 4.5 + 32 / 64**2
    assert TILE8.bits_per_weight(192, 160, 32) == 8 + 4 * 32 / (192 * 160)
    assert [s.label() for s in (TILE8, MXFP4, NVFP4, CHANNEL8)] == [
        "fp8_e4m3-tile",
        "mxfp4",
        "nvfp4",
        "fp8_e4m3-channel",
    ]


def test_dequantize_multiplies_in_float32() -> None:
    codes, scale = torch.tensor([[7, 15] * 8], dtype=torch.int8), torch.tensor([[0.1]])
    q = QuantizedTensor(codes, scale, None, NVFP4)
    assert q.dequantize().tolist() == (scale * torch.tensor([[6.0, -6.0] * 8])).tolist()
