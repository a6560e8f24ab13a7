"""Entry point of the `cann-llm-quant` command.

It imports next to nothing, so that Ctrl-C while the parser is still being imported is caught here already.
"""

import sys
from collections.abc import Sequence

INTERRUPTED = 130  # exit code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; without `argv`, this process's own."""
    try:
        from cann_llm_quant.cli.app import invoke

        return invoke(argv)
    except KeyboardInterrupt:
        if sys.stderr is not None:
            sys.stderr.write("error: interrupted\n")
        return INTERRUPTED
