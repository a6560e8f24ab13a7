"""Every number format in a whole folder: transformers' logits equal those of our reader and of our runner."""

from pathlib import Path

import pytest
import torch
from native_folders import save_native
from tiny_models import our_logits, save_tiny
from transformers import AutoModelForCausalLM

from cann_llm_quant.export.to_float import export_to_float
from cann_llm_quant.quant.scheme import MXFP4, MXFP8, NVFP4, ActivationScheme, Scheme

IDS = torch.randint(3, 128, (1, 24), generator=torch.Generator().manual_seed(3))
WEIGHTS = [
    Scheme("int2", True, "group", 32),
    Scheme("int3", True, "group", 32),
    Scheme("int8", True, "channel", None),
    Scheme("int4", True, "tensor", None),
    Scheme("fp8_e4m3", True, "channel", None),
    Scheme("fp8_e4m3", True, "tensor", None),
    Scheme("fp8_e4m3", True, "tile", None),
    Scheme("fp8_e4m3", True, "group", 32),
    MXFP4,
    MXFP8,
    NVFP4,
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 columns into `down` and 160 rows into `up`: tiles are partial both ways."""
    return save_tiny(tmp_path_factory.mktemp("formats") / "m", num_hidden_layers=1, intermediate_size=160)


def theirs(folder: Path, scheme: Scheme | None = None) -> torch.Tensor:
    """Logits by transformers in float32; MX and NV formats decompress to bfloat16 there, on the first forward pass."""
    small = scheme is not None and scheme.scale_type != "float"
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if small else torch.float32)
    with torch.no_grad():
        loaded(IDS)
        return loaded.to(torch.float32)(IDS).logits


INPUTS = [
    (Scheme("int8", True, "channel", None), ActivationScheme("int8")),
    (Scheme("int4", True, "group", 32), ActivationScheme("int8")),
    (Scheme("int4", True, "group", 32), ActivationScheme("int4")),
    (Scheme("fp8_e4m3", True, "channel", None), ActivationScheme("fp8_e4m3")),
    (Scheme("fp8_e4m3", True, "tile", None), ActivationScheme("fp8_e4m3", True, True, "group", 128)),
    (MXFP4, ActivationScheme("fp4_e2m1", True, True, "group", 32)),
    (MXFP8, ActivationScheme("fp8_e4m3", True, True, "group", 32)),
]


@pytest.mark.parametrize(("scheme", "inputs"), INPUTS, ids=lambda v: v.label() if isinstance(v, Scheme) else v.dtype)
def test_quantized_inputs_mean_the_same_to_transformers(
    tmp_path: Path, scheme: Scheme, inputs: ActivationScheme
) -> None:
    """Both round inputs; a rounding that falls the other way moves a logit by a step of one input."""
    model = save_tiny(tmp_path / "m", num_hidden_layers=1, hidden_size=128, intermediate_size=128)
    out = save_native(model, tmp_path / "out", scheme, inputs)
    plain = our_logits(save_native(model, tmp_path / "plain", scheme), IDS)
    expected, ours = theirs(out, scheme), our_logits(out, IDS)
    scale = float(expected.abs().max())
    step = float((ours - plain).abs().max())
    assert step > 1e-4 * scale  # inputs are quantized at all
    assert float((ours - expected).square().mean()) < 0.1 * float((ours - plain).square().mean())


@pytest.mark.parametrize("scheme", WEIGHTS, ids=Scheme.label)
def test_transformers_and_our_reader_agree(model: Path, tmp_path: Path, scheme: Scheme) -> None:
    out = save_native(model, tmp_path / "out", scheme)
    expected, ours = theirs(out, scheme), our_logits(out, IDS)
    # NVFP4's products are rounded to bfloat16 there; all others are exact. Bytes are compared in test_native.py.
    tolerance = 0.01 if scheme == NVFP4 else 1e-4
    assert float((ours - expected).abs().max()) < tolerance * float(expected.abs().max())
    export_to_float(out, tmp_path / "plain", dtype=torch.float32)
    assert float((theirs(tmp_path / "plain") - ours).abs().max()) < 1e-4 * float(ours.abs().max())
