"""ONNX Runtime's logits equal ours: every family, a prompt at once and token by token, batches with padding."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx_runs import OrtRun, export, random_ids, reference, save_quantized

from cann_llm_quant.quant.scheme import Scheme

INT4 = Scheme("int4", False, "group", 32)
ODD = {"hidden_size": 36, "intermediate_size": 52, "num_attention_heads": 6, "head_dim": 10, "vocab_size": 131}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
MODELS: dict[str, tuple[str, Scheme, dict[str, Any]]] = {
    "llama": ("llama", INT4, {}),
    "llama-bias-gqa-odd-sizes": (
        "llama",
        Scheme("int4", False, "group", 4),
        ODD | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
    ),
    "llama-int8-rows-odd-sizes": ("llama", Scheme("int8", True, "channel", None), ODD | {"num_key_value_heads": 3}),
    "llama-tied": ("llama", INT4, {"tie_word_embeddings": True}),
    "llama-yarn": ("llama", INT4, {"rope_parameters": YARN}),
    "llama-llama3": ("llama", INT4, {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", INT4, {"rope_parameters": LINEAR}),
    "llama-gelu": ("llama", INT4, {"hidden_act": "gelu"}),
    "llama-gelu-tanh": ("llama", INT4, {"hidden_act": "gelu_pytorch_tanh"}),
    "qwen2": ("qwen2", Scheme("int2", False, "group", 16), {}),
    "qwen2-window": (
        "qwen2",
        INT4,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", Scheme("int8", False, "group", 16), {"head_dim": 24}),
    "mixtral": ("mixtral", INT4, {}),
    "qwen2-moe": ("qwen2_moe", INT4, {}),
    "qwen3-moe": ("qwen3_moe", INT4, {}),
}


@pytest.fixture(scope="module", params=MODELS)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A quantized model and its export."""
    family, scheme, config = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    packed = save_quantized(folder, family, scheme, **config)
    return packed, export(packed, folder / "onnx").path


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() < 2e-5 * max(1.0, float(np.abs(expected).max()))


def test_a_prompt_and_then_token_by_token(folders: tuple[Path, Path], request, record_property) -> None:
    packed, exported = folders
    ids = random_ids(2, 14)
    expected = reference(packed, ids)
    run = OrtRun(exported, batch=2)
    pieces = [run(ids[:, :9]), *(run(ids[:, step : step + 1]) for step in range(9, 14))]
    got = np.concatenate(pieces, axis=1)
    row = {"target": "onnx ort", "model": request.node.callspec.params["folders"], "consumer": "ONNX Runtime"}
    record_property("conformance", row | {"difference": float(np.abs(got - expected).max())})
    assert_close(got, expected)


def test_a_batch_with_padding_on_the_left(folders: tuple[Path, Path]) -> None:
    packed, exported = folders
    ids = random_ids(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    expected = reference(packed, ids, mask)
    run = OrtRun(exported, batch=2)
    seen = run(ids[:, :8], mask[:, :8])
    assert_close(seen[0], expected[0, :8])
    assert_close(seen[1, 4:], expected[1, 4:8])
    for step in range(8, 12):
        assert_close(run(ids[:, step : step + 1], mask[:, : step + 1]), expected[:, step : step + 1])


def test_a_prompt_in_two_pieces(folders: tuple[Path, Path]) -> None:
    packed, exported = folders
    ids = random_ids(1, 11)
    run = OrtRun(exported, batch=1)
    pieces = [run(ids[:, :4]), run(ids[:, 4:])]
    assert_close(np.concatenate(pieces, axis=1), reference(packed, ids))
