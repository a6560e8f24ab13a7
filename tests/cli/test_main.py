"""The command line as a whole: forms, exit codes, streams. Field cases C54, C57, C59."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cann_llm_quant.cli import app as cli
from cann_llm_quant.errors import CheckpointError, NonFiniteResultError, NumericError, ThresholdError, UsageError

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.invoke(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Make every command fail with an exception."""

    def failing(error: BaseException) -> None:
        def run_command(arguments: object) -> object:
            raise error

        monkeypatch.setattr(cli, "run_command", run_command)

    return failing


def test_without_words_the_commands_are_listed(run: Run) -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    for name in ("quantize", "inspect"):
        assert f"\n  {name} " in out


def test_version(run: Run) -> None:
    assert run("--version")[:2] == (0, "cann-llm-quant 0.1.0\n")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--model", "m", "--quant-method", "awq"], ["quantize", "--model", "m", "--quant-method", "awq"]),
        (["--model=m", "--bits=4"], ["quantize", "--model=m", "--bits=4"]),
        (["quantize", "m"], ["quantize", "m"]),
        (["--help"], ["--help"]),
        (["--show-completion"], ["--show-completion"]),
        (["-h"], ["-h"]),
        ([], ["--help"]),
        (["--debug", "inspect", "m"], ["inspect", "--debug", "m"]),
        (["--json", "--debug", "run", "m", "-p", "x"], ["run", "--json", "--debug", "m", "-p", "x"]),
        (["--debug", "--model", "m"], ["quantize", "--debug", "--model", "m"]),
        (["--json"], ["quantize", "--json"]),
    ],
)
def test_the_one_line_form_is_quantize(words: list[str], meant: list[str]) -> None:
    assert cli.spell_out(words) == meant


def test_the_published_one_line_form_gives_the_same_recipe(run: Run) -> None:
    long_form = run("quantize", "m", "-o", "o", "--method", "rtn", "--bits", "8", "--show-recipe")
    one_line = run(
        "--model", "m", "--quant-method", "rtn", "--bits", "8", "--format", "native", "--output", "o", "--show-recipe"
    )
    assert long_form == one_line
    assert one_line[0] == 0
    assert json.loads(one_line[1])["scheme"]["bits"] == 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["quantize"], "no model was named"),
        (["quantize", "m"], "-o FOLDER"),
        (["quantize", "a", "--model", "b", "-o", "o"], "two models were named, a and b"),
        (["quantize", "m", "-o", "o", "--bits", "7"], "bits"),
        (["quantize", "m", "-o", "o", "--bits", "four"], "--bits"),
        (["quantize", "m", "-o", "o", "--method", "gptqq"], "gptqq"),
        (["quantize", "m", "-o", "o", "--format", "coreml"], "this version writes: native, ascend, awq"),
        (["quantize", "m", "-o", "o", "--group-size", "0"], "group_size"),
        (["quantize", "m", "-o", "o", "--max-shard-size", "huge"], "'huge' is not a size"),
        (["quantize", "m", "-o", "o", "--recipe", "/no/such/recipe.yaml"], "/no/such/recipe.yaml"),
        (["inspect"], "MODEL"),
        (["inspect", "--colour"], "--colour"),
        (["inspct", "m"], "Did you mean 'inspect'"),
    ],
)
def test_c59_bad_request_is_exit_2_and_one_line(run: Run, words: list[str], said: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("bad option"), 2, "error: bad option\n"),
        (CheckpointError("config.json:\n  not there"), 2, "error: config.json: not there\n"),
        (NumericError("layer 3 gives NaN"), 1, "error: layer 3 gives NaN\n"),
        (ThresholdError("too far"), 1, "error: too far\n"),
        (NonFiniteResultError("NaN at 7"), 3, "error: NaN at 7\n"),
        (FileNotFoundError(2, "No such file or directory", "/a b/c"), 2, "error: /a b/c: No such file or directory\n"),
        (PermissionError(13, "Permission denied", "x"), 2, "error: x: Permission denied\n"),
        (OSError(28, "No space left on device", "out"), 1, "error: out: No space left on device\n"),
        (MemoryError(), 1, "error: out of memory"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (ValueError("whoops"), 1, "error: internal error: ValueError: whoops; rerun with --debug"),
    ],
)
def test_c59_every_failure_has_its_code_and_one_line(
    run: Run, failing: Callable[[BaseException], None], error: BaseException, code: int, said: str
) -> None:
    failing(error)
    got, out, err = run("inspect", "m")
    assert (got, out) == (code, "")
    assert err.startswith(said)
    assert err.count("\n") == 1


def test_c59_ctrl_c_inside_a_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cann_llm_quant.cli.quantize.resolve_recipe", interrupted)
    code, out, err = run("quantize", "m", "-o", "o")
    assert (code, out) == (130, "")
    assert err.startswith("error: interrupted")


def test_debug_shows_the_traceback(run: Run, failing: Callable[[BaseException], None]) -> None:
    failing(ValueError("whoops"))
    _, _, err = run("inspect", "m", "--debug")
    assert "Traceback (most recent call last)" in err
    assert err.endswith("error: internal error: ValueError: whoops\n")


def test_c59_json_has_a_status_also_on_failure(run: Run) -> None:
    code, out, err = run("quantize", "m", "--json")
    assert code == 2
    assert err.startswith("error: no output was named")
    failure = json.loads(out)
    assert failure == {"status": "error", "error": err.removeprefix("error: ").rstrip("\n"), "exit_code": 2}


def test_escape_sequences_out_of_names_are_made_visible(run: Run, failing: Callable[[BaseException], None]) -> None:
    failing(CheckpointError("tensor \x1b[2Jevil 模型"))
    assert run("inspect", "m")[2] == "error: tensor \\x1b[2Jevil 模型\n"


def command_line(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "cann_llm_quant", *arguments],
        capture_output=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_c57_c_locale_prints_instead_of_failing(tmp_path: Path) -> None:
    missing = tmp_path / "模型 é"
    done = command_line(
        "inspect", str(missing), LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONIOENCODING=""
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: ")
    assert b"Traceback" not in done.stderr
    assert b"UnicodeEncodeError" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_c59_a_full_disk_under_stdout_is_no_success() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cann_llm_quant", "--version"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 1
    assert done.stderr.decode() == "error: No space left on device\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that `inspect` can describe: one tensor, and a config with NaN in it."""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": NaN}', encoding="utf-8")
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_json_carries_no_bare_nan(run: Run, folder: Path) -> None:
    code, out, _ = run("inspect", str(folder), "--json")
    assert code == 0
    assert json.loads(out, parse_constant=pytest.fail)["architecture"]["hidden_size"] is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [[], ["--json"]])
def test_c59_a_result_that_cannot_be_written_is_one_line(folder: Path, words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "cann_llm_quant", "inspect", str(folder), *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert done.stderr.decode() == "error: No space left on device\n"


def test_a_result_that_nobody_reads_is_still_a_success(folder: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "cann_llm_quant", "inspect", str(folder)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_failure(folder: Path, closed: str) -> None:
    command = f"exec {shlex.quote(sys.executable)} -m cann_llm_quant inspect {shlex.quote(str(folder))} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_c59_ctrl_c_while_the_parser_is_imported() -> None:
    code = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from cann_llm_quant.cli.main import main\n"
        "sys.exit(main(['--version']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"error: interrupted\n")


def test_the_entry_point_itself_imports_nothing_of_others() -> None:
    code = "import sys; import cann_llm_quant.cli.main; sys.exit('typer' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_list_of_commands_is_not_cut(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run("--help")
    commands = out.partition("Commands:\n")[2]
    assert len(commands.split("\n\n")[0].splitlines()) == 10
    assert "..." not in commands


def test_a_reader_that_leaves_is_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "cann_llm_quant", "--help"], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert done.stderr == b""


def test_help_loads_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "datasets", "pydantic", "rich", "numpy")
    code = (
        "import sys; from cann_llm_quant.cli.main import main; "
        f"code = main(['quantize', '--help']); sys.exit(code or ','.join(m for m in {heavy} if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_completion_offers_commands_and_options() -> None:
    words = {"COMP_WORDS": "cann-llm-quant quantize --met", "COMP_CWORD": "2"}
    done = command_line(_CANN_LLM_QUANT_COMPLETE="complete_bash", **words)
    assert b"--method" in done.stdout
