"""The command `verify`: exit codes, the JSON object, and what people read."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_text, save_tiny

from cann_llm_quant.cli.main import main

GOLDENS = Path(__file__).resolve().parents[1] / "data/goldens/llm_compressor"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("verify") / "m", num_hidden_layers=1)


@pytest.fixture(scope="module")
def smoothed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """AWQ folds factors into norms, v and up; a balanced K powers of two into q and k."""
    folder = tmp_path_factory.mktemp("verify")
    text = save_text(folder / "words.txt", tokens=800)
    words = ["--method", "awq", "--group-size", "32", "--kv-cache", "int8-head", "--kv-smooth", "--samples", "4"]
    command = ["quantize", str(model), "-o", str(folder / "out"), "--data", str(text), "--seq-len", "64", *words]
    assert main(command) == 0
    return folder / "out"


def test_a_smoothed_output_passes_against_its_float_source(
    model: Path, smoothed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(smoothed), "--against", str(model), "--json"]) == 0
    out, _ = capsys.readouterr()
    answer = json.loads(out)
    assert (answer["status"], answer["findings"], answer["layout"], answer["source"]) == ("ok", [], "native", "float")
    assert answer["checks"] == ["files", "config", "numbers", "weights"]
    errors = {error["module"]: error["error"] for error in answer["errors"]}
    assert len(errors) == 9
    assert 0.05 < max(errors.values()) < 0.2
    assert any("factors were folded" in remark for remark in answer["remarks"])


def test_the_report_for_people_has_the_worst_linears(
    model: Path, smoothed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(smoothed), "--against", str(model)]) == 0
    out, _ = capsys.readouterr()
    assert "farthest from the source" in out
    assert "self_attn.k_proj" in out
    assert out.rstrip().endswith("nothing wrong was found")


def test_a_fault_is_one_line_and_exit_1(
    model: Path, smoothed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "out"
    damaged.mkdir()
    for file in smoothed.iterdir():
        if file.is_file():
            (damaged / file.name).write_bytes(file.read_bytes())
    tensors = load_file(damaged / "model.safetensors")
    tensors.pop("model.layers.0.mlp.up_proj.weight_scale")
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    assert main(["verify", str(damaged)]) == 1
    out, err = capsys.readouterr()
    assert "up_proj.weight_scale is missing" in out
    assert "faults found" in out
    assert "Traceback" not in out + err
    assert main(["verify", str(damaged), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["status"] == "failed"
    assert {"what", "where", "advice"} == answer["findings"][0].keys()


def test_a_fault_is_one_line_whatever_a_tensor_is_called(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "m"))
    tensors = load_file(folder / "model.safetensors")
    tensors["a\n\x1b[2Jb.weight"] = torch.full((4, 4), float("nan"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert main(["verify", str(folder)]) == 1
    out = capsys.readouterr().out
    (fault,) = [line for line in out.splitlines() if line.startswith("wrong: ")]
    assert "NaN" in fault
    assert "\x1b" not in out


def test_what_is_not_there_is_exit_2(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert main(["verify", str(model), "--against", str(tmp_path / "none")]) == 2


def test_a_packed_output_is_loaded_by_its_runtime(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(GOLDENS / "w4a16-gptq"), "--load"]) == 0
    out, _ = capsys.readouterr()
    assert "layout        compressed-tensors" in out
    assert "logits of 8 tokens computed" in out


def test_a_runtime_that_does_not_load_an_output_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("no such layout\nand more")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    assert main(["verify", str(GOLDENS / "w8a8"), "--load"]) == 1
    out, _ = capsys.readouterr()
    assert "transformers does not load it: ValueError: no such layout;" in out


def test_load_says_what_the_runtime_made_of_it(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(model), "--load", "--json"]) == 0
    loaded = json.loads(capsys.readouterr().out)["loaded"]
    assert loaded["runtime"] == "transformers"
    assert "logits of 8 tokens computed" in loaded["outcome"]


def test_linears_of_an_onnx_model_are_not_said_to_be_in_float(
    smoothed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnx")
    assert main(["export", str(smoothed), "--to", "onnx", "-o", str(tmp_path / "onnx")]) == 0
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "onnx")]) == 0
    out, _ = capsys.readouterr()
    (linears,) = [line for line in out.splitlines() if line.strip().startswith("linears")]
    assert "not told apart" in linears
