"""The matrix that `make conformance` prints: what each layout was loaded by, and how far its logits were from ours.

A test that has compared a whole model says so by

    record_property("conformance", {"target": ..., "model": ..., "consumer": ..., "difference": ..., "of": ...})

with the largest difference of logits (or of what `of` names) from our runner's on the same files.
"""

import pytest

COLUMNS = ("target", "model", "consumer", "difference")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the matrix."""
    rows = [
        value | {"passed": report.outcome == "passed"}
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        for name, value in getattr(report, "user_properties", [])
        if name == "conformance" and report.when == "call"
    ]
    if not rows:
        return
    table = [_cells(row) for row in sorted(rows, key=lambda row: [str(row[column]) for column in COLUMNS[:3]])]
    widths = [max(len(line[n]) for line in [list(COLUMNS), *table]) for n in range(len(COLUMNS))]
    terminalreporter.section("conformance")
    for line in [list(COLUMNS), ["-" * width for width in widths], *table]:
        terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def _cells(row: dict) -> list[str]:
    """One line of the table."""
    difference = f"{row['difference']:.2g} of {row.get('of', 'logits')}"
    return [row["target"], row["model"], row["consumer"], difference if row["passed"] else f"{difference} FAILED"]
