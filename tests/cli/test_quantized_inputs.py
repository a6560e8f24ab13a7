"""A model with quantized inputs from the command line: what is said of it, and where their error is measured."""

import json
from pathlib import Path

import pytest
from tiny_models import save_text, save_tiny

from cann_llm_quant.cli.main import main


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A float model, its W8A8 form with stored ranges, and a text."""
    base = tmp_path_factory.mktemp("inputs")
    model, text = save_tiny(base / "model", num_hidden_layers=1), save_text(base / "words.txt", tokens=1000)
    options = ["--data", str(text), "--samples", "4", "--seq-len", "32", "--act-range", "mse"]
    command = ["quantize", str(model), "-o", str(base / "out"), "--method", "rtn", "--scheme", "w8a8-static"]
    assert main([*command, *options]) == 0
    return model, base / "out", text


def test_the_error_of_inputs_is_in_the_packed_models_perplexity_and_gone_from_its_float_export(
    folders: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, packed, text = folders
    capsys.readouterr()
    assert (
        main(["export", str(packed), "--to", "float", "--dtype", "fp32", "-o", str(tmp_path / "float"), "--json"]) == 0
    )
    captured = capsys.readouterr()
    (warning,) = json.loads(captured.out)["warnings"]
    assert warning in captured.err
    assert "quantizes the inputs of 7 linears, which a float checkpoint cannot say" in captured.err
    divergence = {}
    for folder in (packed, tmp_path / "float"):
        options = ["--reference", str(model), "--data", str(text), "--window", "32", "--max-windows", "4", "--json"]
        assert main(["perplexity", str(folder), *options]) == 0
        divergence[folder] = json.loads(capsys.readouterr().out)["divergence"]["kl"]
    assert divergence[packed] > 2 * divergence[tmp_path / "float"] > 0


def test_the_folder_says_how_inputs_are_quantized(folders: tuple[Path, Path, Path]) -> None:
    document = json.loads((folders[1] / "inference_config.json").read_text(encoding="utf-8"))
    assert set(document["inputs"]["schemes"]) == {"int8-static"}
    groups = json.loads((folders[1] / "config.json").read_text(encoding="utf-8"))["quantization_config"][
        "config_groups"
    ]
    assert groups["group_0"]["input_activations"]["dynamic"] is False
