"""GLM's KV cache for Ascend: our K has its channels in another order, which only scales of channels can tell."""

from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.export.ascend_kv import encode_kv
from cann_llm_quant.export.layout import PackedModel
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.quant.kv import KvPlan, KvScales, KvScheme, LayerKv


def model_with(folder: Path, strategy: str, shape: tuple[int, ...]) -> PackedModel:
    with open_checkpoint(str(save_tiny(folder, "glm"))) as checkpoint:
        arch = arch_from_checkpoint(checkpoint)
    scheme = KvScheme("int8", strategy=strategy)  # type: ignore[arg-type]
    scales = KvScales(torch.full(shape, 0.5), None, torch.full(shape, 0.25), None)
    plan = KvPlan((LayerKv(scheme, scheme),) * 2, (scales,) * 2)
    return PackedModel(arch, {}, {}, {}, plan, torch.float32, checkpoint.config)


def test_scales_of_channels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match=r"layer 0: .* glm, .* turns neighbours; use --kv-cache int8-head-static"
    ):
        encode_kv(model_with(tmp_path, "channel", (2, 1, 16)))


def test_scales_of_heads_are_written(tmp_path: Path) -> None:
    tensors = encode_kv(model_with(tmp_path, "head", (2, 1, 1)))["model.layers.0.self_attn.k_proj"]
    assert torch.equal(tensors["model.layers.0.self_attn.k_proj.kv_cache_scale"], torch.full((32,), 0.5))
