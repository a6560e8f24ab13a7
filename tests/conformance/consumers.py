"""Where the code that reads our files in the field is installed: in this environment, or in one of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


def python_with(package: str) -> str:
    """An interpreter that has `package`; skips the calling module where there is none.

    It is this one, or the one that `CONFORMANCE_<PACKAGE>` names: some consumers cannot share an environment.
    """
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    variable = f"CONFORMANCE_{package.upper()}"
    named = os.environ.get(variable)
    if named is None:
        pytest.skip(f"{package} is not installed, and {variable} names no python that has it", allow_module_level=True)
    return named


def run(python: str, script: str, *arguments: str | Path) -> str:
    """What a script of this folder prints; it imports nothing of this project. Fails the test with its last words."""
    path = Path(__file__).with_name(script)
    # gptqmodel's thread pools want two threads, and no consumer may ask the hub
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [python, str(path), *map(str, arguments)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, f"{script}: {done.stderr[-3000:]}"
    return done.stdout
