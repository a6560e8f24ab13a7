"""Flags for stored ranges of activations: what they become in the recipe, and where they make no sense."""

from typing import Any

import pytest

from cann_llm_quant.cli.recipe_flags import FIELDS, resolve_recipe
from cann_llm_quant.errors import UsageError
from cann_llm_quant.recipe import ActivationFormat


def activations(**flags: Any) -> ActivationFormat | None:
    return resolve_recipe(None, dict.fromkeys(FIELDS) | flags, ()).scheme.activations


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ActivationFormat(dynamic=False)),
        ({"act_range": "mse"}, ActivationFormat(dynamic=False, range="mse")),
        ({"act_percentile": 99.5}, ActivationFormat(dynamic=False, range="percentile", percentile=99.5)),
        ({"act_range": "percentile"}, ActivationFormat(dynamic=False, range="percentile", percentile=99.9)),
    ],
)
def test_flags_become_the_estimator_of_the_scheme(flags: dict[str, Any], expected: ActivationFormat) -> None:
    assert activations(scheme="W8A8-static", **flags) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"act_range": "mse"}, "for stored ranges; add a static --scheme"),
        ({"scheme": "W8A8", "act_percentile": 99.0}, "for stored ranges; add a static --scheme"),
        ({"scheme": "W8A8-STATIC", "act_range": "mse", "act_percentile": 99.0}, "not of --act-range mse"),
        ({"scheme": "FP8-STATIC", "act_range": "entropy"}, "entropy ranges are of symmetric int"),
        ({"scheme": "W8A8-STATIC", "act_percentile": 30.0}, "percentile"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        activations(**flags)
