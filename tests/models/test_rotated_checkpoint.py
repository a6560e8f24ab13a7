"""A rotated checkpoint computes what its source computes, and its residual stream really is another one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import CPU, random_ids, save_family
from torch import Tensor

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.models.rotated_checkpoint import RotatedCheckpoint
from cann_llm_quant.models.weights import load_layer, load_model


def opened(folder: Path, seed: int = 0) -> RotatedCheckpoint:
    inner = open_checkpoint(str(folder))
    return RotatedCheckpoint(inner, arch_from_checkpoint(inner), seed)


def logits(checkpoint: Checkpoint, ids: Tensor) -> Tensor:
    return load_model(checkpoint, arch_from_checkpoint(checkpoint), CPU, torch.float32)(ids)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Biases of q, k, v, norms of q and k, routed and shared experts, gains of every norm; sizes 36 and 12."""
    config = {"hidden_size": 48, "head_dim": 12, "num_attention_heads": 4}
    reference = save_family(tmp_path, family, **config)
    ids = random_ids(97, 2, 9)
    with opened(tmp_path) as rotated, torch.no_grad():
        found = logits(rotated, ids)
        expected = reference(ids).logits
        inner = open_checkpoint(str(tmp_path))
        name = "model.layers.1.self_attn.o_proj.weight"
        assert not torch.allclose(rotated.load(name), inner.load(name), atol=1e-2)
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("biases", [{"attention_bias": True, "mlp_bias": True}])
def test_biases_of_outputs_turn_with_the_stream(biases: dict[str, Any], tmp_path: Path) -> None:
    reference = save_family(tmp_path, "llama", head_dim=12, **biases)
    ids = random_ids(97, 1, 7)
    with opened(tmp_path, seed=3) as rotated, torch.no_grad():
        expected = reference(ids).logits
        assert float((logits(rotated, ids) - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def test_a_tied_head_is_untied_where_the_final_norm_has_a_gain(tmp_path: Path) -> None:
    reference = save_family(tmp_path, "llama", head_dim=12, tie_word_embeddings=True)
    ids = random_ids(97, 1, 7)
    with opened(tmp_path) as rotated, torch.no_grad():
        assert rotated.unties_head
        assert rotated.config["tie_word_embeddings"] is False
        assert "lm_head.weight" in rotated.tensors
        assert not arch_from_checkpoint(rotated).tied_head
        expected = reference(ids).logits
        assert float((logits(rotated, ids) - expected).abs().max()) < 1e-5 * float(expected.abs().max())
        reference.model.norm.weight.fill_(0.7)
        reference.save_pretrained(tmp_path / "even")
        even = reference(ids).logits
    with opened(tmp_path / "even") as rotated, torch.no_grad():
        assert not rotated.unties_head
        assert arch_from_checkpoint(rotated).tied_head
        assert float((logits(rotated, ids) - even).abs().max()) < 1e-5 * float(even.abs().max())


def test_norms_become_one_and_the_stream_turns_as_a_whole(tmp_path: Path) -> None:
    save_family(tmp_path, "llama", head_dim=12)
    with opened(tmp_path) as rotated, open_checkpoint(str(tmp_path)) as source:
        for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight"):
            assert torch.equal(rotated.load(name), torch.ones(36))
        turned, plain = (c.load("model.embed_tokens.weight").double() for c in (rotated, source))
        torch.testing.assert_close(turned @ turned.T, plain @ plain.T)
        assert {n: (i.shape, i.dtype) for n, i in rotated.tensors.items()} == {
            n: (i.shape, i.dtype) for n, i in source.tensors.items()
        }
        assert rotated.fingerprint() != source.fingerprint()
        assert rotated.fingerprint() != RotatedCheckpoint(source, arch_from_checkpoint(source), 1).fingerprint()


def test_outliers_of_the_stream_are_spread(tmp_path: Path) -> None:
    """A channel that every output writes forty times as large: after rotating no column of the input stands out."""
    reference = save_family(tmp_path / "plain", "llama", head_dim=12)
    with torch.no_grad():
        reference.model.embed_tokens.weight[:, 5] *= 40
    reference.save_pretrained(tmp_path / "outliers")
    with opened(tmp_path / "outliers") as rotated, open_checkpoint(str(tmp_path / "outliers")) as source:
        ratios = []
        for checkpoint in (source, rotated):
            x = checkpoint.load("model.embed_tokens.weight")
            ratios.append(float((x.abs().amax(1) / x.square().mean(1).sqrt()).mean()))
    assert ratios[0] > 5.5
    assert ratios[1] < 2.5


def test_bf16_is_rounded_once(tmp_path: Path) -> None:
    reference = save_family(tmp_path / "wide", "qwen2", num_attention_heads=3, num_key_value_heads=1)
    reference.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    reference.to(torch.float32).save_pretrained(tmp_path / "same")
    with opened(tmp_path / "half") as half, opened(tmp_path / "same") as wide:
        for name in half.tensors:
            found, exact = half.load(name), wide.load(name)
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found.float(), exact, rtol=2**-8, atol=1e-6)


def test_a_norm_with_an_offset_stores_what_gives_one(tmp_path: Path) -> None:
    save_family(tmp_path, "llama", head_dim=12)
    inner = open_checkpoint(str(tmp_path))
    arch = replace(arch_from_checkpoint(inner), norm_offset=1.0)
    rotated = RotatedCheckpoint(inner, arch, 0)
    ids = random_ids(97, 1, 7)
    with torch.no_grad():
        before, after = (load_model(c, arch, CPU, torch.float32)(ids) for c in (inner, rotated))
    assert torch.equal(rotated.load("model.norm.weight"), torch.zeros(36))
    assert float((after - before).abs().max()) < 1e-5 * float(before.abs().max())


def test_sizes_without_a_matrix_are_refused(tmp_path: Path) -> None:
    save_family(tmp_path, "llama", head_dim=10)
    with pytest.raises(UnsupportedError, match="order 10 "):
        opened(tmp_path)


def test_a_layer_is_loaded_tensor_by_tensor(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen3", head_dim=12)
    with opened(tmp_path) as rotated:
        arch = arch_from_checkpoint(rotated)
        layer = load_layer(rotated, arch, 0, CPU, torch.float32)
        assert layer.keys() == arch.layers[0].tensor_shapes().keys()
        q_norm = next(p.name for p in arch.layers[0].parameters if p.role == "q_norm")
        with open_checkpoint(str(tmp_path)) as source:
            assert torch.equal(layer[q_norm], source.load(q_norm))
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["head_dim"] == 12
