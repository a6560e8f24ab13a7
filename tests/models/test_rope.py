"""Frequencies against transformers' ROPE_INIT_FUNCTIONS, rotation against complex numbers, config spellings."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from cann_llm_quant.errors import CheckpointError, UnsupportedError
from cann_llm_quant.models.arch import Rope
from cann_llm_quant.models.config_fields import ConfigFields
from cann_llm_quant.models.rope import cos_sin, frequencies, rotate
from cann_llm_quant.models.rope_config import rope_from_config, scaled_positions

TRAINED = 512
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "dynamic-one": {"rope_type": "dynamic", "factor": 1.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-implicit-length": {"rope_type": "yarn", "factor": 4.0},
    "yarn-attention": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.7},
    "yarn-betas": {"rope_type": "yarn", "factor": 16.0, "beta_fast": 20, "beta_slow": 2, "truncate": False},
    "yarn-mscale": {"rope_type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn-mscale-alone": {"rope_type": "yarn", "factor": 40, "mscale": 0.7},
    "yarn-mscale-zero": {"rope_type": "yarn", "factor": 40, "mscale": 0.7, "mscale_all_dim": 0},
    "yarn-empty-ramp": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1000, "beta_slow": 900},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 64},
    "llama3-implicit-length": LLAMA3,
}


def parse(config: dict[str, Any], theta: float = 10000.0) -> Rope:
    return rope_from_config(ConfigFields(config), theta, TRAINED)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 10000.0), (10, 500000.0), (128, 1000000.0)])
@pytest.mark.parametrize("length", [1, TRAINED, TRAINED + 1, 5000])
def test_frequencies_equal_transformers(name: str, head_dim: int, theta: float, length: int) -> None:
    parameters = SCALINGS[name] | {"rope_theta": theta}
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=TRAINED,
        rope_parameters=dict(parameters),
    )
    if name == "default":
        expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=length)
    ours, our_factor = frequencies(parse({"rope_parameters": parameters}), head_dim, length)
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=0)
    assert our_factor == pytest.approx(factor, rel=1e-12)


def test_rotation_is_multiplication_by_complex_units() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, 8, generator=generator)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 7, 100, 3, 2000]])
    cos, sin = cos_sin(Rope(theta=100.0), 8, positions, torch.float32)
    units = torch.exp(1j * positions[:, None, :, None].double() * 100.0 ** (-torch.arange(4).double() / 4))
    turned = torch.complex(x[..., :4].double(), x[..., 4:].double()) * units
    expected = torch.cat((turned.real, turned.imag), dim=-1).float()
    torch.testing.assert_close(rotate(x, cos, sin), expected, atol=2e-4, rtol=0)


def test_partial_rotation_leaves_the_rest_alone() -> None:
    rope = rope_from_config(ConfigFields({"partial_rotary_factor": 0.5}), 10000.0, TRAINED, partial_rotary=True)
    x = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(3)[None]
    cos, sin = cos_sin(rope, 8, positions, torch.float32)
    whole = rotate(x[..., :4], *cos_sin(Rope(), 4, positions, torch.float32))
    assert torch.equal(rotate(x, cos, sin), torch.cat((whole, x[..., 4:]), dim=-1))


@pytest.mark.parametrize(
    "config",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
    ],
)
def test_partial_rotation_is_refused_where_the_family_turns_whole_heads(config: dict[str, Any]) -> None:
    """transformers ignores the field there (or fails on it), other readers may not: no guess is made."""
    with pytest.raises(UnsupportedError, match=r"config\.json: partial_rotary_factor=0\.5.*remove") as caught:
        parse(config)
    assert "\n" not in str(caught.value)


def test_a_partial_rotary_factor_of_one_says_nothing() -> None:
    one, silent = (frequencies(parse(config), 16, 0) for config in ({"partial_rotary_factor": 1.0}, {}))
    assert torch.equal(one[0], silent[0])


def test_no_more_than_the_whole_head_turns() -> None:
    with pytest.raises(CheckpointError, match="at most 1"):
        rope_from_config(ConfigFields({"partial_rotary_factor": 1.5}), 1e4, TRAINED, partial_rotary=True)


def test_angles_stay_exact_in_half_precision() -> None:
    """Position 4001 has no bfloat16; angles are formed in float32 and only cos and sin are rounded."""
    cos, sin = cos_sin(Rope(), 64, torch.tensor([[4001]]), torch.bfloat16)
    exact_cos, exact_sin = cos_sin(Rope(), 64, torch.tensor([[4001]]), torch.float32)
    assert torch.equal(cos, exact_cos.bfloat16())
    assert torch.equal(sin, exact_sin.bfloat16())


def test_dynamic_depends_on_the_longest_position_of_the_call_only() -> None:
    rope = parse({"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    short = torch.arange(10)[None]
    before = cos_sin(rope, 16, short, torch.float32)
    cos_sin(rope, 16, torch.tensor([[4 * TRAINED]]), torch.float32)
    assert torch.equal(cos_sin(rope, 16, short, torch.float32)[0], before[0])
    assert torch.equal(before[0], cos_sin(Rope(), 16, short, torch.float32)[0])


def test_dynamic_takes_the_length_that_is_given() -> None:
    """A chunk of a longer text turns as that text does."""
    rope = parse({"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    whole = cos_sin(rope, 16, torch.arange(3 * TRAINED)[None], torch.float32)
    chunk = cos_sin(rope, 16, torch.arange(10)[None], torch.float32, 3 * TRAINED)
    assert torch.equal(chunk[0], whole[0][:, :10])
    assert torch.equal(chunk[1], whole[1][:, :10])


def test_c30_both_spellings_give_one_rope() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 64}
    new = parse({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **scaling}})
    assert new == parse({"rope_theta": 500000, "rope_scaling": {"type": "yarn", **scaling}})
    assert new == parse({"rope_theta": 500000.0, "rope_scaling": {"rope_type": "yarn", **scaling}})
    both = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **scaling}, "rope_theta": 5e5}
    assert new == parse(both | {"rope_scaling": {"type": "yarn", "rope_type": "yarn", **scaling}})
    assert new.theta == 500000.0


def test_silent_config_takes_the_familys_base() -> None:
    assert parse({}, theta=1e6) == Rope(1e6, "default", {}, TRAINED)
    assert parse({"rope_scaling": None, "rope_parameters": {}}) == Rope(1e4, "default", {}, TRAINED)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 1e4}, ["rope_theta", "1000000.0", "10000.0"]),
        (
            {
                "rope_parameters": {"rope_type": "linear", "factor": 2.0},
                "rope_scaling": {"type": "linear", "factor": 4},
            },
            ["factor", "2.0", "4.0"],
        ),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 4}},
            ["rope_type", "default", "linear"],
        ),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2}}, ["yarn", "linear"]),
        ({"rope_scaling": {"type": "linear"}}, ["linear", "factor"]),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, ["low_freq_factor", "high_freq_factor"]),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, ["factor", "-1"]),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, ["factor", "'two'"]),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, ["low_freq_factor", "high_freq_factor"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "object"]),
        ({"rope_theta": 0}, ["rope_theta"]),
        ({"rope_theta": True}, ["rope_theta"]),
    ],
)
def test_contradictory_or_broken_fields_are_refused(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(config)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["longrope", "su", "mrope"])
def test_unknown_kinds_are_named(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{kind}.*linear"):
        parse({"rope_scaling": {"type": kind, "factor": 2.0}})


def test_parameters_per_layer_type_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="layer type"):
        parse({"rope_parameters": {"full_attention": {"rope_type": "default"}}})


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({}, 512),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 2048),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.5}}, 1280),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}, 512),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}, 2048),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 128}}, 512),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}}, 512),
    ],
)
def test_positions_that_the_scaling_reaches(config: dict[str, Any], positions: int) -> None:
    assert scaled_positions(parse(config)) == positions
