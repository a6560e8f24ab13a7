"""Logits of every family equal those of transformers: plain, padded, past a cache, with windows, in low precision."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import FAMILIES, edit_config, load_ours, random_ids, reference_logits, save_family
from torch import Tensor
from transformers import AutoModelForCausalLM

from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.models.attention import CausalAttend, masked_attention
from cann_llm_quant.models.families import known_families

TOLERANCE = 1e-4
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    **{f"{family}-tied": (family, {"tie_word_embeddings": True}) for family in FAMILIES},
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 6}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mixtral-window": ("mixtral", {"sliding_window": 7}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "glm-quarter-and-no-bias": ("glm", {"partial_rotary_factor": 0.34, "attention_bias": False}),
    "glm-whole": ("glm", {"partial_rotary_factor": 1.0}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen2_moe-window": ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    "qwen2_moe-no-bias": ("qwen2_moe", {"qkv_bias": False}),
    "qwen2_moe-normalized": ("qwen2_moe", {"norm_topk_prob": True}),
    "qwen2_moe-stepped": ("qwen2_moe", {"decoder_sparse_step": 2}),
    "qwen3_moe-window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 7}),
    "qwen3_moe-dense-layer": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "qwen3_moe-biases": ("qwen3_moe", {"attention_bias": True, "norm_topk_prob": False}),
}


class GrowingCache:
    """The least cache there is: keys and values of every layer, grown by concatenation."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
        if layer in self.held:
            older = self.held[layer]
            k, v = torch.cat((older[0], k), dim=2), torch.cat((older[1], v), dim=2)
        self.held[layer] = (k, v)
        return masked_attention(q, k, v, scale=scale, window=window)


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    family, config = VARIANTS[request.param]
    folder = tmp_path_factory.mktemp("family")
    return save_family(folder, family, **config), load_ours(folder)


def test_every_family_of_the_folder_is_tested() -> None:
    assert set(FAMILIES) == set(known_families())


def test_plain_batch(pair: tuple[Any, Any]) -> None:
    reference, ours = pair
    ids = random_ids(97, 2, 23)
    expected = reference_logits(reference, ids)
    assert expected.std() > 0.3  # logits that say something
    torch.testing.assert_close(ours(ids), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch(pair: tuple[Any, Any], side: str) -> None:
    reference, ours = pair
    ids = random_ids(97, 3, 19, seed=5)
    real = torch.ones(3, 19, dtype=torch.bool)
    real[1, :6] = False
    real[2, :11] = False
    if side == "right":
        real = real.flip(1)
    positions = (real.long().cumsum(1) - 1).clamp(min=0)
    expected = reference_logits(reference, ids, attention_mask=real.long(), position_ids=positions)
    actual = ours(ids, positions, CausalAttend(real))
    assert actual.isfinite().all()
    torch.testing.assert_close(actual[real], expected[real], atol=TOLERANCE, rtol=0)


def test_positions_past_a_cache(pair: tuple[Any, Any]) -> None:
    """A prompt, a few tokens at once behind it, then one by one: as if all had come together."""
    reference, ours = pair
    ids = random_ids(97, 2, 24, seed=7)
    attend, parts = GrowingCache(), []
    cuts = [0, 13, 17, *range(18, 25)]
    for start, stop in itertools.pairwise(cuts):
        positions = torch.arange(start, stop).expand(2, -1)
        parts.append(ours(ids[:, start:stop], positions, attend))
    actual = torch.cat(parts, dim=1)
    torch.testing.assert_close(actual, reference_logits(reference, ids), atol=TOLERANCE, rtol=0)
    with torch.no_grad():
        prefix = reference(ids[:, :23], use_cache=True)
        last = reference(ids[:, 23:], past_key_values=prefix.past_key_values, use_cache=True).logits
    torch.testing.assert_close(actual[:, 23:], last, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_low_precision_stays_close(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    save_family(tmp_path, family)
    ids = random_ids(97, 2, 15)
    exact, low = load_ours(tmp_path)(ids), load_ours(tmp_path, dtype)(ids)
    assert low.dtype == dtype
    # expert choices may flip at near ties, so the typical error is bounded rather than the largest
    error = (low.float() - exact).abs().median() / exact.std()
    assert error < (0.03 if dtype == torch.bfloat16 else 0.005)


SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("seq", [20, 90], ids=["within", "beyond"])
def test_rope_scaling_within_and_beyond_the_trained_length(tmp_path: Path, scaling: str, seq: int) -> None:
    reference = save_family(tmp_path, "llama", rope_parameters={"rope_theta": 500.0, **SCALINGS[scaling]})
    ids = random_ids(97, 2, seq)
    expected = reference_logits(reference, ids)
    torch.testing.assert_close(load_ours(tmp_path)(ids), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", [name for name in FAMILIES if not known_families()[name].partial_rotary])
def test_partial_rotary_factor_is_refused_by_families_that_turn_whole_heads(tmp_path: Path, family: str) -> None:
    save_family(tmp_path, family)
    edit_config(tmp_path, partial_rotary_factor=0.5)
    with pytest.raises(UnsupportedError, match="partial_rotary_factor"):
        load_ours(tmp_path)


def test_c30_old_and_new_rope_fields_are_the_same_model(tmp_path: Path) -> None:
    reference = save_family(tmp_path, "qwen2", rope_parameters={"rope_theta": 500000.0, **SCALINGS["yarn"]})
    ids = random_ids(97, 1, 40)
    expected = reference_logits(reference, ids)
    scaling = {"type" if name == "rope_type" else name: value for name, value in SCALINGS["yarn"].items()}
    edit_config(tmp_path, remove=("rope_parameters",), rope_theta=500000.0, rope_scaling=scaling)
    torch.testing.assert_close(load_ours(tmp_path)(ids), expected, atol=TOLERANCE, rtol=0)


TRAINED = (
    *("stories260k", "stories260k-qwen2", "tiny-llama", "tiny-qwen2", "s260k-qwen3"),
    *("tiny-glm", "s260k-glm", "s260k-qwen3_moe", "tiny-mixtral", "stories260k-mixtral", "tiny-qwen3_moe"),
)


@pytest.mark.shared
@pytest.mark.parametrize("name", TRAINED)
def test_trained_models(shared: Path, name: str) -> None:
    folder = shared / "data" / "models" / name
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = random_ids(reference.config.vocab_size, 2, 130)
    expected = reference_logits(reference, ids)
    torch.testing.assert_close(load_ours(folder)(ids), expected, atol=TOLERANCE, rtol=0)
