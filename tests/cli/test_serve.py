"""`serve` before and around its server: what it refuses at once, and what it says about who may use it."""

import json
import socket
from pathlib import Path

import pytest

from cann_llm_quant.cli import serve as module
from cann_llm_quant.cli.app import invoke
from cann_llm_quant.cli.serve import announce, served_name
from cann_llm_quant.cli.terminal import Reply
from cann_llm_quant.server.serving import open_socket


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "70000"], "port 70000"),
        (["--host", "300.1.1.1"], "--host 300.1.1.1"),
        (["--api-key", " "], "--api-key is empty"),
        (["--drain", "-1"], "--drain -1.0"),
        (["--drain", "nan"], "--drain nan"),
        (["--max-body", "much"], "'much' is not a size"),
        (["--memory-budget", "much"], "'much' is not a size"),
    ],
)
def test_bad_options_end_before_the_model_is_opened(options, message, capsys) -> None:
    assert invoke(["serve", "/no/such/model", "--port", "0", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_port_in_use_is_refused_before_the_model_is_opened(capsys) -> None:
    with open_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert invoke(["serve", "/no/such/model", "--port", str(port)]) == 2
    assert f"port {port} of 127.0.0.1 cannot be used" in capsys.readouterr().err


def test_the_extra_is_named_where_it_is_missing(monkeypatch, capsys) -> None:
    monkeypatch.setattr(module, "LIBRARIES", ("fastapi", "no_such_library"))
    assert invoke(["serve", "/no/such/model"]) == 2
    assert "serve needs no_such_library: pip install 'cann-llm-quant[serve]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "guarded", "warned"),
    [("127.0.0.1", False, False), ("0.0.0.0", False, True), ("0.0.0.0", True, False)],
)
def test_a_door_that_is_open_to_everybody_is_pointed_out(host, guarded, warned, capsys) -> None:
    with open_socket(host, 0) as bound:
        announce(Reply(), "tiny", bound, guarded=guarded)
        port = bound.getsockname()[1]
    said = capsys.readouterr()
    assert said.out == f"serving tiny at http://{host}:{port}/v1; Ctrl-C ends it\n"
    assert said.err.startswith("warning: everybody who reaches") == warned


def test_programs_are_told_as_well(capsys) -> None:
    with open_socket("127.0.0.1", 0) as bound:
        announce(Reply(json=True), "tiny", bound, guarded=False)
        port = bound.getsockname()[1]
    expected = {"status": "ok", "model": "tiny", "url": f"http://127.0.0.1:{port}/v1"}
    assert json.loads(capsys.readouterr().out) == expected


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_ipv6_addresses_have_brackets(capsys) -> None:
    with open_socket("::1", 0) as bound:
        announce(Reply(), "tiny", bound, guarded=False)
    said = capsys.readouterr()
    assert "http://[::1]:" in said.out
    assert said.err == ""


def test_a_model_is_called_by_its_folder(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path / "my-model")
    assert served_name(".") == "my-model"
    assert served_name("org/name") == "org/name"
