"""The commands on tiny checkpoints, as a user gives them. Field cases C37, C54, C57, C72, C74."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_text, save_tiny

from cann_llm_quant.cli.main import main

Run = Callable[..., tuple[int, Any, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float model in a folder whose name is neither ASCII nor without spaces (case C57)."""
    return save_tiny(tmp_path_factory.mktemp("模型 é") / "float model", num_hidden_layers=2)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text(tmp_path_factory.mktemp("text") / "words.txt", tokens=2000)


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line with `--json`: exit code, the one object on stdout, stderr."""

    def run_json(*arguments: object) -> tuple[int, Any, str]:
        code = main([*map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        assert out.count("\n") == 1
        return code, json.loads(out), err

    return run_json


@pytest.fixture(scope="module")
def quantized(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("out") / "w4"
    words = ["--data", str(text), "--samples", "4", "--seq-len", "64", "--group-size", "32"]
    assert main(["quantize", str(model), "-o", str(output), *words]) == 0
    return output


def damaged(model: Path, folder: Path) -> Path:
    """A copy with a NaN and two infinities in one tensor."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    weight = tensors["model.layers.1.mlp.up_proj.weight"].clone()
    weight[3, 5], weight[0, 0], weight[0, 1] = math.nan, math.inf, -math.inf
    tensors["model.layers.1.mlp.up_proj.weight"] = weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_quantize_reports_what_it_did(quantized: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((quantized / "config.json").read_text(encoding="utf-8"))
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert main(["inspect", str(quantized)]) == 0
    out = capsys.readouterr().out
    assert "native: int4-sym-g32 for 14 linears" in out
    assert "model.layers.*.mlp.down_proj.weight_packed" in out


def test_quantize_json_counts_add_up(run_json: Run, model: Path, text: Path, tmp_path: Path) -> None:
    words = ["--method", "rtn", "--bits", "8", "--group-size", "-1", "--ignore", "re:.*o_proj"]
    code, report, err = run_json("quantize", model, "-o", tmp_path / "out put", *words)
    assert (code, report["status"]) == (0, "ok")
    assert report["quantized_linears"] == 2 * 6
    tensors = report["quantized_linears"] + report["kept_tensors"] + len(report["dropped_tensors"])
    assert report["source_tensors"] == tensors
    assert "100%" in err


def test_c01_misfit_names_linears_and_sizes(run_json: Run, model: Path, tmp_path: Path) -> None:
    code, failure, _ = run_json("quantize", model, "-o", tmp_path / "o", "--group-size", "128", "--method", "rtn")
    assert code == failure["exit_code"] == 2
    assert "q_proj" in failure["error"]
    assert "64 input features" in failure["error"]
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("pattern", ["re:.*lm_hed", "re:mlp.gate", "*.gate_proj"])
def test_c54_pattern_without_match_is_refused(run_json: Run, model: Path, tmp_path: Path, pattern: str) -> None:
    code, failure, _ = run_json("quantize", model, "-o", tmp_path / "o", "--method", "rtn", "--ignore", pattern)
    assert code == 2
    assert f"pattern {pattern!r} matches none" in failure["error"]


def test_c54_invalid_pattern_names_the_position(run_json: Run, model: Path, tmp_path: Path) -> None:
    code, failure, _ = run_json("quantize", model, "-o", tmp_path / "o", "--ignore", "re:layers.(0")
    assert code == 2
    assert "position" in failure["error"]


def test_c59_folder_without_config_is_exit_2(run_json: Run, tmp_path: Path) -> None:
    code, failure, err = run_json("inspect", tmp_path)
    assert code == 2
    assert "config.json" in failure["error"]
    assert err.count("\n") == 1


def test_inspect_counts_bytes_and_tensors(run_json: Run, model: Path) -> None:
    code, report, _ = run_json("inspect", model, "--tensors")
    stored = load_file(model / "model.safetensors")
    assert code == 0
    assert report["tensors"] == len(stored) == len(report["tensor_list"])
    assert report["bytes"] == sum(tensor.nbytes for tensor in stored.values())
    assert report["architecture"]["model_type"] == "llama"
    assert report["quantization"] is None
    assert "tokenizer.json" in report["companion_files"]


def test_c37_scan_lists_damaged_tensors(run_json: Run, model: Path, tmp_path: Path) -> None:
    code, report, _ = run_json("inspect", damaged(model, tmp_path / "bad"), "--scan")
    assert (code, report["status"]) == (1, "failed")
    assert report["non_finite"] == {"model.layers.1.mlp.up_proj.weight": {"nan": 1, "infinite": 2}}
    code, report, _ = run_json("inspect", model, "--scan")
    assert (code, report["non_finite"]) == (0, {})


def test_perplexity_of_a_model_against_itself(run_json: Run, model: Path, text: Path) -> None:
    code, result, _ = run_json(
        "perplexity", model, "--reference", model, "--data", text, "--window", 64, "--max-increase", "0%", "--max-kl", 0
    )
    assert (code, result["status"]) == (0, "ok")
    assert result["increase"] == 0.0
    assert result["divergence"]["kl"] == 0.0
    assert result["divergence"]["top1_agreement"] == 1.0


def test_c72_the_result_states_its_rules(run_json: Run, model: Path, text: Path) -> None:
    _, result, _ = run_json("perplexity", model, "--data", text, "--window", 64, "--stride", 16, "--bos", "each-window")
    rules = result["settings"]
    assert (rules["window"], rules["stride"], rules["bos"], rules["bos_id"]) == (64, 16, "each-window", 1)
    assert len(rules["text_sha256"]) == 64
    assert result["perplexity"] == pytest.approx(math.exp(result["nll_sum"] / result["tokens"]))


def test_perplexity_equals_transformers(run_json: Run, model: Path, text: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, result, _ = run_json("perplexity", model, "--data", text, "--window", 64, "--max-windows", 5, "--bos", "none")
    ids = AutoTokenizer.from_pretrained(model)(text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    windows = torch.tensor(ids[: 5 * 64]).view(5, 64)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        loss = reference(windows, labels=windows).loss
    assert result["perplexity"] == pytest.approx(math.exp(float(loss)), rel=1e-4)


def test_a_missed_threshold_is_exit_1_with_the_numbers(run_json: Run, quantized: Path, model: Path, text: Path) -> None:
    code, result, err = run_json(
        "perplexity", quantized, "--reference", model, "--data", text, "--window", 64, "--max-kl", 1e-9
    )
    assert (code, result["status"], result["exit_code"]) == (1, "failed", 1)
    assert result["divergence"]["kl"] > 1e-9
    assert "exceeds --max-kl" in result["missed"][0]
    assert f"error: {result['missed'][0]}" in err


def test_c74_nan_is_exit_3_with_its_place(run_json: Run, model: Path, text: Path, tmp_path: Path) -> None:
    code, failure, _ = run_json("perplexity", damaged(model, tmp_path / "bad"), "--data", text, "--window", 64)
    assert code == failure["exit_code"] == 3
    assert "window 0" in failure["error"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-kl", "0.1"], "--reference"),
        (["--window", "300"], "256 positions"),
        (["--bos", "sometimes"], "--bos"),
        (["--data", "no/such/text.txt"], "no/such/text.txt"),
        (["--revision", "main"], "--revision main is for hub ids"),
        (["--reference-revision", "main"], "--reference MODEL"),
    ],
)
def test_perplexity_refuses(run_json: Run, model: Path, words: list[str], said: str) -> None:
    code, failure, _ = run_json("perplexity", model, *words)
    assert code == 2
    assert said in failure["error"]


@pytest.mark.parametrize(
    ("threshold", "value"),
    [
        ("--max-increase", "x%"),
        ("--max-kl", "nan"),
        ("--min-top1", "1.5"),
        ("--min-top1", "200%"),
        ("--min-top1", "nan"),
    ],
)
def test_thresholds_are_read_before_any_work(
    run_json: Run, monkeypatch: pytest.MonkeyPatch, threshold: str, value: str
) -> None:
    monkeypatch.setattr("cann_llm_quant.cli.perplexity.open_model", lambda *_, **__: pytest.fail("work has begun"))
    code, failure, _ = run_json("perplexity", "m", "--reference", "r", threshold, value)
    assert code == 2
    assert threshold in failure["error"]


def test_a_quantized_folder_has_no_revision(run_json: Run, quantized: Path) -> None:
    for command in (["perplexity"], ["run", "-p", "w5"]):
        code, failure, _ = run_json(command[0], quantized, *command[1:], "--revision", "main")
        assert code == 2
        assert "--revision main is for hub ids" in failure["error"]


def test_show_recipe_as_json_has_a_status(run_json: Run) -> None:
    code, shown, _ = run_json("quantize", "m", "--bits", "8", "--show-recipe")
    assert (code, shown["status"]) == (0, "ok")
    assert shown["recipe"]["scheme"]["bits"] == 8


def test_run_prints_text_on_stdout_and_speed_on_stderr(quantized: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(quantized), "-p", "w5 w6", "--max-new-tokens", "5"]) == 0
    shown = capsys.readouterr()
    assert main(["run", str(quantized), "-p", "w5 w6", "--max-new-tokens", "5", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert shown.out == answer["text"] + "\n"
    assert 1 <= len(answer["token_ids"]) <= 5
    assert "prompt tokens" in shown.err


def test_run_refuses_a_prompt_past_the_context(run_json: Run, model: Path) -> None:
    code, failure, _ = run_json("run", model, "-p", "w5 " * 200, "--max-new-tokens", 100)
    assert code == 2
    assert "256" in failure["error"]


def test_export_to_float_equals_the_packed_model(run_json: Run, quantized: Path, text: Path, tmp_path: Path) -> None:
    code, written, _ = run_json("export", quantized, "--to", "float", "--dtype", "fp32", "-o", tmp_path / "plain")
    assert (code, written["layout"]) == (0, "float")
    packed = run_json("perplexity", quantized, "--data", text, "--window", 64)[1]
    plain = run_json("perplexity", tmp_path / "plain", "--data", text, "--window", 64)[1]
    assert plain["perplexity"] == packed["perplexity"]


@pytest.mark.parametrize(
    ("source", "said"),
    [("nosuch", "no such folder"), ("", "is not quantized"), ("model.safetensors", "is a file but no GGUF model")],
)
def test_export_says_what_it_takes(run_json: Run, model: Path, tmp_path: Path, source: str, said: str) -> None:
    named = source if source == "nosuch" else model / source
    code, failure, _ = run_json("export", named, "--to", "float", "-o", tmp_path / "x")
    assert code == 2
    assert said in failure["error"]
    assert not (tmp_path / "x").exists()


def test_export_names_the_layouts_that_exist(run_json: Run, quantized: Path, tmp_path: Path) -> None:
    code, failure, _ = run_json("export", quantized, "--to", "coreml", "-o", tmp_path / "x")
    assert code == 2
    assert "choose from compressed-tensors, ascend, awq, gptq, gptq_v2, mlx, gguf, onnx, float" in failure["error"]
