"""`evaluate` on tiny checkpoints, as a user gives it. Field case C74."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tiny_models import save_text, save_tiny

from cann_llm_quant.cli.main import main

Run = Callable[..., tuple[int, Any, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "float")


@pytest.fixture(scope="module")
def quantized(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    text = save_text(folder / "words.txt", tokens=2000)
    words = ["--method", "rtn", "--group-size", "32", "--data", str(text)]
    assert main(["quantize", str(model), "-o", str(folder / "w4"), *words]) == 0
    return folder / "w4"


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions in words of the tiny tokenizer, for three tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    sciq = [
        {"context": f"w{5 + i} w{9 + i} w7", "choices": [f"w{20 + i}", f"w{3 + i} w8", "w11"], "answer": i % 3}
        for i in range(40)
    ]
    lambada = [{"context": f"w{5 + i} w9", "target": f" w{7 + i}"} for i in range(10)]
    mmlu = [
        {"subject": subject, "question": f"w{5 + i}", "context": "", "choices": ["w1", "w2", "w3", "w4"], "answer": 1}
        for subject in ("anatomy", "virology")
        for i in range(3)
    ]
    for name, rows in (("sciq_test", sciq), ("lambada_openai_test", lambada), ("mmlu_test", mmlu)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line with `--json`: exit code, the one object on stdout, stderr."""

    def run_json(*arguments: object) -> tuple[int, Any, str]:
        code = main([*map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        assert out.count("\n") == 1
        return code, json.loads(out), err

    return run_json


def test_results_come_with_errors_and_their_source(run_json: Run, model: Path, questions: Path) -> None:
    code, result, err = run_json("evaluate", model, "--tasks", "sciq, lambada_openai", "--data", questions)
    assert (code, result["status"]) == (0, "ok")
    sciq = result["tasks"]["sciq"]
    acc = sciq["metrics"]["acc"]
    assert acc["stderr"] == pytest.approx(math.sqrt(acc["value"] * (1 - acc["value"]) / 39))
    assert (sciq["questions"], sciq["fewshot"], sciq["chance"]) == (40, 0, pytest.approx(1 / 3))
    assert sciq["source"].endswith("sciq_test.jsonl")
    assert len(sciq["questions_sha256"]) == 64
    assert set(result["tasks"]["lambada_openai"]["metrics"]) == {"acc", "perplexity"}
    assert "100%" in err


def test_a_model_against_itself_loses_nothing(run_json: Run, model: Path, questions: Path) -> None:
    words = ["--tasks", "sciq,lambada_openai", "--data", questions, "--reference", model, "--max-drop", "0%"]
    code, result, _ = run_json("evaluate", model, *words)
    assert code == 0
    paired = result["tasks"]["sciq"]["metrics"]["acc"]["paired"]
    assert (paired["difference"], paired["lost"], paired["gained"], paired["p_value"]) == (0, 0, 0, 1)
    assert result["tasks"]["lambada_openai"]["metrics"]["perplexity"]["paired"]["difference"] == 0


def test_a_drop_beyond_the_threshold_is_exit_1(run_json: Run, model: Path, questions: Path, tmp_path: Path) -> None:
    """Questions whose right answers are the reference's own, put to a model of other weights."""
    items = tmp_path / "items.jsonl"
    run_json("evaluate", model, "--tasks", "sciq", "--data", questions, "--items", items)
    picks = [json.loads(line)["model"]["logprobs"] for line in items.read_text(encoding="utf-8").splitlines()]
    rows = [json.loads(line) for line in (questions / "sciq_test.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row | {"answer": pick.index(max(pick))} for row, pick in zip(rows, picks, strict=True)]
    (tmp_path / "sciq.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    other = save_tiny(tmp_path / "other", seed=5)
    words = ["--tasks", "sciq", "--data", tmp_path, "--reference", model]
    code, result, err = run_json("evaluate", other, *words, "--max-drop", "5%")
    paired = result["tasks"]["sciq"]["metrics"]["acc"]["paired"]
    assert (paired["reference"], paired["gained"]) == (1.0, 0)
    assert paired["lost"] == round(-40 * paired["difference"]) > 2
    assert (code, result["status"], result["exit_code"]) == (1, "failed", 1)
    assert "acc fell by" in result["missed"][0]
    assert f"error: {result['missed'][0]}" in err
    code, result, _ = run_json("evaluate", other, *words, "--max-drop", "100%")
    assert (code, result["status"]) == (0, "ok")


def test_items_hold_what_was_scored(run_json: Run, model: Path, questions: Path, tmp_path: Path) -> None:
    file = tmp_path / "items.jsonl"
    words = ["--tasks", "sciq", "--data", questions, "--limit", 5, "--items", file, "--reference", model]
    _, result, _ = run_json("evaluate", model, *words)
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    right = [line["model"]["logprobs"].index(max(line["model"]["logprobs"])) == line["answer"] for line in lines]
    assert len(lines) == 5
    assert sum(right) / 5 == result["tasks"]["sciq"]["metrics"]["acc"]["value"]
    assert all(line["reference"] == line["model"] for line in lines)


def test_subjects_and_categories_are_reported(run_json: Run, model: Path, questions: Path) -> None:
    _, result, _ = run_json("evaluate", model, "--tasks", "mmlu", "--data", questions, "--limit", 2)
    mmlu = result["tasks"]["mmlu"]
    assert mmlu["questions"] == 4
    assert set(mmlu["categories"]) == {"stem", "other"}
    assert {name: found["acc"]["questions"] for name, found in mmlu["subjects"].items()} == {
        "anatomy": 2,
        "virology": 2,
    }


def test_the_table_is_for_people(
    capsys: pytest.CaptureFixture[str], quantized: Path, model: Path, questions: Path
) -> None:
    words = ["--tasks", "sciq,mmlu", "--data", str(questions), "--reference", str(model)]
    assert main(["evaluate", str(quantized), *words]) == 0
    out = capsys.readouterr().out
    assert "difference" in out
    assert "  stem" in out
    assert "guessing gives 33.3%" in out


def test_known_tasks_are_listed(run_json: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, result, _ = run_json("evaluate", "--list-tasks")
    assert code == 0
    assert {"sciq", "mmlu", "cmmlu"} <= {task["name"] for task in result["tasks"]}
    assert main(["evaluate", "--list-tasks"]) == 0
    assert "haonan-li/cmmlu" in capsys.readouterr().out


def test_c74_nan_is_exit_3_with_the_question(run_json: Run, model: Path, questions: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = math.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    code, failure, _ = run_json("evaluate", tmp_path, "--tasks", "sciq", "--data", questions)
    assert code == failure["exit_code"] == 3
    assert "sciq_test.jsonl:" in failure["error"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tasks", "arc"], "known are arc_easy"),
        ([], "no task was named"),
        (["--tasks", "piqa"], "no questions of piqa"),
        (["--tasks", "sciq", "--limit", "0"], "--limit 0"),
        (["--tasks", "sciq", "--fewshot", "-1"], "--fewshot -1"),
        (["--tasks", "sciq", "--fewshot", "40"], "--fewshot 40"),
        (["--tasks", "sciq", "--batch-tokens", "0"], "--batch-tokens"),
        (["--tasks", "sciq", "--max-drop", "1%"], "--reference MODEL"),
        (["--tasks", "sciq", "--reference-revision", "main"], "--reference MODEL"),
        (["--tasks", "sciq", "--items", "no/such/folder/items.jsonl"], "--items no/such/folder"),
    ],
)
def test_evaluate_refuses(run_json: Run, model: Path, questions: Path, words: list[str], said: str) -> None:
    code, failure, _ = run_json("evaluate", model, "--data", questions, *words)
    assert code == 2
    assert said in failure["error"]


def test_evaluate_needs_a_model(run_json: Run) -> None:
    code, failure, _ = run_json("evaluate", "--tasks", "sciq")
    assert code == 2
    assert "no model was named" in failure["error"]


def test_one_file_serves_one_task(run_json: Run, model: Path, questions: Path) -> None:
    code, failure, _ = run_json("evaluate", model, "--tasks", "sciq,piqa", "--data", questions / "sciq_test.jsonl")
    assert code == 2
    assert "give a folder" in failure["error"]
