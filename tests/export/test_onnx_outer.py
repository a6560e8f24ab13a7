"""Quantized embeddings and heads in ONNX: a tied head multiplies by the very constant that is looked up."""

from pathlib import Path

import numpy as np
import onnx_runs
import pytest
import torch

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx
from cann_operator import evaluate
from tiny_models import save_tiny

from cann_llm_quant.pipeline import RunOptions, quantize_model
from cann_llm_quant.recipe import Recipe

INT8 = {"bits": 8, "group_size": -1}


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def packed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """One layer whose embedding and head are int8."""
    source = save_tiny(tmp_path / "model", tie_word_embeddings=request.param, num_hidden_layers=1)
    recipe = Recipe.model_validate(
        {"method": "rtn", "scheme": {"bits": 4, "group_size": 32}, "head": INT8, "embedding": INT8}
    )
    quantize_model(str(source), tmp_path / "packed", recipe, options=RunOptions())
    return tmp_path / "packed"


def vocabulary_wide(folder: Path) -> list[str]:
    """Constants of 8-bit codes with as many rows or columns as the vocabulary."""
    kinds = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
    constants = onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer
    return [tensor.name for tensor in constants if 128 in tensor.dims and tensor.data_type in kinds]


def test_c21_onnx_runtime_looks_up_and_multiplies_the_same_codes(packed: Path, tmp_path: Path) -> None:
    folder = onnx_runs.export(packed, tmp_path / "onnx", dtype="fp32").path
    ids = onnx_runs.random_ids(2, 9)
    expected = onnx_runs.reference(packed, ids)
    assert np.abs(onnx_runs.OrtRun(folder, batch=2)(ids) - expected).max() < 2e-5 * np.abs(expected).max()
    tied = onnx_runs.decoder_of(packed).arch.tied_head
    names = [name for name in vocabulary_wide(folder) if "layers" not in name]
    assert names == ["model.embed_tokens.codes"] + ([] if tied else ["lm_head.codes"])


def test_c21_the_operator_for_cann_shares_them_too(packed: Path, tmp_path: Path) -> None:
    folder = onnx_runs.export(packed, tmp_path / "onnx", "cann").path
    ids = onnx_runs.random_ids(2, 5)
    past = np.zeros((2, 2, 0, 16), dtype=np.float16)
    feeds = {
        "input_ids": ids.numpy(),
        "attention_mask": torch.ones_like(ids).numpy(),
        "position_ids": torch.arange(5).expand(2, 5).numpy(),
        "past_key_values.0.key": past,
        "past_key_values.0.value": past,
    }
    expected = onnx_runs.reference(packed, ids)
    assert np.abs(evaluate(folder, feeds)["logits"] - expected).max() < 0.01 * np.abs(expected).max()
