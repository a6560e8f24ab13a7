"""Loading layers and what surrounds them: names, dtypes, shared storage, complaints."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import CPU, edit_config, load_ours, random_ids, save_family

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.errors import CheckpointError
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.models.decoder import DenseLinear
from cann_llm_quant.models.weights import build_layer, load_layer, load_outer


@pytest.fixture
def tied(tmp_path: Path) -> Iterator[Checkpoint]:
    save_family(tmp_path, "qwen2", tie_word_embeddings=True)
    with open_checkpoint(str(tmp_path)) as checkpoint:
        yield checkpoint


def test_a_layer_has_its_stored_names_in_the_dtype_asked_for(tied: Checkpoint) -> None:
    arch = arch_from_checkpoint(tied)
    tensors = load_layer(tied, arch, 1, CPU, torch.bfloat16)
    assert set(tensors) == {name for name in tied.tensors if name.startswith("model.layers.1.")}
    for name, tensor in tensors.items():
        assert torch.equal(tensor, tied.load(name).bfloat16())


def test_building_a_layer_copies_nothing(tied: Checkpoint) -> None:
    arch = arch_from_checkpoint(tied)
    tensors = load_layer(tied, arch, 0, CPU, torch.float32)
    layer = build_layer(arch, 0, tensors)
    for spec in arch.layers[0].linears:
        op = layer.linears[spec.role]
        assert isinstance(op, DenseLinear)
        assert op.weight is tensors[f"{spec.module}.weight"]
        assert op.bias is (tensors[f"{spec.module}.bias"] if spec.role in "qkv" else None)
    assert layer.parameters["post_norm"] is tensors["model.layers.0.post_attention_layernorm.weight"]


def test_c21_a_tied_head_is_the_embedding_itself(tied: Checkpoint, tmp_path: Path) -> None:
    outer = load_outer(tied, arch_from_checkpoint(tied), CPU, torch.float16)
    assert outer.head is outer.embedding
    assert outer.embedding.dtype == torch.float16
    model = load_ours(tmp_path)
    assert isinstance(model.head_op, DenseLinear)
    assert model.head_op.weight is model.embedding


def test_c38_padded_vocabulary_rows_are_kept(tmp_path: Path) -> None:
    save_family(tmp_path, "llama", vocab_size=103)
    assert load_ours(tmp_path)(random_ids(97, 1, 4)).shape == (1, 4, 103)


def test_a_tensor_that_is_no_float_is_refused_with_its_name(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.int64)
    save_file(tensors, tmp_path / "model.safetensors")
    with (
        open_checkpoint(str(tmp_path), accept_quantized=True) as checkpoint,
        pytest.raises(CheckpointError, match=f"{name}.*int64"),
    ):
        arch_from_checkpoint(checkpoint)


def test_a_map_of_another_checkpoint_is_noticed(tmp_path: Path) -> None:
    save_family(tmp_path / "a", "llama")
    save_family(tmp_path / "b", "llama", intermediate_size=60)
    with open_checkpoint(str(tmp_path / "a")) as a, open_checkpoint(str(tmp_path / "b")) as b:
        arch = arch_from_checkpoint(a)
        with pytest.raises(CheckpointError, match=r"\[60, 36\].*\[52, 36\]"):
            load_layer(b, arch, 0, CPU, torch.float32)


def test_c38_config_vocabulary_that_differs_from_the_rows_is_refused(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    edit_config(tmp_path, vocab_size=100)
    with open_checkpoint(str(tmp_path)) as checkpoint, pytest.raises(CheckpointError, match=r"vocab_size=100.*97"):
        arch_from_checkpoint(checkpoint)
