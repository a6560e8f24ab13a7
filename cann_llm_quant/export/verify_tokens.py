"""Whether an output's special tokens exist and its text can become tokens at all.

An id that no row of the embedding has ends in an error at generation, or, for the end of text, in text without end.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cann_llm_quant.checkpoint.base import Checkpoint
from cann_llm_quant.checkpoint.companions import is_companion
from cann_llm_quant.checkpoint.files import file_names, parse_json_object, read_bytes
from cann_llm_quant.export.verify_findings import Findings, listed
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.shown import shown

_NAMES = ("bos_token_id", "eos_token_id", "pad_token_id")
_GENERATION = "generation_config.json"
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_ENDINGS = (".model", ".tiktoken")


def check_token_ids(inner: Checkpoint, arch: Arch, findings: Findings) -> None:
    """Ids of special tokens in `config.json` and `generation_config.json` against the embedding's rows.

    Padding is never embedded by most runtimes, so that an id of it that does not exist is a remark.
    """
    where = inner.path / "config.json" if inner.path.is_dir() else inner.path
    documents: dict[str, Mapping[str, Any]] = {str(where): inner.config}
    generation = inner.path / _GENERATION
    if generation.is_file():
        with findings.caught(str(generation)):
            documents[str(generation)] = parse_json_object(read_bytes(generation), generation)
    for place, document in documents.items():
        for name in _NAMES:
            wrong = [shown(value) for value in ids(document, name) if not _exists(value, arch.vocab_size)]
            text = f"{name} is {listed(wrong)}, but the model has {arch.vocab_size} tokens"
            if wrong and name == "pad_token_id":
                findings.remark(f"{Path(place).name}: {text}")
            elif wrong:
                findings.add(place, text, "correct the id by the tokenizer")


def ids(document: Mapping[str, Any], name: str) -> list[Any]:
    """The ids that a config gives a kind of special token, of which there may be several; none where it is silent."""
    value = document.get(name)
    return [one for one in (value if isinstance(value, list) else [value]) if one is not None]


def _exists(value: Any, vocabulary: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocabulary


def check_tokenizer_files(folder: Path, findings: Findings) -> None:
    """A tokenizer's settings without its vocabulary are a fault, a folder without any tokenizer a remark."""
    names = [name for name in file_names(folder) if is_companion(name)]
    if any(name in _VOCABULARIES or name.endswith(_ENDINGS) for name in names):
        return
    if "tokenizer_config.json" in names:
        where, advice = str(folder / "tokenizer_config.json"), "copy tokenizer.json from the original model"
        findings.add(where, "has no vocabulary beside it, such as tokenizer.json", advice)
    else:
        findings.remark("no tokenizer is in the folder, so it cannot turn text into tokens by itself")
