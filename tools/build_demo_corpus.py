"""Build the text of the demo model from the documentation inside Python's own standard library.

Sources are read as syntax trees, never imported: docstrings, runs of comment lines that are prose, and
pydoc's help topics. Files with a copyright notice other than the Python Software Foundation's are left out, so
that one licence (PSF-2.0) covers the result. The split is by top-level module: `HELD_OUT` modules appear in no
training or calibration text.

    python tools/build_demo_corpus.py --work build/demo          # on CPython 3.11

writes `train.jsonl` (one document a line) into --work, and `calibration.txt`, `heldout.txt`, `LICENSE`,
`README.md` into the package's data/text/.
"""

import argparse
import ast
import hashlib
import io
import json
import platform
import random
import re
import sysconfig
import textwrap
import tokenize
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "cann_llm_quant" / "data" / "text"
STDLIB = Path(sysconfig.get_paths()["stdlib"])

SKIPPED = {
    *("test", "tests", "idle_test", "idlelib", "lib2to3"),
    *("site-packages", "_bundled", "turtledemo", "__pycache__"),
}
HELD_OUT = {
    *("cmd", "contextlib", "fileinput", "fractions", "heapq", "mimetypes", "random"),
    *("sched", "shlex", "tempfile", "timeit"),
}
CALIBRATION_CHARACTERS = 400_000
SHORTEST = 40

FOREIGN_COPYRIGHT = re.compile(r"copyright.*(19|20)\d\d|copyright\s.*inc\.|all rights reserved", re.IGNORECASE)
FOUNDATION = re.compile(r"Python Software Foundation|\bPSF\b")
EMAIL = re.compile(r"[\w.+-]+@[\w-]+(\.[\w-]+)+|<[\w.+-]+@[\w-]+>")
PROSE = re.compile(r"[a-z]{2,} [a-z]{2,} [a-z]{2,}")


def module_files() -> Iterator[tuple[str, Path]]:
    """(top-level module, file) of the standard library, in a fixed order."""
    for path in sorted(STDLIB.rglob("*.py"), key=lambda path: path.relative_to(STDLIB).as_posix()):
        relative = path.relative_to(STDLIB)
        if not SKIPPED.intersection(relative.parts):
            yield relative.parts[0].removesuffix(".py"), path


def has_foreign_copyright(source: str) -> bool:
    return any(FOREIGN_COPYRIGHT.search(line) and not FOUNDATION.search(line) for line in source.splitlines())


def docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def prose_comments(source: str) -> Iterator[str]:
    """Runs of whole-line comments, each run joined and dedented."""
    run: list[str] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or not token.line.lstrip().startswith("#"):
            continue
        if token.start[0] != last + 1:
            yield textwrap.dedent("\n".join(run))
            run = []
        run.append(token.string.lstrip("#!:").rstrip("#"))
        last = token.start[0]
    yield textwrap.dedent("\n".join(run))


def help_topics(tree: ast.Module) -> Iterator[str]:
    """The literal dictionary of pydoc_data/topics.py, one document a topic."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            yield from ast.literal_eval(node.value).values()


def clean(text: str) -> str:
    """Dedented NFC text without e-mail addresses, doctest paragraphs and rulers; '' if no prose is left."""
    text = unicodedata.normalize("NFC", text.expandtabs(8))
    text = EMAIL.sub("<e-mail>", text)
    lines = [line.rstrip() for line in textwrap.dedent(text).splitlines()]
    lines = ["" if re.fullmatch(r"\W{3,}", line.strip()) else line for line in lines]
    paragraphs = re.split(r"\n{2,}", "\n".join(lines))
    kept = [block for block in paragraphs if ">>>" not in block and block.strip()]
    text = "\n\n".join(kept).strip()
    return text if len(text) >= SHORTEST and PROSE.search(text) else ""


def fingerprint(text: str) -> str:
    return hashlib.sha256(" ".join(text.split()).lower().encode()).hexdigest()


def collect() -> tuple[list[str], list[str], list[str]]:
    """(training documents, held-out documents, held-out module names), each document once."""
    documents: dict[bool, list[str]] = {True: [], False: []}
    sources = []
    for module, path in module_files():
        source = path.read_text(encoding="utf-8", errors="replace")
        if not has_foreign_copyright(source):
            sources.append((module, source))
    seen: set[str] = set()
    for held_out in (True, False):  # a text in both stays held out
        for module, source in sources:
            if (module in HELD_OUT) != held_out:
                continue
            for text in documents_of(module, source):
                mark = fingerprint(text)
                if mark not in seen:
                    seen.add(mark)
                    documents[held_out].append(text)
    return documents[False], documents[True], sorted({module for module, _ in sources} & HELD_OUT)


def documents_of(module: str, source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    found: list[Iterable[str]] = [docstrings(tree), prose_comments(source)]
    if module == "pydoc_data":
        found = [help_topics(tree)]
    for texts in found:
        yield from filter(None, map(clean, texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for train.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    training, held_out, modules = collect()
    random.Random(arguments.seed).shuffle(training)
    calibration: list[str] = []
    for text in training:
        if sum(map(len, calibration)) >= CALIBRATION_CHARACTERS:
            break
        calibration.append(text)

    arguments.work.mkdir(parents=True, exist_ok=True)
    TEXT.mkdir(parents=True, exist_ok=True)
    with open(arguments.work / "train.jsonl", "w", encoding="utf-8", newline="\n") as file:
        for text in training:
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    write(TEXT / "calibration.txt", "\n\n".join(calibration) + "\n")
    write(TEXT / "heldout.txt", "\n\n".join(held_out) + "\n")
    write(TEXT / "LICENSE", licence())
    write(TEXT / "README.md", readme(training, held_out, calibration, modules, arguments.seed))


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def licence() -> str:
    """The licence text that the running CPython ships."""
    for path in (STDLIB / "LICENSE.txt", STDLIB.parent / "LICENSE.txt"):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise SystemExit(f"no LICENSE.txt beside {STDLIB}: use a CPython that ships its licence")


def readme(training: list[str], held_out: list[str], calibration: list[str], modules: list[str], seed: int) -> str:
    texts = {"training": training, "calibration.txt": calibration, "heldout.txt": held_out}
    rows = "\n".join(f"| {name} | {len(part)} | {sum(map(len, part))} |" for name, part in texts.items())
    return f"""# Text of the demo

Documentation out of the standard library of CPython {platform.python_version()}: docstrings, prose comments
and pydoc's help topics, read from syntax trees by `tools/build_demo_corpus.py --seed {seed}`. Files with another
copyright notice than the Python Software Foundation's are left out.

Licence: PSF-2.0, `LICENSE` in this folder. Copyright © 2001-2023 Python Software Foundation; all rights
reserved. Changes: dedented, NFC, e-mail addresses masked, paragraphs with doctests and rulers removed, texts
under {SHORTEST} characters and repeated texts dropped.

| text | documents | characters |
| --- | --- | --- |
{rows}

`calibration.txt` is a random part of the training text. `heldout.txt` comes from modules that appear in
neither: {", ".join(modules)}.
"""


if __name__ == "__main__":
    main()
