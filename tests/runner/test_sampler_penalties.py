"""Penalties, bias, min_p and log-probabilities against transformers' processors and calculations by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cann_llm_quant.runner.sampler import make_generator, sample
from cann_llm_quant.runner.settings import GenerationSettings

VOCAB = 12
DRAWS = 1500


def greedy(logits, prompt=(), output=(), **options) -> int:
    wanted = GenerationSettings(**options)
    return sample(torch.tensor(logits), wanted, make_generator(wanted), prompt, output).token_id


def transformers_probabilities(logits, prompt, output, options) -> np.ndarray:
    chain = LogitsProcessorList()
    if "repetition_penalty" in options:
        chain.append(RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    chain.append(TemperatureLogitsWarper(options["temperature"]))
    if "top_k" in options:
        chain.append(TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        chain.append(TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        chain.append(MinPLogitsWarper(options["min_p"]))
    scores = chain(torch.tensor([[*prompt, *output]]), logits[None].clone())
    return scores[0].double().softmax(-1).numpy()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "repetition_penalty": 1.7},
        {"temperature": 0.8, "repetition_penalty": 0.5},
        {"temperature": 1.0, "min_p": 0.3},
        {"temperature": 1.4, "top_k": 5, "top_p": 0.7},
        {"temperature": 0.9, "repetition_penalty": 1.3, "top_k": 8, "top_p": 0.95, "min_p": 0.2},
    ],
)
def test_frequencies_are_those_of_transformers_processors(options) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4)) * 1.5
    prompt, output = [3, 3, 7], [1, 5, 7]
    expected = transformers_probabilities(logits, prompt, output, options)
    wanted = GenerationSettings(**options, seed=11)
    generator = make_generator(wanted)
    drawn = [sample(logits, wanted, generator, prompt, output).token_id for _ in range(DRAWS)]
    counts = np.bincount(drawn, minlength=VOCAB)
    assert (counts[expected == 0] == 0).all()
    assert (np.abs(counts - DRAWS * expected) <= 4.5 * np.sqrt(DRAWS * expected * (1 - expected)) + 1e-9).all()


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.floats(-8, 8, width=16), min_size=VOCAB, max_size=VOCAB, unique=True),
    tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
    cut=st.integers(0, 9),
    penalty=st.floats(0.5, 3),
)
def test_greedy_with_a_repetition_penalty_is_transformers_choice(logits, tokens, cut, penalty) -> None:
    scores = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), torch.tensor([logits]))
    found = greedy(logits, tokens[:cut], tokens[cut:], repetition_penalty=penalty)
    assert scores[0, found] == scores.max()


def test_presence_and_frequency_count_the_output_alone() -> None:
    """By hand: l - 0.5 [c > 0] - 0.25 c over the output; the prompt's tokens keep their logits."""
    logits = [2.0, 1.9, 1.0, 0.0]
    assert greedy(logits, prompt=[0, 0, 0], presence_penalty=2.0, frequency_penalty=2.0) == 0
    assert greedy(logits, output=[0], presence_penalty=0.05) == 0  # 1.95 > 1.9
    assert greedy(logits, output=[0], presence_penalty=0.15) == 1  # 1.85 < 1.9
    assert greedy(logits, output=[0, 0, 0], presence_penalty=0.05) == 0  # once, however often
    assert greedy(logits, output=[0, 0, 0], frequency_penalty=0.05) == 1  # 2 - 0.15
    assert greedy(logits, output=[0, 1, 0, 1], presence_penalty=0.5, frequency_penalty=0.25) == 0  # 1.0, 0.9, 1.0
    assert greedy(logits, output=[2, 0, 1], presence_penalty=-2.0, frequency_penalty=0.0) == 0


def test_bias_is_added_before_everything_else() -> None:
    assert greedy([2.0, 1.0, 0.0], logit_bias={2: 2.5}) == 2
    assert greedy([2.0, 1.0, 0.0], logit_bias={0: -100.0}) == 1
    # 1 + 3 = 4, halved by the penalty: 2 < 2.5. Added after the penalty it would be 3.5.
    assert greedy([2.5, 1.0], prompt=[1], logit_bias={1: 3.0}, repetition_penalty=2.0) == 0
    logits = torch.tensor([2.0, 1.0])
    wanted = GenerationSettings(logit_bias={1: 5.0}, repetition_penalty=2.0, presence_penalty=1.0)
    sample(logits, wanted, make_generator(wanted), [0], [1])
    assert logits.tolist() == [2.0, 1.0]


def test_min_p_is_relative_to_the_likeliest() -> None:
    """Of (.4, .3, .2, .1), 0.6 of the largest is 0.24: two are left."""
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    wanted = GenerationSettings(temperature=1.0, min_p=0.6)
    generator = make_generator(wanted)
    drawn = [sample(logits, wanted, generator).token_id for _ in range(500)]
    assert set(drawn) == {1, 3}
    assert abs(drawn.count(1) - 500 * 4 / 7) < 4.5 * math.sqrt(500 * 12 / 49)
    assert sample(logits, GenerationSettings(temperature=9.0, min_p=1.0), generator).token_id == 1


def test_logprobs_are_the_models_own() -> None:
    """In float64, of the logits as they came; bias, penalties, temperature and top_k do not enter."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    exact = logits.double().numpy() - np.log(np.exp(logits.double().numpy()).sum())
    wanted = GenerationSettings(
        temperature=0.3, top_k=1, repetition_penalty=2.0, logit_bias={4: 100.0}, frequency_penalty=1.0, logprobs=3
    )
    drawn = sample(logits, wanted, make_generator(wanted), [1], [2])
    assert drawn.token_id == 4
    assert drawn.logprobs is not None
    assert drawn.logprobs.logprob == pytest.approx(exact[4], abs=1e-5)
    likeliest = np.argsort(-exact)[:3]
    assert [token for token, _ in drawn.logprobs.top] == likeliest.tolist()
    assert [value for _, value in drawn.logprobs.top] == pytest.approx(exact[likeliest].tolist(), abs=1e-5)


def test_logprobs_come_only_when_asked_for() -> None:
    logits, generator = torch.tensor([0.0, 1.0]), torch.Generator()
    assert sample(logits, GenerationSettings(), generator).logprobs is None
    none_beside = sample(logits, GenerationSettings(logprobs=0), generator).logprobs
    assert none_beside is not None
    assert none_beside.top == ()
    more_than_there_are = sample(logits, GenerationSettings(logprobs=20), generator).logprobs
    assert more_than_there_are is not None
    assert len(more_than_there_are.top) == 2


def test_c68_a_seed_draws_the_same_whatever_is_drawn_between() -> None:
    """Three requests, alone, then side by side in two orders; every one keeps its own text."""
    rows = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(6))
    requests = [
        GenerationSettings(),
        GenerationSettings(temperature=0.7, seed=1, frequency_penalty=0.4),
        GenerationSettings(temperature=0.7, seed=2, top_p=0.9),
    ]

    def side_by_side(order: list[int]) -> dict[int, list[int]]:
        generators = {i: make_generator(requests[i]) for i in order}
        outputs: dict[int, list[int]] = {i: [] for i in order}
        for row in rows:
            for i in order:
                torch.rand(3)
                outputs[i].append(sample(row, requests[i], generators[i], [1, 2], outputs[i]).token_id)
        return outputs

    alone = {i: side_by_side([i])[i] for i in range(3)}
    assert side_by_side([0, 1, 2]) == alone
    assert side_by_side([2, 0, 1]) == alone
    assert alone[1] != alone[2]
