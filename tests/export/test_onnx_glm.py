"""GLM as ONNX: neighbours turn in half of every head, whose channels the graph puts in order first."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx_runs import OrtRun, export, random_ids, reference
from tiny_models import save_tiny

from cann_llm_quant.pipeline.request import RunOptions
from cann_llm_quant.pipeline.run import quantize_model
from cann_llm_quant.recipe import Recipe


def test_onnx_runtime_computes_our_logits(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "glm", "glm", attention_bias=True)
    recipe = Recipe.model_validate({"method": "rtn", "scheme": {"bits": 8, "group_size": 32}})
    quantize_model(str(source), tmp_path / "packed", recipe, options=RunOptions())
    folder = export(tmp_path / "packed", tmp_path / "onnx", dtype="fp32").path
    ids = random_ids(2, 12)
    expected = reference(tmp_path / "packed", ids)
    run = OrtRun(folder, batch=2)
    actual = np.concatenate([run(ids[:, :7]), run(ids[:, 7:])], axis=1)
    assert np.abs(actual - expected).max() < 2e-5 * np.abs(expected).max()
