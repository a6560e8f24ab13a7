"""`top_k` and `top_p` together: the nucleus is that of the `top_k` tokens, renormalized, not of all tokens."""

import numpy as np
import pytest
import torch

from cann_llm_quant.runner.sampler import make_generator, sample
from cann_llm_quant.runner.settings import GenerationSettings

PROBABILITIES = [0.1, 0.4, 0.2, 0.3]
DRAWS = 2000


def counts(top_k: int, top_p: float) -> np.ndarray:
    wanted = GenerationSettings(temperature=1.0, top_k=top_k, top_p=top_p)
    generator = make_generator(wanted)
    logits = torch.tensor(PROBABILITIES).log()
    return np.bincount([sample(logits, wanted, generator).token_id for _ in range(DRAWS)], minlength=4)


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [
        # Of (.4, .3, .2) / .9 the first two hold .778 >= .75; of all tokens they hold .7, which would keep three.
        (3, 0.75, [0, 4 / 7, 0, 3 / 7]),
        # Of (.4, .3) / .7 the first holds .571 >= .5; of all tokens it holds .4, which would keep two.
        (2, 0.5, [0, 1, 0, 0]),
        # Nothing to cut: of (.4, .3, .2) / .9 the first two hold less than .8.
        (3, 0.8, [0, 4 / 9, 2 / 9, 3 / 9]),
        # A nucleus smaller than top_k wins, and the other way round.
        (4, 0.65, [0, 4 / 7, 0, 3 / 7]),
        (1, 0.99, [0, 1, 0, 0]),
    ],
)
def test_the_nucleus_is_taken_after_top_k_and_renormalized(top_k: int, top_p: float, expected: list[float]) -> None:
    found, p = counts(top_k, top_p), np.array(expected)
    assert (found[p == 0] == 0).all()
    assert (np.abs(found - DRAWS * p) <= 4.5 * np.sqrt(DRAWS * p * (1 - p))).all()
