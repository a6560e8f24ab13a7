"""Fixtures that every room's tests share."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of measuring data beside the project; tests that use it are marked `shared`."""
    if not (SHARED / "data").is_dir():
        pytest.skip("the shared data folder is not beside the project")
    return SHARED
