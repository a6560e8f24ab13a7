"""Folders that GPTQModel wrote itself, with act order: our reader and runner against its own kernels' results."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cann_llm_quant.export.packed import open_packed
from cann_llm_quant.quant.scheme import scheme_for
from cann_llm_quant.runner.engine import LLMEngine

GOLDENS = Path(__file__).parents[1] / "data" / "goldens" / "gptqmodel"
FOLDERS = {"gptq-act-order": scheme_for(4, 32, True), "gptq-v2-asym": scheme_for(3, 32, False)}


@pytest.mark.parametrize("name", FOLDERS)
def test_c20_act_order_is_read_as_gptqmodel_reads_it(name: str) -> None:
    expected = load_file(GOLDENS / name / "expected.safetensors")
    with open_packed(GOLDENS / name) as checkpoint:
        assert {linear.scheme for linear in checkpoint.reader.linears.values()} == {FOLDERS[name]}
        assert all(linear.scattered for linear in checkpoint.reader.linears.values())
        for module in ("model.layers.0.self_attn.k_proj", "model.layers.0.mlp.down_proj"):
            weight = checkpoint.quantized(module)
            assert weight is not None
            assert torch.equal(weight.dequantize(torch.float16), expected[f"{module}.weight"])


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_are_those_of_gptqmodel(name: str) -> None:
    """In float32 here, in float16 there; its int4 kernel rounds inputs to bfloat16 as well."""
    expected = load_file(GOLDENS / name / "expected.safetensors")
    with LLMEngine(GOLDENS / name) as engine:
        (logits,) = engine.logits(expected["input_ids"])
    limit = 0.03 if FOLDERS[name].bits == 4 else 0.01
    assert (logits - expected["logits"][0]).abs().max() < limit * float(expected["logits"].std())
