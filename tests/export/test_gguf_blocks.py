"""GGUF blocks against bytes made by hand, the gguf package's own decoder, and themselves read back."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.export.gguf_blocks import SCHEMES, decode, encode, kind_of, whole_steps
from cann_llm_quant.export.gguf_plan import nearest, refusal
from cann_llm_quant.quant.rtn import solve
from cann_llm_quant.quant.scheme import MXFP4, MXFP8, NVFP4, QuantizedTensor, Scheme

HELD = [("int2", True), ("int3", True), ("int4", True), ("int5", True), ("int6", True), ("int8", True)]
HELD += [("int2", False), ("int3", False), ("int4", False), ("int5", False)]


def random_weight(scheme: Scheme, rows: int, columns: int, seed: int) -> QuantizedTensor:
    """Random codes and zero points, scales that float16 holds exactly."""
    g = torch.Generator().manual_seed(seed)
    shape = scheme.scale_shape(rows, columns)
    codes = torch.randint(scheme.qmin, scheme.qmax + 1, (rows, columns), generator=g, dtype=torch.int8)
    zeros = torch.randint(scheme.qmin, scheme.qmax + 1, shape, generator=g, dtype=torch.int8)
    scale = (torch.rand(shape, generator=g) * 0.1 + 1e-4).to(torch.float16)
    return QuantizedTensor(codes, scale, None if scheme.symmetric else zeros, scheme)


def test_q4_0_bytes_by_hand():
    codes = torch.tensor([[*range(-8, 8), *range(7, -9, -1)]], dtype=torch.int8)
    weight = QuantizedTensor(codes, torch.tensor([[0.5]]), None, Scheme("int4", True, "group", 32))
    # float16 0.5 is 0x3800; column j is code j - 8 -> j, column j + 16 is 7 - j -> 15 - j in the upper nibble
    expected = bytes([0x00, 0x38]) + bytes((15 - j) << 4 | j for j in range(16))
    assert bytes(encode("m", weight).flatten().tolist()) == expected


def test_q4_1_and_q8_0_bytes_by_hand():
    codes = torch.full((1, 32), -8, dtype=torch.int8)
    codes[0, 17] = 7
    zero = torch.tensor([[-5]], dtype=torch.int8)
    weight = QuantizedTensor(codes, torch.tensor([[0.25]]), zero, Scheme("int4", False, "channel", None))
    # d = 0.25 = 0x3400, m = -(-5 + 8) * 0.25 = -0.75 = 0xBA00; only column 17 is not 0: upper nibble of byte 1
    assert bytes(encode("m", weight).flatten().tolist()) == bytes([0x00, 0x34, 0x00, 0xBA, 0, 0xF0]) + bytes(14)
    codes = torch.arange(-16, 16, dtype=torch.int8)[None] * 8
    weight = QuantizedTensor(codes, torch.tensor([[2.0]]), None, Scheme("int8", True, "channel", None))
    assert bytes(encode("m", weight).flatten().tolist()) == bytes([0x00, 0x40]) + codes.numpy().tobytes()


def test_q5_0_bytes_by_hand():
    codes = torch.full((1, 32), -16, dtype=torch.int8)
    codes[0, 0], codes[0, 9], codes[0, 31] = 0, 15, 1  # fields 16, 31, 17: the fifth bit of each is set
    weight = QuantizedTensor(codes, torch.tensor([[1.0]]), None, Scheme("int5", True, "group", 32))
    fifth = (1 << 0 | 1 << 9 | 1 << 31).to_bytes(4, "little")
    nibbles = bytearray(16)
    nibbles[9], nibbles[15] = 0x0F, 0x10
    assert bytes(encode("m", weight).flatten().tolist()) == bytes([0x00, 0x3C]) + fifth + bytes(nibbles)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(HELD),
    st.integers(1, 9),
    st.integers(1, 6),
    st.sampled_from([1, 2, 3, 0]),
    st.integers(0, 1 << 16),
)
def test_import_of_export_is_the_same(kind, rows, blocks, repeat, seed):
    dtype, symmetric = kind
    columns = 32 * blocks * max(repeat, 1)
    strategy = Scheme(dtype, symmetric, "group", 32 * repeat) if repeat else Scheme(dtype, symmetric, "channel", None)
    weight = random_weight(strategy, rows, columns, seed)
    stored = kind_of(strategy)
    data = encode("m", weight)
    loaded = decode("m", data, stored)
    repeats = strategy.columns_per_scale(columns) // 32
    assert torch.equal(loaded.codes, weight.codes)
    assert torch.equal(loaded.scale, weight.scale.repeat_interleave(repeats, 1))
    if not symmetric:
        assert torch.equal(loaded.zero_point, weight.zero_point.repeat_interleave(repeats, 1))
    assert torch.equal(encode("m", loaded), data)
    assert loaded.scheme == SCHEMES[stored]
    reference = gguf.quants.dequantize(data.numpy(), stored)
    error = np.abs(reference - weight.dequantize().numpy()).max()
    # only m is rounded: half a unit in the last of its 11 bits, of 2^bits - 1 steps at most
    steps = (1 << SCHEMES[stored].bits) - 1
    assert error <= (0 if symmetric else steps * 2**-11 * float(weight.scale.max()))


def test_mxfp4_as_the_gguf_package_reads_it():
    weight = solve(torch.randn(6, 96, generator=torch.Generator().manual_seed(3)), MXFP4, torch.float32)
    data = encode("m", weight)
    assert np.array_equal(gguf.quants.dequantize(data.numpy(), Kind.MXFP4), weight.dequantize().numpy())
    loaded = decode("m", data, Kind.MXFP4)
    assert torch.equal(loaded.codes, weight.codes)
    assert torch.equal(loaded.scale, weight.scale)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q5_0, Kind.Q8_0])
def test_blocks_of_the_gguf_package_are_codes_of_ours(kind):
    w = np.random.default_rng(0).standard_normal((8, 128)).astype(np.float32)
    data = gguf.quants.quantize(w, kind)
    loaded = decode("m", torch.from_numpy(data), kind)
    assert np.array_equal(loaded.dequantize().numpy(), gguf.quants.dequantize(data, kind))


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q5_1])
def test_minima_that_are_no_zero_points_are_noticed(kind):
    w = np.random.default_rng(0).standard_normal((8, 128)).astype(np.float32)
    data = torch.from_numpy(gguf.quants.quantize(w, kind))
    assert not whole_steps(data, kind)
    with pytest.raises(CheckpointError, match=r"m: .*whole number of steps"):
        decode("m", data, kind)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 70000.0])
def test_scales_that_float16_cannot_hold_are_refused(scale):
    scheme = Scheme("int8", True, "channel", None)
    weight = QuantizedTensor(torch.ones(1, 32, dtype=torch.int8), torch.tensor([[scale]]), None, scheme)
    with pytest.raises(CheckpointError, match="m: a scale is NaN or larger"):
        encode("m", weight)


def test_damaged_scales_are_refused():
    data = torch.zeros(1, 34, dtype=torch.uint8)
    data[0, 1] = 0x7C  # infinity
    with pytest.raises(CheckpointError, match="m: a scale is NaN"):
        decode("m", data, Kind.Q8_0)
    data = torch.full((1, 17), 255, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="m: a block's scale is NaN"):
        decode("m", data, Kind.MXFP4)


def test_scattered_groups_are_refused():
    weight = random_weight(Scheme("int4", True, "group", 32), 2, 64, 0)
    index = torch.arange(64, dtype=torch.int32) % 2
    scattered = QuantizedTensor(weight.codes, weight.scale, None, weight.scheme, group_index=index)
    with pytest.raises(UnsupportedError, match=r"m: .*act-order.*--requantize"):
        encode("m", scattered)


@pytest.mark.parametrize(
    ("scheme", "columns", "said", "requantized"),
    [
        (Scheme("int4", True, "group", 16), 64, "scales of 16 columns", "int4-sym-g32"),
        (Scheme("int4", True, "channel", None), 72, "has 72 columns", None),
        (Scheme("int8", False, "channel", None), 64, "int8-asym-channel", "int8-sym-g32"),
        (Scheme("int6", False, "group", 32), 64, "int6-asym-g32", "int8-sym-g32"),
        (Scheme("fp8_e4m3", True, "channel", None), 64, "fp8_e4m3-channel", "int8-sym-g32"),
        (NVFP4, 64, "nvfp4", "int4-sym-g32"),
        (MXFP8, 64, "mxfp8", "int8-sym-g32"),
        (Scheme("int3", False, "group", 16), 64, "scales of 16 columns", "int4-asym-g32"),
        (Scheme("int5", True, "group", 16), 64, "scales of 16 columns", "int5-sym-g32"),
    ],
)
def test_what_gguf_cannot_hold(scheme, columns, said, requantized):
    reason = refusal("m", scheme, None, (8, columns))
    assert reason is not None
    assert said in reason
    near = nearest(scheme, (8, columns))
    assert (near and near.label()) == requantized
    assert near is None or refusal("m", near, None, (8, columns)) is None
