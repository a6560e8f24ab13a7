"""Experts under names that a reader does not look for are warned of before they are written."""

from pathlib import Path

import pytest
from encoded_folders import save_encoded
from tiny_models import save_tiny

from cann_llm_quant.export.awq import AwqEncoder
from cann_llm_quant.export.gptq import GptqEncoder
from cann_llm_quant.quant.scheme import Scheme, scheme_for

INT4 = scheme_for(4, 32, True)
ENCODERS = {"AWQ": AwqEncoder(), "GPTQ": GptqEncoder(2)}


def int4_in_layers(module: str) -> Scheme | None:
    """Routers stay in float, as everywhere."""
    return INT4 if ".layers." in module and not module.endswith(".gate") else None


@pytest.mark.parametrize("layout", ENCODERS)
def test_gptqmodel_finds_no_experts_of_mixtral(tmp_path: Path, layout: str) -> None:
    """What GPTQModel 7.6 does with such files is told in `tests/conformance/test_conformance_experts.py`."""
    source = save_tiny(tmp_path / "float", "mixtral")
    encoder = ENCODERS[layout]
    model, _ = save_encoded(source, tmp_path / "out", encoder, int4_in_layers)
    (warning,) = encoder.check(model)
    assert warning.startswith("model.layers.0.block_sparse_moe.experts.0.w1 and the other experts are named")
    assert f"of such {layout} files" in warning
    attention, _ = save_encoded(source, tmp_path / "a", encoder, lambda name: INT4 if "self_attn" in name else None)
    assert not [warning for warning in encoder.check(attention) if "experts are named" in warning]


@pytest.mark.parametrize("layout", ENCODERS)
def test_other_families_name_them_as_gptqmodel_does(tmp_path: Path, layout: str) -> None:
    source = save_tiny(tmp_path / "float", "qwen3_moe")
    encoder = ENCODERS[layout]
    model, _ = save_encoded(source, tmp_path / "out", encoder, int4_in_layers)
    assert encoder.check(model) == []
