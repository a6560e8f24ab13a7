"""From what the user calls a model to a path on this machine; a hub id is downloaded once into the Hugging Face cache.

`HF_ENDPOINT` (mirrors), `HF_HUB_OFFLINE`, `HF_HOME` and tokens are honoured by huggingface_hub itself. Whatever exists
locally or looks like a path never reaches the hub.
"""

import os
import re
from pathlib import Path

from cann_llm_quant.errors import CheckpointError, UsageError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "LICENCE*", "NOTICE*", "README.md"]
# Mistral publishes the same weights a second time under this name; folders below the root hold other formats.
_NOT_WANTED = ["consolidated*.safetensors", "*/*.safetensors", "*/*.bin"]


def locate(model: str, *, revision: str | None = None, allow_pickle: bool = False) -> Path:
    """The folder or file on this machine that `model` names.

    Raises CheckpointError when there is no such folder or the hub cannot give it, UsageError for a local path with a
    revision.
    """
    path = Path(os.path.expanduser(model))  # unlike Path.expanduser it lets unknown users pass
    if model and os.path.lexists(path):
        if revision is not None:
            raise UsageError(
                f"--revision {revision} is for hub ids, but {model} is a local path; leave the option away"
            )
        return path
    if looks_like_path(model):
        raise CheckpointError(f"no such folder or file: {model}; check the path (a hub id looks like org/name)")
    return _download(model, revision, allow_pickle)


def looks_like_path(model: str) -> bool:
    """Whether a name that does not exist locally can only have been meant as a path."""
    if not _HUB_ID.fullmatch(model) or model.endswith((".gguf", ".safetensors", ".bin", ".json")):
        return True
    return Path(Path(model).parts[0]).exists()


def _download(repo: str, revision: str | None, allow_pickle: bool) -> Path:
    folder = _snapshot(repo, revision, ["*.safetensors", *_SMALL_FILES])
    if any(folder.glob("*.safetensors")):
        return folder
    if allow_pickle:
        return _snapshot(repo, revision, ["pytorch_model*.bin", *_SMALL_FILES])
    raise CheckpointError(
        f"{repo} has no safetensors weights on the hub (or, offline, in the cache); if it has pytorch_model.bin pass "
        "--allow-pickle, if it has GGUF files download one and pass its path"
    )


def _snapshot(repo: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        GatedRepoError,
        HTTPError,  # of whichever HTTP library this version of huggingface_hub uses, hence not exported
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"{repo} (revision {revision})" if revision else repo
    local = "or download the model elsewhere and pass its folder"
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, ignore_patterns=_NOT_WANTED))
    except GatedRepoError as error:
        raise CheckpointError(f"{repo} is gated: accept its licence on the hub and set HF_TOKEN, {local}") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repo} is neither a local folder nor a model on {constants.ENDPOINT}; check the name, and set HF_TOKEN "
            "if the model is private"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{repo} has no revision {revision}; check --revision") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        state = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
        raise CheckpointError(
            f"{where} is neither a local folder nor in the cache {constants.HF_HUB_CACHE}, and {state}; "
            f"go online, set HF_ENDPOINT to a mirror, {local}"
        ) from error
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"downloading {where} from {constants.ENDPOINT} failed ({reason}); try again, {local}"
        ) from error
