"""What other runtimes will not load is said before the work, and what they load is not."""

import re
from pathlib import Path

import pytest
from tiny_models import save_tiny
from transformers import AutoModelForCausalLM

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.loading import family_warnings, format_warnings
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.models.arch import LinearSpec
from cann_llm_quant.quant.scheme import MXFP4, MXFP8, NVFP4, ActivationScheme, Scheme

INT8 = Scheme("int8", True, "channel", None)


def warnings(scheme: Scheme, role: str = "up", columns: int = 128, inputs: ActivationScheme | None = None) -> list[str]:
    spec = LinearSpec(role, "m", 64, columns)
    return format_warnings({"m": scheme}, {} if inputs is None else {"m": inputs}, [spec])


@pytest.mark.parametrize(
    ("scheme", "inputs", "words"),
    [
        (INT8, ActivationScheme(), r"int8 \(beside quantized inputs\) experts: transformers 5.24 cannot load"),
        (Scheme("fp8_e4m3", True, "tile", None), None, "fp8_e4m3-tile experts"),
        (MXFP8, None, "mxfp8 experts"),
        (NVFP4, None, "nonsense"),
    ],
)
def test_experts_that_transformers_does_not_load(scheme: Scheme, inputs: ActivationScheme | None, words: str) -> None:
    (warning,) = warnings(scheme, "experts.3.up", inputs=inputs)
    assert re.search(words, warning)
    assert warnings(scheme, inputs=inputs) == []


def test_what_loads_is_not_warned_of() -> None:
    fp8 = Scheme("fp8_e4m3", True, "channel", None)
    for scheme in (INT8, Scheme("int4", True, "group", 32), fp8, MXFP4):
        assert warnings(scheme, "experts.0.down") == []
    assert warnings(Scheme("int4", True, "group", 32), "experts.0.down", inputs=ActivationScheme()) == []


def test_low_bits_and_partial_tiles() -> None:
    assert "vLLM and SGLang load 4 and 8 bits only" in warnings(Scheme("int3", True, "group", 32))[0]
    assert warnings(Scheme("fp8_e4m3", True, "tile", None), columns=160) == [
        "vLLM loads tiles only where 128 divides a linear's input: m (160 columns)"
    ]


@pytest.mark.parametrize("family", ["glm", "llama"])
def test_a_family_whose_matrices_transformers_wants_fused(tmp_path: Path, family: str) -> None:
    """Of the matrices that the decoder reads, transformers' own model lacks some exactly where it is said."""
    folder = save_tiny(tmp_path / "m", family)
    with open_checkpoint(str(folder)) as checkpoint:
        arch = arch_from_checkpoint(checkpoint)
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    missing = set(arch.tensor_shapes()) - set(theirs)
    assert bool(missing) is bool(family_warnings(arch)) is (family == "glm")
