"""The options of ONNX exports as a user gives them: what ONNX Runtime and `atc` are told, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx
from onnx_runs import OrtRun, random_ids, reference, save_quantized
from tiny_models import save_tiny

from cann_llm_quant.checkpoint.output_folder import OutputFolder
from cann_llm_quant.cli.main import main
from cann_llm_quant.quant.scheme import Scheme

Run = Callable[..., tuple[int, Any]]
LINEARS = 7


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of int4 linears; its float source lies beside it."""
    folder = tmp_path_factory.mktemp("model")
    return save_quantized(folder, "llama", Scheme("int4", False, "group", 32), num_hidden_layers=1)


@pytest.fixture(params=["packed", "source"])
def model(request: pytest.FixtureRequest, packed: Path) -> Path:
    """The quantized model, and the float one."""
    return packed.parent / request.param


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line with `--json`: exit code and the one object on stdout."""

    def run_json(*arguments: object) -> tuple[int, Any]:
        code = main([*map(str, arguments), "--json"])
        out = capsys.readouterr().out
        assert out.count("\n") == 1
        return code, json.loads(out)

    return run_json


def nodes(folder: Path) -> list[onnx.NodeProto]:
    return list(onnx.load(folder / "model.onnx", load_external_data=False).graph.node)


def origin(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "export.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("level", [0, 1, 2, 3, 4])
def test_each_accuracy_level_is_in_every_product_and_loads(
    run_json: Run, packed: Path, tmp_path: Path, level: int
) -> None:
    code, done = run_json("export", packed, "--to", "onnx", "--accuracy-level", level, "-o", tmp_path / "out")
    assert (code, done["options"]["accuracy_level"], done["warnings"]) == (0, level, [])
    assert origin(tmp_path / "out")["accuracy_level"] == level
    products = [node for node in nodes(tmp_path / "out") if node.op_type == "MatMulNBits"]
    stored = [onnx.helper.get_node_attr_value(node, "accuracy_level") for node in products]
    assert stored == [level] * LINEARS
    ids = random_ids(1, 9)
    expected = reference(packed, ids)
    error = np.abs(OrtRun(tmp_path / "out", batch=1)(ids) - expected).max() / np.abs(expected).max()
    # int8 inputs are off by up to 1/254 of the largest number of a block
    assert error < 1e-5 if level < 4 else 1e-3 < error < 0.05


def test_standard_operators_alone_are_all_that_is_written(run_json: Run, model: Path, tmp_path: Path) -> None:
    code, done = run_json("export", model, "--to", "onnx", "--no-contrib-ops", "-o", tmp_path / "out")
    assert (code, done["options"]["contrib_ops"]) == (0, False)
    assert origin(tmp_path / "out")["contrib_ops"] is False
    assert {node.domain for node in nodes(tmp_path / "out")} == {""}
    assert OrtRun(tmp_path / "out", batch=1)(random_ids(1, 9)).shape == (1, 9, 128)


def test_the_command_for_atc_names_the_soc_that_was_asked_for(run_json: Run, model: Path, tmp_path: Path) -> None:
    words = ("--dialect", "cann", "--soc-version", "Ascend910B3")
    code, done = run_json("export", model, "--to", "onnx", *words, "-o", tmp_path / "out")
    assert (code, done["options"]["soc_version"]) == (0, "Ascend910B3")
    assert origin(tmp_path / "out")["soc_version"] == "Ascend910B3"
    script = (tmp_path / "out" / "atc_command.sh").read_text(encoding="utf-8")
    assert '--soc_version="${SOC_VERSION:-Ascend910B3}"' in script


def test_a_level_that_nothing_reads_is_told(run_json: Run, packed: Path, tmp_path: Path) -> None:
    words = ("--to", "onnx", "--accuracy-level", 4, "-o", tmp_path / "out")
    _, done = run_json("export", packed.parent / "source", *words)
    assert done["warnings"] == ["the accuracy level changes nothing: no linear is multiplied by MatMulNBits"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("onnx --accuracy-level 5", "--accuracy-level is 5; give 0 to 4: 1 multiplies in float32, 4 in int8"),
        ("onnx --accuracy-level -1", "--accuracy-level is -1; give 0 to 4"),
        ("onnx --accuracy-level 4 --no-contrib-ops", "which --no-contrib-ops leaves out; give one of the two"),
        ("onnx --soc-version Ascend910B3", "--soc-version is for --dialect cann, not for ort; choose that or leave it"),
        ("onnx --dialect cann --accuracy-level 1", "--accuracy-level is for --dialect ort, not for cann"),
        ("onnx --dialect cann --no-contrib-ops", "--no-contrib-ops is for --dialect ort, not for cann"),
        ("onnx --dialect cann --soc-version 910B3", "not how atc spells an NPU; write Ascend910B3"),
        ("onnx --dialect cann --soc-version ascend910b3", "not how atc spells an NPU; write Ascend910B3"),
        ("onnx --dialect cann --soc-version a;b", "SoC version 'a;b' is no name of an NPU"),
        ("onnx --dialect cann --soc-version=", "SoC version '' is no name of an NPU"),
        ("gguf --accuracy-level 4", "--accuracy-level is for onnx, not for gguf; leave it out"),
        ("awq --no-contrib-ops", "--no-contrib-ops is for onnx, not for awq; leave it out"),
        ("ascend --soc-version Ascend910B3", "--soc-version is for onnx, not for ascend; leave it out"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(run_json: Run, tmp_path: Path, words: str, said: str) -> None:
    """Before the source is looked at: there is none."""
    for command in ("export nosuch --to", "quantize nosuch --format"):
        code, failure = run_json(*command.split(), *words.split(), "-o", tmp_path / "out")
        assert code == 2
        assert said in failure["error"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ("", "--accuracy-level 4", "accuracy_level: 1 → 4"),
        ("", "--no-contrib-ops", "contrib_ops: true → false"),
        ("--dialect cann", "--dialect cann --soc-version Ascend910B3", 'soc_version: "Ascend910B1" → "Ascend910B3"'),
    ],
)
def test_an_unfinished_output_of_other_options_is_not_taken(
    run_json: Run, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, second: str, said: str
) -> None:
    def export(words: str) -> tuple[int, Any]:
        return run_json("export", packed, "--to", "onnx", *words.split(), "-o", tmp_path / "out")

    with monkeypatch.context() as patch:
        patch.setattr(OutputFolder, "publish", lambda *_: 1 / 0)
        assert export(first)[0] == 1
    code, failure = export(second)
    assert code == 2
    assert said in failure["error"]
    assert export(first)[0] == 0


def test_one_quantization_for_onnx_and_another_layout(
    run_json: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was stopped after its ONNX output goes on; one that asks for other operators is another run."""
    model = save_tiny(tmp_path / "model", hidden_size=128, intermediate_size=256, num_hidden_layers=1)
    layouts = ("--method", "rtn", "--group-size", "32", "--format", "onnx", "--format", "gptq_v2")

    def quantize(level: int) -> tuple[int, Any]:
        return run_json("quantize", model, *layouts, "--accuracy-level", level, "-o", tmp_path / "out")

    with monkeypatch.context() as patch:
        patch.setattr("cann_llm_quant.export.gptq.GptqEncoder.files", lambda *_: 1 / 0)
        assert quantize(4)[0] == 1
    before = (tmp_path / "out" / "onnx" / "model.onnx").stat().st_mtime_ns
    code, done = quantize(4)
    assert (code, [export["layout"] for export in done["exports"]]) == (0, ["onnx", "gptq_v2"])
    assert (tmp_path / "out" / "onnx" / "model.onnx").stat().st_mtime_ns == before
    assert origin(tmp_path / "out" / "onnx")["accuracy_level"] == 4
    code, failure = quantize(1)
    assert code == 2
    assert "formats of another run" in failure["error"]
