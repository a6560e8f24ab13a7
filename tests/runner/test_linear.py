"""Packed linears against float64 dequantize-and-multiply."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_llm_quant.errors import UsageError
from cann_llm_quant.models.decoder import LinearOp
from cann_llm_quant.quant.rtn import solve
from cann_llm_quant.quant.scheme import MXFP4, MXFP8, NVFP4, QuantizedTensor, Scheme
from cann_llm_quant.runner.kernels import dequantize
from cann_llm_quant.runner.kernels.dequantize import DequantizeLinear, pack_nibbles, unpack_nibbles
from cann_llm_quant.runner.kernels.torch_int4 import Int4Linear, operator_group
from cann_llm_quant.runner.kernels.torch_int8 import Int8Linear, operator_fits
from cann_llm_quant.runner.linear import packed_linear

CPU = torch.device("cpu")


def random_weight(
    out: int, columns: int, dtype="int4", symmetric=True, strategy="group", group=32, scale_dtype=torch.bfloat16
) -> QuantizedTensor:
    scheme = Scheme(dtype, symmetric, strategy, group if strategy == "group" else None)
    generator = torch.Generator().manual_seed(out * 1000 + columns)
    shape = {"group": (out, columns // group), "channel": (out, 1), "tensor": (1, 1)}[strategy]
    low, high = scheme.qmin, scheme.qmax + 1
    zero = None if symmetric else torch.randint(low, high, shape, generator=generator, dtype=torch.int8)
    scale = (torch.rand(shape, generator=generator) * 0.1 + 0.01).to(scale_dtype)
    return QuantizedTensor(
        torch.randint(low, high, (out, columns), generator=generator, dtype=torch.int8), scale, zero, scheme
    )


def float64_product(x, weight: QuantizedTensor, bias):
    out, columns = weight.shape
    w = torch.empty(out, columns, dtype=torch.float64)
    per_scale = columns // weight.scale.shape[1]
    for column in range(columns):
        row = slice(None) if weight.scale.shape[0] == out else 0
        scale = weight.scale[row, column // per_scale].double()
        zero = 0.0 if weight.zero_point is None else weight.zero_point[row, column // per_scale].double()
        w[:, column] = (weight.codes[:, column].double() - zero) * scale
    y = x.double() @ w.t()
    return y if bias is None else y + bias.double()


CASES = [
    (48, 256, {"group": 32}),
    (48, 256, {"group": 64, "symmetric": False}),
    (32, 256, {"group": 128, "symmetric": False}),
    (32, 512, {"group": 512}),
    (16, 192, {"strategy": "channel"}),
    (16, 192, {"strategy": "channel", "symmetric": False}),
    (16, 64, {"strategy": "tensor"}),
    (17, 96, {"group": 48, "symmetric": False}),
    (5, 33, {"strategy": "channel"}),
    (5, 33, {"group": 11, "symmetric": False}),
    (16, 64, {"dtype": "int2", "group": 32}),
    (16, 64, {"dtype": "int3", "group": 32, "symmetric": False}),
    (24, 128, {"dtype": "int8", "strategy": "channel"}),
    (24, 128, {"dtype": "int8", "strategy": "tensor"}),
    (24, 128, {"dtype": "int8", "group": 32, "symmetric": False}),
    (7, 100, {"dtype": "int8", "strategy": "channel", "symmetric": False}),
    (7, 100, {"dtype": "int8", "strategy": "channel"}),
]


@pytest.mark.parametrize(("out", "columns", "scheme"), CASES)
def test_float32_equals_float64_within_rounding(out, columns, scheme, monkeypatch) -> None:
    monkeypatch.setattr(dequantize, "BLOCK_ELEMENTS", 7 * columns)
    weight = random_weight(out, columns, **scheme)
    for bias in (None, torch.randn(out, generator=torch.Generator().manual_seed(3))):
        op = packed_linear(weight, bias, device=CPU, dtype=torch.float32)
        assert isinstance(op, LinearOp)
        for rows in ((1,), (3,), (2, 32)):
            x = torch.randn(*rows, columns, generator=torch.Generator().manual_seed(1))
            y = op(x)
            expected = float64_product(x, weight, bias)
            assert y.shape == (*rows, out)
            assert y.dtype == torch.float32
            assert (y.double() - expected).abs().max() <= 3e-6 * expected.abs().max()


@pytest.mark.parametrize(("out", "columns", "scheme"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_within_its_rounding(out, columns, scheme, dtype) -> None:
    weight = random_weight(out, columns, **scheme)
    bias = torch.randn(out, generator=torch.Generator().manual_seed(3)).to(dtype)
    for rows in (1, 3, 64):
        x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)
        y = packed_linear(weight, bias, device=CPU, dtype=dtype)(x)
        expected = float64_product(x, weight, bias)
        assert y.dtype == dtype
        # Output rounding is 2^-9 (2^-12) of the value; products of rounded weights add as much again.
        tolerance = 8e-3 if dtype == torch.bfloat16 else 6e-4
        assert (y.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize(("out", "columns", "scheme"), CASES)
def test_the_operators_equal_float64_in_float32(out, columns, scheme) -> None:
    """Their layout, apart from bfloat16's rounding; 1100 rows cross the pieces in which codes are packed."""
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(1))
    for count in (out, 1104):
        weight = random_weight(count, columns, **scheme)
        bias = torch.randn(count, generator=torch.Generator().manual_seed(2))
        if operator_group(weight) is not None:
            y = Int4Linear(weight, bias, torch.float32)(x)
        elif operator_fits(weight):
            y = Int8Linear(weight, bias, torch.float32)(x)
        else:
            continue
        expected = float64_product(x, weight, bias)
        assert (y.double() - expected).abs().max() <= 3e-6 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", [{}, {"dtype": "int8", "strategy": "channel"}])
def test_any_memory_layout_and_no_rows_at_all(dtype, scheme) -> None:
    """Transposed activations, every other row, and an expert to which no token went."""
    weight = random_weight(32, 64, **scheme)
    op = packed_linear(weight, None, device=CPU, dtype=dtype)
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    for view in (x.t(), x.t().contiguous()[::2], x.t().unflatten(0, (2, 3)).transpose(0, 1)):
        torch.testing.assert_close(op(view), op(view.contiguous()))
        expected = float64_product(view, weight, None)
        assert (op(view).double() - expected).abs().max() <= 8e-3 * expected.abs().max()
    assert op(torch.empty(0, 64, dtype=dtype)).shape == (0, 32)


def test_the_table_of_kernels() -> None:
    def chosen(activations, out=48, columns=256, kernel="auto", **scheme):
        weight = random_weight(out, columns, **scheme)
        return type(packed_linear(weight, None, device=CPU, dtype=activations, kernel=kernel))

    bf16 = torch.bfloat16
    assert chosen(bf16) is Int4Linear
    assert chosen(bf16, strategy="channel") is Int4Linear
    assert chosen(bf16, dtype="int8", strategy="channel") is Int8Linear
    assert chosen(bf16, dtype="int8", strategy="channel", symmetric=False) is DequantizeLinear
    assert chosen(bf16, dtype="int8", strategy="channel", columns=100) is DequantizeLinear
    assert chosen(torch.float32) is DequantizeLinear
    assert chosen(torch.float16) is DequantizeLinear
    assert chosen(bf16, kernel="reference") is DequantizeLinear
    assert chosen(bf16, out=40) is DequantizeLinear
    assert chosen(bf16, columns=96, group=48) is DequantizeLinear


FLOATS = [
    Scheme("fp8_e4m3", True, "channel", None),
    Scheme("fp8_e4m3", True, "tensor", None),
    Scheme("fp8_e4m3", True, "tile", None),
    MXFP4,
    MXFP8,
    NVFP4,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(130, 160), (16, 32)])
@pytest.mark.parametrize("scheme", FLOATS, ids=Scheme.label)
def test_small_floats_equal_the_dequantized_matrix(scheme, size, dtype, monkeypatch) -> None:
    monkeypatch.setattr(dequantize, "BLOCK_ELEMENTS", 50 * size[1])
    w = torch.randn(*size, generator=torch.Generator().manual_seed(4))
    weight = solve(w, scheme, torch.bfloat16)
    op = packed_linear(weight, None, device=CPU, dtype=dtype)
    assert isinstance(op, DequantizeLinear)
    assert torch.equal(torch.cat([op.rows(slice(0, 50)), op.rows(slice(50, 200))]), weight.dequantize())
    x = torch.randn(3, size[1], generator=torch.Generator().manual_seed(5)).to(dtype)
    expected = x.double() @ weight.dequantize().double().t()
    tolerance = 8e-3 if dtype == torch.bfloat16 else 3e-6
    assert (op(x).double() - expected).abs().max() <= tolerance * expected.abs().max()


def test_small_floats_stay_as_small_as_in_the_file() -> None:
    w = torch.randn(128, 256, generator=torch.Generator().manual_seed(4))
    for scheme in FLOATS[2:]:
        op = DequantizeLinear(solve(w, scheme, torch.bfloat16))
        assert op.codes.nbytes == 128 * 256 * scheme.bits // 8
        scales = 128 * 2 * 2 if scheme.strategy == "tile" else 128 * 256 // (scheme.group_size or 1)
        assert op.scale.nbytes == scales


def test_weights_stay_packed() -> None:
    weight = random_weight(64, 256)
    assert DequantizeLinear(weight).codes.nbytes == 64 * 256 // 2
    assert Int4Linear(weight, None, torch.bfloat16).codes.nbytes == 64 * 256 // 2
    eight = random_weight(64, 256, dtype="int8", strategy="channel")
    assert DequantizeLinear(eight).codes.nbytes == 64 * 256
    assert Int8Linear(eight, None, torch.bfloat16).codes.nbytes == 64 * 256


def test_dequantized_blocks_are_bounded(monkeypatch) -> None:
    """A whole float copy of the matrix never exists: blocks hold at most BLOCK_ELEMENTS weights."""
    monkeypatch.setattr(dequantize, "BLOCK_ELEMENTS", 1024)
    op = DequantizeLinear(random_weight(48, 256))
    seen = []
    original = op.rows
    monkeypatch.setattr(op, "rows", lambda rows: seen.append(original(rows)) or seen[-1])
    op(torch.zeros(2, 256))
    assert [w.numel() for w in seen] == [1024] * 12
    torch.testing.assert_close(torch.cat(seen), random_weight(48, 256).dequantize())


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 5), columns=st.integers(1, 17), data=st.data())
def test_nibbles_round_trip(rows, columns, data) -> None:
    values = data.draw(st.lists(st.integers(-8, 7), min_size=rows * columns, max_size=rows * columns))
    codes = torch.tensor(values, dtype=torch.int8).view(rows, columns)
    packed = pack_nibbles(codes)
    assert packed.shape == (rows, (columns + 1) // 2)
    half = packed.shape[1]
    for column in range(columns):
        nibble = packed[:, column % half] >> 4 if column >= half else packed[:, column] & 15
        assert (nibble.to(torch.int8) - 8).tolist() == codes[:, column].tolist()
    assert torch.equal(unpack_nibbles(packed, columns).to(torch.int8) - 8, codes)


def test_unknown_kernel_is_refused() -> None:
    with pytest.raises(UsageError, match="fast"):
        packed_linear(random_weight(16, 64), None, device=CPU, dtype=torch.float32, kernel="fast")
