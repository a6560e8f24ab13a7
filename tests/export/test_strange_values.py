"""Config files with a strange value in every place in turn: opened, or refused in one short line that a terminal can
show.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ascend_folders import save_ascend
from encoded_folders import save_encoded
from native_folders import save_native
from tiny_models import save_tiny

from cann_llm_quant.errors import CannQuantError
from cann_llm_quant.export.awq import AwqEncoder
from cann_llm_quant.export.gptq import GptqEncoder
from cann_llm_quant.export.kv_cache import kv_plan
from cann_llm_quant.export.mlx import MlxEncoder
from cann_llm_quant.export.packed import open_source
from cann_llm_quant.models import arch_from_checkpoint
from cann_llm_quant.quant.scheme import ActivationScheme, Scheme

LONG = 100_000
TEXT = "x\n\x1b[31m\u202e" + "y" * LONG
STRANGE = {"text": TEXT, "list": [[TEXT], TEXT], "object": {TEXT: TEXT}, "number": 10**400, "renamed": None}
W4, W4A = Scheme("int4", True, "group", 32), Scheme("int4", False, "group", 32)
W8, TOKEN = Scheme("int8", True, "channel", None), ActivationScheme("int8", True, True, "token")
ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CACHE = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": True, "symmetric": True}
FILES = {
    "float": "config.json",
    "gptq": "config.json",
    "awq": "config.json",
    "mlx": "config.json",
    "compressed-tensors": "config.json",
    "native": "inference_config.json",
    "ascend": "quant_model_description.json",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny model in each layout, in a folder of its name."""
    root = tmp_path_factory.mktemp("layouts")
    source = save_tiny(root / "float", num_hidden_layers=1)
    for name, encoder, scheme in (("gptq", GptqEncoder(1), W4), ("awq", AwqEncoder(), W4A), ("mlx", MlxEncoder(), W4A)):
        save_encoded(source, root / name, encoder, lambda module, own=scheme: None if "head" in module else own)
    save_ascend(source, root / "ascend", lambda module: (W8, None))
    save_native(source, root / "native", W8, TOKEN)
    (save_native(source, root / "compressed-tensors", W8, TOKEN) / "inference_config.json").unlink()
    for name, key, value in (("float", "rope_parameters", ROPE), ("compressed-tensors", "kv_cache_scheme", CACHE)):
        file = root / name / "config.json"
        document = json.loads(file.read_text(encoding="utf-8"))
        document.get("quantization_config", document)[key] = value
        file.write_text(json.dumps(document), encoding="utf-8")
    return root


def places(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The way to every value inside, to one layer's linear for all of them."""
    if place:
        yield place
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if key in (*range(1), "model.layers.0.mlp.up_proj") or not str(key).startswith(("model.", *"123456789")):
            yield from places(inner, (*place, key))


def changed(document: dict[str, Any], place: tuple[str | int, ...], how: str) -> str:
    """The document with the value in one place replaced, or its name."""
    new = copy.deepcopy(document)
    holder: Any = new
    for key in place[:-1]:
        holder = holder[key]
    if how == "renamed" and isinstance(holder, dict):
        holder[TEXT] = holder.pop(place[-1])
    else:
        holder[place[-1]] = STRANGE[how]
    return json.dumps(new)


def refusal(folder: Path) -> str:
    """Why a folder is not opened; empty where it is."""
    try:
        with open_source(str(folder)) as checkpoint:
            arch_from_checkpoint(checkpoint)
            kv_plan(checkpoint)
    except CannQuantError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layout", FILES)
def test_a_strange_value_anywhere_is_refused_in_one_short_line(folders: Path, layout: str) -> None:
    file = folders / layout / FILES[layout]
    text = file.read_text(encoding="utf-8")
    document, messages = json.loads(text), {}
    sections = [key for key in document if key in ("quantization_config", "quantization")]
    for place in (place for place in places(document) if not sections or place[0] in sections):
        for how in STRANGE:
            file.write_text(changed(document, place, how), encoding="utf-8")
            messages[place, how] = refusal(file.parent)
    file.write_text(text, encoding="utf-8")
    assert refusal(file.parent) == ""
    assert sum(message != "" for message in messages.values()) > 4
    for key, message in messages.items():
        assert len(message) < 800, key
        assert message.isprintable(), key
