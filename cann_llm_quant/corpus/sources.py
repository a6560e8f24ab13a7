"""Where text comes from: a local file or folder, a preset's name, or a dataset of the hub.

    notes.txt    rows.jsonl    folder-of-files/    wikitext    allenai/c4
    SPEC::column=body,split=validation,subset=en,revision=main,weight=2

A spec that exists on disk is local. A name with one slash and no file ending is a hub dataset; bare names are presets
or refused, because the hub no longer serves the datasets that had them (`ptb`, `wikitext-2`).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from cann_llm_quant.errors import CorpusError, UsageError

TEXT_ENDINGS = (".txt", ".md")
ROW_ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
ENDINGS = TEXT_ENDINGS + ROW_ENDINGS

OPTIONS = ("column", "split", "subset", "revision", "weight")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class CorpusSource:
    """One source of text; `weight` is its share among several."""

    spec: str
    weight: float = 1.0
    column: str | None = None
    split: str | None = None
    subset: str | None = None
    revision: str | None = None


PRESETS: Mapping[str, CorpusSource] = {
    "wikitext": CorpusSource("Salesforce/wikitext", subset="wikitext-2-raw-v1"),
    "c4": CorpusSource("allenai/c4", subset="en"),
    "pile": CorpusSource("NeelNanda/pile-10k"),
}


def parse_source(text: str) -> CorpusSource:
    """`SPEC` or `SPEC::key=value,…` as a source; UsageError names the option that is wrong."""
    spec, marker, tail = text.rpartition("::")
    if not marker:
        spec, tail = text, ""
    if not spec:
        raise UsageError(f"'{text}' names no corpus: give a file, a folder or a dataset as namespace/name")
    options: dict[str, str] = {}
    for item in filter(None, tail.split(",")):
        key, equals, value = item.partition("=")
        if not equals or not value or key not in OPTIONS or key in options:
            raise UsageError(f"corpus option '{item}' in '{text}': one each of {', '.join(OPTIONS)}, as key=value")
        options[key] = value
    weight = _weight(options.pop("weight", "1"), text)
    return CorpusSource(spec, weight, **options)


def _weight(value: str, text: str) -> float:
    try:
        weight = float(value)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and weight > 0):
        raise UsageError(f"corpus weight '{value}' in '{text}' is not a positive number")
    return weight


def default_source() -> CorpusSource:
    """The calibration text inside the package."""
    return CorpusSource(str(files("cann_llm_quant") / "data" / "text" / "calibration.txt"))


def default_evaluation_source() -> CorpusSource:
    """The held-out text inside the package: no module of the standard library is in both."""
    return CorpusSource(str(files("cann_llm_quant") / "data" / "text" / "heldout.txt"))


def local_files(source: CorpusSource) -> list[Path] | None:
    """The files of a local source in name order, None for a hub dataset; CorpusError if it is neither."""
    path = Path(source.spec).expanduser()
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.is_file() and ending(file) in ENDINGS)
        if not found:
            raise CorpusError(f"{path} holds no corpus files ({', '.join(ENDINGS)}, or these with .gz)")
        return found
    if path.is_file():
        if ending(path) not in ENDINGS:
            raise CorpusError(f"{path} is not a corpus file: its name must end in one of {', '.join(ENDINGS)} (or .gz)")
        return [path]
    if ending(path) in ENDINGS or path.is_absolute() or source.spec.startswith((".", "~")):
        raise CorpusError(f"there is no corpus file {path}")
    return None


def hub_source(source: CorpusSource) -> CorpusSource:
    """The source with presets filled in; CorpusError for names that are no hub dataset."""
    preset = PRESETS.get(source.spec.lower())
    if preset is not None:
        return replace(source, spec=preset.spec, subset=source.subset or preset.subset)
    if HUB_ID.fullmatch(source.spec):
        return source
    raise CorpusError(
        f"'{source.spec}' is neither a file nor a dataset of the hub: name it namespace/name, "
        f"use a preset ({', '.join(PRESETS)}), or download its text and give the local file"
    )


def ending(path: Path) -> str:
    """The file's ending in lower case, the one before `.gz` for compressed files."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def is_text(path: Path) -> bool:
    """Whether the file is one running text rather than rows."""
    return ending(path) in TEXT_ENDINGS
