"""Sources that are quantized already: refused, or on request read as the float model that their codes mean."""

from pathlib import Path

import pytest
import torch
from native_folders import save_native
from tiny_models import save_tiny

from cann_llm_quant.errors import UnsupportedError
from cann_llm_quant.export.native_reader import open_native
from cann_llm_quant.export.to_float import export_to_float
from cann_llm_quant.pipeline import RunOptions, quantize_model
from cann_llm_quant.quant.scheme import Scheme
from cann_llm_quant.recipe import validate_recipe

RECIPE = validate_recipe({"method": "rtn", "scheme": {"bits": 4, "group_size": 32}}, "test")


def test_c34_a_quantized_source_is_read_in_float_on_request(tmp_path: Path) -> None:
    """The same bytes as from the float checkpoint that `export` makes of it."""
    source = save_native(save_tiny(tmp_path / "m"), tmp_path / "int8", Scheme("int8", True, "channel", None))
    with pytest.raises(UnsupportedError, match="add --dequantize"):
        quantize_model(str(source), tmp_path / "refused", RECIPE, options=RunOptions())
    quantize_model(str(source), tmp_path / "out", RECIPE, options=RunOptions(dequantize=True))
    export_to_float(source, tmp_path / "float")
    quantize_model(str(tmp_path / "float"), tmp_path / "expected", RECIPE, options=RunOptions())
    with open_native(tmp_path / "out") as ours, open_native(tmp_path / "expected") as expected:
        assert ours.modules == expected.modules
        assert "quantization_config" not in ours.config
        for module in ours.modules:
            assert torch.equal(ours.quantized(module).codes, expected.quantized(module).codes)
            assert torch.equal(ours.quantized(module).scale, expected.quantized(module).scale)
