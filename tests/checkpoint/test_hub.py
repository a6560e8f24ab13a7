"""From names to local paths: what reaches the hub, and what a failure says (C58). No test connects anywhere."""

import socket
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors
from model_folders import tensors, write_config, write_single

from cann_llm_quant.checkpoint import open_checkpoint
from cann_llm_quant.checkpoint.hub import looks_like_path
from cann_llm_quant.errors import CheckpointError, UsageError

STATE = tensors()


@pytest.fixture(autouse=True)
def _no_sockets(monkeypatch):
    def refuse(*_):
        raise AssertionError("a socket was connected")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty hub cache, offline."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fill_cache(cache: Path, repo: str, commit: str = "0" * 40) -> Path:
    """Lay a repository out as huggingface_hub does: refs/main names the commit of a snapshot of links."""
    root = cache / f"models--{repo.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit, encoding="utf-8")
    source = write_single(root / "source", STATE, _name_or_path="some/base-model")
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    for i, file in enumerate(sorted(source.iterdir())):
        file.rename(root / "blobs" / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    source.rmdir()
    return snapshot


@pytest.mark.parametrize(
    "name",
    [
        *(
            "./m",
            "../m",
            "/no/such",
            "~/no-such",
            "~nobody-here/m",
            "a/b/c",
            "plain",
            "org/model.gguf",
            "org/",
            "a\\b",
            "",
        ),
        *("org/mo del", ".hidden/x", "org/model.safetensors", "x" * 5000),
    ],
)
def test_c58_missing_path_is_no_such_folder(name, cache):
    with pytest.raises(CheckpointError, match="no such folder") as error:
        open_checkpoint(name)
    assert "repo" not in str(error.value)


def test_c58_partly_existing_path_is_a_path(tmp_path, monkeypatch, cache):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder or file: models/absent"):
        open_checkpoint("models/absent")


def test_hub_ids_are_not_paths():
    assert not looks_like_path("HuggingFaceTB/SmolLM2-135M")
    assert not looks_like_path("01-ai/Yi-1.5_6B")


def test_c58_local_folder_never_asks_the_hub(tmp_path, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_single(tmp_path / "org" / "name", STATE, _name_or_path="meta-llama/Llama-3.1-8B")
    with open_checkpoint("org/name") as checkpoint:
        assert torch.equal(checkpoint.load("a.weight"), STATE["a.weight"])
        checkpoint.companion_files()


def test_c58_offline_and_not_cached(cache):
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set") as error:
        open_checkpoint("org/absent", revision="v2")
    message = str(error.value)
    assert "org/absent (revision v2)" in message
    assert str(cache) in message
    assert "pass its folder" in message
    assert "\n" not in message


def test_c58_offline_and_cached(cache):
    snapshot = fill_cache(cache, "org/name")
    with open_checkpoint("org/name") as checkpoint:
        assert checkpoint.path == snapshot
        assert torch.equal(checkpoint.load("c.weight"), STATE["c.weight"])


def test_revision_of_a_local_folder_is_a_usage_error(tmp_path):
    write_single(tmp_path / "m", STATE)
    with pytest.raises(UsageError, match="--revision main is for hub ids"):
        open_checkpoint(str(tmp_path / "m"), revision="main")


def http_error(kind: type, status: int) -> Exception:
    """An error as huggingface_hub raises it, with a response of whichever HTTP library it uses."""
    library = sys.modules[errors.Response.__module__.split(".")[0]]
    request = library.Request("GET", "https://hub.invalid/org/name")
    response = errors.Response(status, headers={"x-request-id": "1"}, request=request)
    return kind("first line\nsecond line", response=response)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (lambda: http_error(errors.RepositoryNotFoundError, 404), "neither a local folder nor a model on"),
        (lambda: http_error(errors.GatedRepoError, 403), "is gated"),
        (lambda: http_error(errors.RevisionNotFoundError, 404), "no revision v9"),
        (lambda: http_error(errors.HfHubHTTPError, 500), "first line"),
        (lambda: errors.LocalEntryNotFoundError("no connection\nand no cache"), "cannot be reached"),
        (lambda: OSError(28, "No space left on device"), "No space left on device"),
        (lambda: errors.HFValidationError("bad id"), "bad id"),
        (lambda: errors.HTTPError("timed out"), "timed out"),
    ],
)
def test_every_failure_is_one_line(monkeypatch, error, expected):
    def fail(*_, **__):
        raise error()

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=expected) as caught:
        open_checkpoint("org/name", revision="v9")
    assert "\n" not in str(caught.value)
    assert "org/name" in str(caught.value)


@pytest.mark.parametrize("allow", [False, True])
def test_pickles_are_fetched_only_on_request_and_without_safetensors(tmp_path, monkeypatch, allow):
    asked = []

    def download(repo, *, revision, allow_patterns, ignore_patterns):
        asked.append(allow_patterns)
        write_config(tmp_path / "snapshot")
        if "pytorch_model*.bin" in allow_patterns:
            torch.save(STATE, tmp_path / "snapshot" / "pytorch_model.bin")
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    if allow:
        assert set(open_checkpoint("org/name", allow_pickle=True).tensors) == set(STATE)
    else:
        with pytest.raises(CheckpointError, match="--allow-pickle"):
            open_checkpoint("org/name")
    assert len(asked) == 1 + allow
    assert "*.safetensors" in asked[0]
    assert not any(".bin" in pattern for pattern in asked[0])
