"""Whether a JSON document means one thing: a key that an object holds twice is the first to one reader, the last to
another, and an error to a third.

Python keeps the last in silence, and so does the safetensors library for the name of a tensor. Keys are compared as
they are after escapes are read, since that is what readers see.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from cann_llm_quant.checkpoint.files import file_names, read_bytes
from cann_llm_quant.export.verify_findings import Findings, listed

_LARGEST = 128 << 20  # bytes; the largest vocabularies have 40 MB, while other data may lie beside a model
_AGAIN = "fetch or write the file again"
_ONE = "readers differ in which they take; do not use the file, write it again"


def repeated_keys(data: bytes) -> list[str]:
    """The keys that some object of a JSON text holds more than once, each once.

    Raises ValueError or RecursionError for what is no JSON.
    """
    found: dict[str, None] = {}

    def gather(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            found.update(dict.fromkeys(key for key, count in Counter(key for key, _ in pairs).items() if count > 1))
        return value

    json.loads(data.decode("utf-8-sig"), object_pairs_hook=gather)
    return list(found)


def check_json_files(folder: Path, findings: Findings) -> None:
    """Every JSON file of a folder: that it is JSON, and that no object in it repeats a key."""
    for path in (folder / name for name in file_names(folder) if name.endswith(".json")):
        with findings.caught(str(path)):
            if path.stat().st_size > _LARGEST:
                findings.remark(f"{path.name} is larger than {_LARGEST >> 20} MiB and was not looked into")
                continue
            data = read_bytes(path)
            try:
                check_keys(str(path), data, findings)
            except (ValueError, RecursionError) as error:
                findings.add(str(path), f"is not valid JSON ({str(error).splitlines()[0]})", _AGAIN)


def check_keys(where: str, data: bytes, findings: Findings) -> None:
    """A JSON text whose keys are repeated. Raises ValueError or RecursionError for what is no JSON."""
    keys = repeated_keys(data)
    if keys:
        findings.add(where, f"holds the same key twice in one object: {listed(keys)}", _ONE)
