"""NPUWeightQuantBatchMatmulV2 as its documentation defines it, for onnx's reference evaluator: the dialect's oracle.

Weights are unpacked one number at a time; products are summed in float64 and rounded once to the type of x.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun


def unpacked(weight: np.ndarray) -> np.ndarray:
    """int4 [k, n] from int32 [k, n / 8]: column 8j + i is bits 4i to 4i + 3 of word j, in two's complement."""
    rows, words = weight.shape
    codes = np.empty((rows, words * 8), dtype=np.int64)
    for row in range(rows):
        for word in range(words):
            bits = int(weight[row, word]) & 0xFFFFFFFF
            for lane in range(8):
                nibble = bits >> (4 * lane) & 15
                codes[row, 8 * word + lane] = nibble - 16 if nibble > 7 else nibble
    return codes


def weight_quant_matmul(
    x: np.ndarray,
    weight: np.ndarray,
    scale: np.ndarray,
    offset: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    group_size: int = 0,
) -> np.ndarray:
    """`x @ ((weight + offset) * scale) + bias` in float64; scale and offset are [k / group_size, n] or [1, n]."""
    codes = (unpacked(weight) if weight.dtype == np.int32 else weight).astype(np.float64)
    k, n = codes.shape
    groups = k // group_size if group_size else 1
    assert x.shape[1] == k
    assert scale.shape == (groups, n), "a scale for every group and column"
    assert group_size == 0 or (group_size % 32 == 0 and 32 <= group_size < k and k % group_size == 0)
    assert max(k, n) <= 65535
    group = np.arange(k) // (group_size or k)
    wide = scale.astype(np.float64)[group]
    if offset is not None:
        assert offset.shape == scale.shape
        codes += offset.astype(np.float64)[group]
    y = x.astype(np.float64) @ (codes * wide)
    return y if bias is None else y + bias.astype(np.float64)


class NPUWeightQuantBatchMatmulV2(OpRun):
    """The operator under the standard domain, with the parser's order of inputs."""

    op_domain = ""

    def _run(
        self,
        x: np.ndarray,
        weight: np.ndarray,
        antiquant_scale: np.ndarray,
        antiquant_offset: np.ndarray | None = None,
        quant_scale: np.ndarray | None = None,
        quant_offset: np.ndarray | None = None,
        bias: np.ndarray | None = None,
        antiquant_group_size: int = 0,
        dtype: int = -1,
    ) -> tuple[np.ndarray]:
        assert quant_scale is None
        assert quant_offset is None
        assert dtype == -1, "the result has the type of x"
        assert antiquant_scale.dtype == x.dtype
        return (
            weight_quant_matmul(x, weight, antiquant_scale, antiquant_offset, bias, antiquant_group_size).astype(
                x.dtype
            ),
        )


def evaluate(folder: Path, feeds: dict[str, np.ndarray]) -> dict[str, Any]:
    """All outputs of `model.onnx`, its weights read from beside it."""
    model = onnx.load(folder / "model.onnx")
    evaluator = ReferenceEvaluator(model, new_ops=[NPUWeightQuantBatchMatmulV2])
    return dict(zip(evaluator.output_names, evaluator.run(None, feeds), strict=True))
