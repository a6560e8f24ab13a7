"""Write `docs/cli.md` from the commands' own help pages; with `--check`, fail when the file differs.

python tools/generate_cli_docs.py [--check]
"""

import contextlib
import io
import os
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
HEADER = """# Command line

Generated from `--help` by `tools/generate_cli_docs.py`; `make docs` renews it, `make lint` fails when it is stale.
"""


def help_page(*arguments: str) -> str:
    """What `cann-llm-quant ARGUMENTS --help` prints on a terminal of 100 columns."""
    from cann_llm_quant.cli.main import main

    with contextlib.redirect_stdout(io.StringIO()) as out:
        main([*arguments, "--help"])
    return out.getvalue().rstrip()


def render() -> str:
    """The whole page."""
    import typer.main

    from cann_llm_quant.cli.app import app

    names = typer.main.get_command(app).commands
    sections = [("cann-llm-quant", help_page()), *((f"cann-llm-quant {name}", help_page(name)) for name in names)]
    return HEADER + "".join(f"\n## {title}\n\n```text\n{page}\n```\n" for title, page in sections)


def main() -> int:
    os.environ["COLUMNS"] = "100"
    page = render()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
        print("error: docs/cli.md is out of date; run: make docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
