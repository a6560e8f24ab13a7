"""KV number formats against literal float64 twins, torch's own casts and hand-made numbers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cann_llm_quant.errors import NumericError, UsageError
from cann_llm_quant.quant.kv import KvPlan, KvScales, KvScheme, LayerKv, decode, encode, kv_scale, page_range
from cann_llm_quant.quant.number_formats import nearest_, to_codes, to_values

HEADS, TOKENS, DIM = 3, 8, 24
STRATEGIES = ["tensor", "head", "channel", "token", "group"]


def schemes() -> list[KvScheme]:
    found = []
    for strategy in STRATEGIES:
        size = 6 if strategy == "group" else None
        for dynamic in (False, True) if strategy in ("tensor", "head", "channel") else (True,):
            for dtype in ("int8", "int4", "fp8_e4m3", "fp8_e5m2"):
                for symmetric in (True, False) if dtype.startswith("int") else (True,):
                    found.append(KvScheme(dtype, symmetric, strategy, size, dynamic))
    return found


ALL = schemes()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def round_trip(x: Tensor, scheme: KvScheme) -> Tensor:
    scale, zero_point = kv_scale(*page_range(x, scheme), scheme)
    return decode(encode(x, scheme, scale, zero_point), scheme, scale, zero_point)


def members(strategy: str, h: int, t: int, d: int) -> tuple:
    """The scale that a value has, by name."""
    return {"tensor": (), "head": (h,), "channel": (h, d), "token": (h, t), "group": (h, t, d // 6)}[strategy]


def literal_scale(values: list[float], scheme: KvScheme) -> tuple[float, int]:
    low, high = min(values), max(values)
    largest = max(abs(low), abs(high))
    steps = 2**scheme.bits - 1

    def stored(scale: float) -> float:
        return float(
            torch.tensor(scale, dtype=torch.float64).float().to(torch.bfloat16 if scheme.dynamic else torch.float32)
        )

    if scheme.symmetric:
        reach = {"int8": 127.5, "int4": 7.5, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}[scheme.dtype]
        return stored(largest if low == high else largest / reach), 0
    finest = 2.0 ** (math.frexp(largest)[1] - (14 if scheme.dynamic else 24))
    scale = stored(max((high - low) / steps, finest))
    return scale, round(-0.5 - (high / 2 + low / 2) / scale)


def literal_code(x: float, scale: float, zero_point: int, scheme: KvScheme) -> float:
    if scheme.dtype.startswith("int"):
        half = 2 ** (scheme.bits - 1)
        return float(min(max(round(x / scale) + zero_point, -half), half - 1))
    kind, limit = (torch.float8_e4m3fn, 448.0) if scheme.dtype == "fp8_e4m3" else (torch.float8_e5m2, 57344.0)
    return float(torch.tensor(min(max(x / scale, -limit), limit)).to(kind).float())


@pytest.mark.parametrize("scheme", ALL, ids=KvScheme.label)
def test_pages_equal_the_literal_twin(scheme: KvScheme) -> None:
    x = normal(HEADS, TOKENS, DIM) * torch.linspace(0.1, 3, DIM) + torch.linspace(-2, 2, DIM)
    groups: dict[tuple, list[float]] = {}
    places = [(h, t, d) for h in range(HEADS) for t in range(TOKENS) for d in range(DIM)]
    for h, t, d in places:
        groups.setdefault(members(scheme.strategy, h, t, d), []).append(float(x[h, t, d]))
    numbers = {key: literal_scale(values, scheme) for key, values in groups.items()}
    got = round_trip(x, scheme).double()
    for h, t, d in places:
        scale, zero_point = numbers[members(scheme.strategy, h, t, d)]
        # a value within float32's rounding of a tie may go either way
        near = {literal_code(float(x[h, t, d]) * nudge, scale, zero_point, scheme) for nudge in (1 - 1e-6, 1 + 1e-6)}
        assert any(float(got[h, t, d]) == pytest.approx((code - zero_point) * scale, rel=1e-6) for code in near)


@pytest.mark.parametrize("scheme", ALL, ids=KvScheme.label)
def test_shapes_types_and_a_batch_of_pages(scheme: KvScheme) -> None:
    x = normal(5, HEADS, TOKENS, DIM, seed=1)
    scale, zero_point = kv_scale(*page_range(x, scheme), scheme)
    assert scale.shape == (5, *scheme.scale_shape(HEADS, TOKENS, DIM))
    assert scale.dtype == (torch.bfloat16 if scheme.dynamic else torch.float32)
    assert (zero_point is None) == scheme.symmetric
    assert zero_point is None or zero_point.dtype == (torch.int16 if scheme.dynamic else torch.int32)
    codes = encode(x, scheme, scale, zero_point)
    assert codes.shape == (5, *scheme.code_shape(HEADS, TOKENS, DIM))
    assert codes.dtype == scheme.code_dtype
    whole = decode(codes, scheme, scale, zero_point, torch.bfloat16)
    for page in range(5):
        assert torch.equal(whole[page], round_trip(x[page], scheme).bfloat16())
    if scheme.dynamic:
        stored = sum(t[0].numel() * t.element_size() for t in (codes, scale, zero_point) if t is not None)
        assert stored == scheme.page_bytes(HEADS, TOKENS, DIM)


def test_bits_per_value_by_hand() -> None:
    assert KvScheme("int8").bits_per_value(16, 64) == 8
    assert KvScheme("int4", False, "group", 32, True).bits_per_value(16, 64) == 4 + 32 / 32
    assert KvScheme("int4", True, "token", None, True).bits_per_value(16, 64) == 4 + 16 / 64
    assert KvScheme("int8", False, "channel", None, True).bits_per_value(128, 64) == 8 + 32 / 128
    assert KvScheme("bf16").bits_per_value(16, 64) == 16


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(-8, 7), st.integers(-8, 7)), min_size=1, max_size=12))
def test_int4_packing_one_nibble_at_a_time(pairs: list[tuple[int, int]]) -> None:
    low, high = zip(*pairs, strict=True)
    x = torch.tensor([[[*low, *high]]], dtype=torch.float32)
    one = torch.ones(1, 1, 1)
    codes = encode(x, KvScheme("int4"), one)
    assert codes.flatten().tolist() == [(a + 8) + 16 * (b + 8) for a, b in pairs]
    assert torch.equal(decode(codes, KvScheme("int4"), one), x)


def e5m2_value(bits: int) -> float:
    sign, exponent, mantissa = bits >> 7, (bits >> 2) & 31, bits & 3
    value = mantissa / 4 * 2.0**-14 if exponent == 0 else (1 + mantissa / 4) * 2.0 ** (exponent - 15)
    return -value if sign else value


def test_every_e5m2_code_by_its_bits() -> None:
    finite = [b for b in range(256) if (b >> 2) & 31 != 31]
    codes = torch.tensor(finite, dtype=torch.uint8).view(torch.float8_e5m2)
    values = to_values(codes, "fp8_e5m2")
    assert values.tolist() == [e5m2_value(b) for b in finite]
    assert torch.equal(to_codes(values, "fp8_e5m2").view(torch.uint8), codes.view(torch.uint8))
    assert max(values.tolist()) == 57344


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-65000, 65000, width=32), min_size=1, max_size=20))
def test_e5m2_rounds_to_the_nearest_value(numbers: list[float]) -> None:
    levels = [e5m2_value(b) for b in range(256) if (b >> 2) & 31 != 31]
    for x, y in zip(numbers, nearest_(torch.tensor(numbers), "fp8_e5m2").tolist(), strict=True):
        assert abs(x - y) == min(abs(x - level) for level in levels)


@pytest.mark.parametrize(("name", "kind"), [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_fp8_codes_are_torch_casts_and_saturate(name: str, kind: torch.dtype) -> None:
    scheme = KvScheme(name, True, "head")  # type: ignore[arg-type]
    x = normal(HEADS, TOKENS, DIM) * 3
    scale = torch.full((HEADS, 1, 1), 0.25)
    codes = encode(x, scheme, scale)
    assert torch.equal(codes.view(torch.uint8), (x / 0.25).to(kind).view(torch.uint8))
    assert torch.equal(decode(codes, scheme, scale), codes.float() * 0.25)
    huge = torch.full((HEADS, TOKENS, DIM), -1e9)
    assert bool((decode(encode(huge, scheme, scale), scheme, scale) == -0.25 * torch.finfo(kind).max).all())


@pytest.mark.parametrize(("name", "kind"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_plain_formats_are_casts(name: str, kind: torch.dtype) -> None:
    scheme = KvScheme(name)  # type: ignore[arg-type]
    x = normal(HEADS, TOKENS, DIM)
    assert torch.equal(decode(encode(x, scheme), scheme), x.to(kind).float())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["int8", "int4", "fp8_e4m3", "fp8_e5m2"])
def test_what_is_not_finite_never_comes_back_as_a_number(name: str, bad: float) -> None:
    x = normal(HEADS, TOKENS, DIM)
    x[1, 3, 2] = bad
    static = KvScheme(name, True, "channel")  # type: ignore[arg-type]
    with pytest.raises(NumericError, match=r"NaN or infinity, which .* would store as some number"):
        encode(x, static, torch.full((HEADS, 1, DIM), 0.1))
    for strategy in ("channel", "token", "head", "tensor"):
        scheme = KvScheme(name, True, strategy, dynamic=True)  # type: ignore[arg-type]
        scale, zero = kv_scale(*page_range(x, scheme), scheme)
        assert not bool(decode(encode(x, scheme, scale, zero), scheme, scale, zero)[1, 3, 2].isfinite())
    if name.startswith("int"):
        scheme, ones = KvScheme(name, False, "head"), torch.ones(HEADS, 1, 1)  # type: ignore[arg-type]
        with pytest.raises(NumericError, match=f"{name}-asym-head"):
            encode(x, scheme, ones, ones.int())


def relative_rms(got: Tensor, x: Tensor) -> float:
    return float((got.double() - x.double()).norm() / x.double().norm())


def test_c63_e4m3_needs_a_scale_of_its_own() -> None:
    """The report's figures: 2.6 % with a calibrated scale at any amplitude, ruin with scale 1 at the extremes."""
    scheme = KvScheme("fp8_e4m3")
    base = normal(4, 64, 64)
    for amplitude in (1e-3, 1.0, 600.0, 1e30):
        x = base * amplitude
        assert 0.02 < relative_rms(round_trip(x, scheme), x) < 0.03
    one = torch.ones(1, 1, 1)
    for amplitude in (1e-3, 600.0):
        x = base * amplitude
        assert relative_rms(decode(encode(x, scheme, one), scheme, one), x) > 0.3


def test_c64_a_channel_far_from_zero_costs_the_others_nothing_by_channel() -> None:
    x = normal(2, 128, 32) * 0.3
    x[:, :, 2] += 20
    others = [d for d in range(32) if d != 2]

    def error(scheme: KvScheme) -> float:
        return relative_rms(round_trip(x, scheme)[..., others], x[..., others])

    assert error(KvScheme("int8", True, "token", None, True)) > 0.12
    assert error(KvScheme("int8", False, "token", None, True)) > 0.05
    for symmetric in (True, False):
        for dynamic in (False, True):
            assert error(KvScheme("int8", symmetric, "channel", None, dynamic)) < 0.01
    offset = round_trip(x, KvScheme("int8", False, "channel"))[..., 2] - x[..., 2]
    # the zero point takes the offset: the channel's own error is that of a channel around zero
    assert float(offset.abs().max()) < 0.01


@pytest.mark.parametrize("scheme", ALL, ids=KvScheme.label)
@pytest.mark.parametrize("value", [0.0, 20.0, -0.3125, 3.0e-5, -1.0e4])
def test_c64_a_constant_decodes_to_itself(scheme: KvScheme, value: float) -> None:
    """Numbers of 8 bits; with a zero point, or static scales, longer ones as well."""
    constant = float(torch.tensor(value).bfloat16())
    x = torch.full((HEADS, TOKENS, DIM), constant)
    assert torch.equal(round_trip(x, scheme), x)
    exact = torch.tensor(value * math.pi).half().float() if scheme.dynamic else torch.tensor(value * math.pi)
    if not scheme.dynamic or not scheme.symmetric:
        assert torch.equal(round_trip(torch.full_like(x, float(exact)), scheme), torch.full_like(x, float(exact)))


@pytest.mark.parametrize("scheme", ALL, ids=KvScheme.label)
def test_extreme_pages_stay_finite(scheme: KvScheme) -> None:
    base = normal(HEADS, TOKENS, DIM).clamp(-1, 1)
    for size in (0.0, 1e-42, 1e-30, 3e38):
        got = round_trip(base * size, scheme)
        assert bool(got.isfinite().all())
        assert float((got - base * size).abs().max()) <= max(size, 1e-37)
    nearly = torch.full_like(base, 20.0)
    nearly[:, 0] += 2e-6
    assert float((round_trip(nearly, scheme) - nearly).abs().max()) < 20 * 0.13


def test_c65_a_group_must_divide_the_head() -> None:
    scheme = KvScheme("int8", True, "group", 16, True)
    for call in (lambda: scheme.check(24), lambda: scheme.scale_shape(2, 16, 24), lambda: scheme.page_bytes(2, 16, 24)):
        with pytest.raises(UsageError, match=r"16 does not divide head_dim 24; choose from 2, 3, 4, 6, 8, 12, 24$"):
            call()
    scheme.check(96)
    with pytest.raises(UsageError, match="head_dim 15 is odd"):
        KvScheme("int4").check(15)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bf16", True, "head"), "bf16 has no scales"),
        (("fp8_e4m3", False), "no zero points"),
        (("int8", True, "group"), "do not fit"),
        (("int8", True, "head", 16), "do not fit"),
        (("int8", True, "group", 0, True), "not a positive"),
        (("int8", True, "token"), "make them dynamic"),
    ],
)
def test_contradictions_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        KvScheme(*arguments)


def test_a_plan_needs_the_scales_of_its_schemes() -> None:
    static, one, zero = KvScheme("int8", False), torch.ones(1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.int32)
    layers = (LayerKv(), LayerKv(static, KvScheme("bf16")))
    plan = KvPlan(layers, (KvScales(), KvScales(one, zero)))
    assert plan.quantizes
    assert not KvPlan.plain(3).quantizes
    with pytest.raises(UsageError, match="layer 1 keys: int8-asym-tensor has no calibrated scale"):
        KvPlan(layers, (KvScales(), KvScales()))
    with pytest.raises(UsageError, match="layer 1 keys: int8-asym-tensor has no zero point"):
        KvPlan(layers, (KvScales(), KvScales(one)))
    with pytest.raises(UsageError, match="2 layers has scales for 1"):
        KvPlan(layers, (KvScales(),))
    with pytest.raises(UsageError, match="cannot be negative"):
        KvPlan((), (), sink_tokens=-1)


def test_labels_name_schemes_apart() -> None:
    assert [KvScheme("int8").label(), KvScheme("int4", False, "group", 32, True).label(), KvScheme("fp16").label()] == [
        "int8-tensor",
        "int4-asym-g32-dynamic",
        "fp16",
    ]
    assert len({scheme.label() for scheme in ALL}) == len(ALL)
