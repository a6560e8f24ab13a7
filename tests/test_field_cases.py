"""`docs/field-cases.md` lists every case that applies, and each test that it names exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "field-cases.md").read_text(encoding="utf-8")
APPLICABLE = range(1, 75)


def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_case_is_listed_once_with_a_test_or_a_reason() -> None:
    rows = re.findall(r"^\| (C\d\d) \| [^|]+ \| ([^|]+) \|$", PAGE, re.MULTILINE)
    assert [case for case, _ in rows] == [f"C{number:02d}" for number in APPLICABLE]
    for case, cell in rows:
        assert "::test_" in cell or cell.startswith(("not yet applicable: ", "no test: ")), case


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert named
    missing = [f"{file}::{name}" for file, name in named if name not in names_in(file)]
    assert missing == []
