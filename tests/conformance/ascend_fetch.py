"""Download vllm-ascend's wheel and unpack it, uninstalled: the conformance test reads its quantization package.

python tests/conformance/ascend_fetch.py FOLDER [VERSION]
CONFORMANCE_VLLM_ASCEND=FOLDER pytest tests/conformance/test_conformance_ascend.py
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def main(folder: str, version: str = "0.23.0") -> None:
    with tempfile.TemporaryDirectory() as downloads:
        command = [sys.executable, "-m", "pip", "download", f"vllm-ascend=={version}", "--no-deps", "--dest", downloads]
        # its source distribution would be built, which needs CANN
        command += ["--only-binary", ":all:", "--python-version", "3.11", "--platform", "manylinux_2_34_x86_64"]
        subprocess.run(command, check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
