"""The runner and the streamed evaluation read every layout: the same logits as from the native files, bit for bit."""

from pathlib import Path

import pytest
import torch
from native_folders import save_native
from tiny_models import our_logits, save_tiny

from cann_llm_quant.calibrate.streamed_logits import StreamedLogits
from cann_llm_quant.export.layouts import ExportOptions, export_model
from cann_llm_quant.export.packed import open_source
from cann_llm_quant.export.packed_checkpoint import PackedCheckpoint
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.quant.scheme import ActivationScheme, Scheme
from cann_llm_quant.runner.engine import LLMEngine

IDS = torch.randint(3, 128, (1, 24), generator=torch.Generator().manual_seed(3))
SYMMETRIC, ASYMMETRIC = (Scheme("int4", symmetric, "group", 32) for symmetric in (True, False))
INT8 = Scheme("int8", True, "channel", None)
CASES = [
    ("compressed-tensors", ASYMMETRIC, None, "qwen3_moe"),
    ("awq", ASYMMETRIC, None, "llama"),
    ("gptq", SYMMETRIC, None, "qwen2"),
    ("gptq_v2", ASYMMETRIC, None, "mixtral"),
    ("ascend", INT8, ActivationScheme(), "qwen2"),
    ("ascend", SYMMETRIC, None, "llama"),
    ("gguf", SYMMETRIC, None, "llama"),
    ("gguf", INT8, None, "qwen3"),
    ("mlx", SYMMETRIC, None, "qwen3"),
]


def logits_of(folder: Path) -> torch.Tensor:
    with open_source(str(folder)) as checkpoint:
        assert isinstance(checkpoint, PackedCheckpoint)
        arch = arch_from_checkpoint(checkpoint)
        stream = StreamedLogits(checkpoint, arch, device=torch.device("cpu"), dtype=torch.float32, budget=1 << 30)
        return torch.stack(list(stream(IDS)))


@pytest.mark.parametrize(
    ("layout", "scheme", "inputs", "family"), CASES, ids=lambda v: v.label() if isinstance(v, Scheme) else None
)
def test_what_was_exported_computes_the_same(
    tmp_path: Path, layout: str, scheme: Scheme, inputs: ActivationScheme | None, family: str
) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 128}
    native = save_native(save_tiny(tmp_path / "m", family, **sizes), tmp_path / "native", scheme, inputs)
    export_model(native, tmp_path / "out", layout, ExportOptions(tokenizer=layout != "gguf"))
    expected = our_logits(native, IDS)
    got = logits_of(tmp_path / "out")
    assert torch.equal(got, expected)
    if layout != "gguf":  # without a tokenizer
        with LLMEngine(tmp_path / "out") as engine:
            torch.testing.assert_close(torch.stack(list(engine.logits(IDS))).view_as(got), got, rtol=1e-4, atol=1e-4)
