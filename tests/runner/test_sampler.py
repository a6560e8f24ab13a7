"""Sampling against the definitions in float64, and which settings are refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_llm_quant.errors import NonFiniteResultError, RequestError
from cann_llm_quant.runner.sampler import make_generator, sample
from cann_llm_quant.runner.settings import GenerationSettings

LOGITS = torch.tensor([0.3, 2.0, -1.0, 1.5, 0.2, 1.9])


def draws(count: int = 3000, **options) -> np.ndarray:
    wanted = GenerationSettings(**options)
    generator = make_generator(wanted)
    return np.array([sample(LOGITS, wanted, generator).token_id for _ in range(count)])


def expected_probabilities(logits, temperature=1.0, top_k=0, top_p=1.0) -> np.ndarray:
    """One token after another, most probable first, until one of the limits is reached."""
    p = np.exp(np.array(logits, dtype=np.float64) / temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda token: -p[token])[: top_k or None]
    total, mass, kept = sum(p[token] for token in order), 0.0, []
    for token in order:
        if mass >= top_p * total:
            break
        kept.append(token)
        mass += p[token]
    return np.array([p[token] / mass if token in kept else 0.0 for token in range(len(p))])


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 2},
        {"temperature": 1.3, "top_p": 0.6},
        {"temperature": 1.0, "top_k": 4, "top_p": 0.8},
        {"temperature": 1.0, "top_p": 1e-9},
    ],
)
def test_frequencies_follow_the_definition(options) -> None:
    expected = expected_probabilities(LOGITS.tolist(), **options)
    counts = np.bincount(draws(**options), minlength=len(LOGITS))
    assert (counts[expected == 0] == 0).all()
    deviation = np.sqrt(3000 * expected * (1 - expected)) + 1e-9
    assert (np.abs(counts - 3000 * expected) <= 4.5 * deviation).all()


def test_greedy_takes_the_largest_whatever_the_seed() -> None:
    assert set(draws(20, seed=3)) == {1}
    assert set(draws(20, temperature=5.0, top_k=1)) == {1}
    assert set(draws(20, temperature=1e-30)) == {1}
    assert set(draws(20, temperature=1e-300)) == {1}
    assert set(draws(20, temperature=5e-324)) == {1}


def test_a_seed_repeats_its_draws() -> None:
    assert (draws(50, temperature=1.0, seed=4) == draws(50, temperature=1.0, seed=4)).all()
    assert (draws(50, temperature=1.0, seed=4) != draws(50, temperature=1.0, seed=5)).any()


def test_requests_do_not_share_randomness() -> None:
    one, other = (GenerationSettings(temperature=1.0, seed=seed) for seed in (1, 2))
    a, b = make_generator(one), make_generator(other)
    mixed = [(sample(LOGITS, one, a), sample(LOGITS, other, b))[0].token_id for _ in range(30)]
    torch.manual_seed(0)
    assert mixed == draws(30, temperature=1.0, seed=1).tolist()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=20), st.floats(0.01, 1), st.integers(0, 20))
def test_a_draw_lies_in_the_allowed_set(logits, top_p, top_k) -> None:
    wanted = GenerationSettings(temperature=1.0, top_p=top_p, top_k=top_k)
    token = sample(torch.tensor(logits), wanted, make_generator(wanted)).token_id
    rank = sum(value > logits[token] for value in logits)
    assert rank < (top_k or len(logits))
    p = expected_probabilities(logits)
    assert sum(value for value in p if value > p[token]) <= top_p + 1e-5


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_is_no_choice(value, temperature) -> None:
    wanted = GenerationSettings(temperature=temperature)
    with pytest.raises(NonFiniteResultError):
        sample(torch.tensor([1.0, value, 2.0]), wanted, make_generator(wanted))


def test_masked_tokens_are_never_drawn() -> None:
    wanted = GenerationSettings(temperature=1.0)
    generator = make_generator(wanted)
    masked = torch.tensor([-math.inf, 0.0, -math.inf])
    assert {sample(masked, wanted, generator).token_id for _ in range(30)} == {1}


def test_a_temperature_past_float32_makes_all_tokens_alike() -> None:
    wanted = GenerationSettings(temperature=1e300)
    generator = make_generator(wanted)
    masked = torch.tensor([-math.inf, 0.0, 5.0])
    assert {sample(masked, wanted, generator).token_id for _ in range(30)} == {1, 2}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("min_p", math.nan),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", -2.5),
        ("frequency_penalty", 3),
        ("frequency_penalty", math.nan),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {3: 101.0}),
        ("logprobs", -1),
        ("logprobs", 21),
        ("max_new_tokens", 0),
        ("max_new_tokens", -5),
        ("seed", -1),
        ("seed", 1 << 64),
        ("stop", ("",)),
    ],
)
def test_c70_impossible_settings_name_their_field(field, value) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        GenerationSettings(**{field: value})
    assert (caught.value.field, caught.value.exit_code) == (field, 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_ids", (999,)),
        ("stop_ids", (-1,)),
        ("stop_ids", (True,)),
        ("logit_bias", {128: 1.0}),
        ("logit_bias", {-1: 1}),
    ],
)
def test_c70_ids_past_the_models_vocabulary_name_their_field(field, value) -> None:
    with pytest.raises(RequestError, match="no token id from 0 to 127") as caught:
        GenerationSettings(**{field: value}).check_vocabulary(128)
    assert caught.value.field == field
    GenerationSettings(stop_ids=(127,), logit_bias={127: 1.0, 0: -1.0}).check_vocabulary(128)
