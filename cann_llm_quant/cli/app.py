"""The command line as a whole: its subcommands, the published one-line form, and how every failure ends.

Nothing heavy is imported here or at the top of a subcommand's file: torch, transformers, pydantic and rich
are imported when a command runs, so that `--help` answers at once.
"""

import os
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Annotated

import typer
import typer.main
from typer.core import TyperGroup

from cann_llm_quant import __version__
from cann_llm_quant.cli.demo import demo
from cann_llm_quant.cli.evaluate import evaluate
from cann_llm_quant.cli.export import export
from cann_llm_quant.cli.failure import report_failure
from cann_llm_quant.cli.help import CONTEXT_SETTINGS, SectionedCommand
from cann_llm_quant.cli.inspect import inspect
from cann_llm_quant.cli.main import INTERRUPTED
from cann_llm_quant.cli.perplexity import perplexity
from cann_llm_quant.cli.quantize import quantize
from cann_llm_quant.cli.run import run
from cann_llm_quant.cli.sensitivity import sensitivity
from cann_llm_quant.cli.serve import serve
from cann_llm_quant.cli.terminal import (
    Reply,
    abandon_stdout,
    flush_stdout,
    open_missing_streams,
    quiet_libraries,
    replace_unencodable,
)
from cann_llm_quant.cli.verify import verify

PROGRAM = "cann-llm-quant"
COMPLETION_VARIABLE = "_CANN_LLM_QUANT_COMPLETE"
ROOT_OPTIONS = ("--help", "-h", "--version", "--install-completion", "--show-completion")
COMMANDS = (demo, quantize, perplexity, evaluate, run, serve, inspect, export, verify, sensitivity)
EVERYWHERE = ("--debug", "--json")  # options of every command; they may stand before its name

app = typer.Typer(
    help="Quantize large language models, one layer in memory at a time; measure and run the result.",
    epilog=f"'{PROGRAM} COMMAND --help' explains a command. "
    "Exit codes: 0 done, 1 failed or threshold missed, 2 bad request, 3 NaN in a result, 130 interrupted.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT_SETTINGS,
)
for command in COMMANDS:
    app.command(cls=SectionedCommand, context_settings=CONTEXT_SETTINGS)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options that stand before a subcommand; they act in their callbacks."""


def spell_out(arguments: Sequence[str]) -> list[str]:
    """The published one-line form `--model M …` is `quantize` without its name; no words ask for help."""
    if not arguments:
        return ["--help"]
    leading = list(takewhile(EVERYWHERE.__contains__, arguments))
    words = list(arguments[len(leading) :])
    if leading and words and words[0] in {command.__name__ for command in COMMANDS}:
        return [words[0], *leading, *words[1:]]
    first = arguments[0]
    if first.startswith("-") and first.partition("=")[0] not in ROOT_OPTIONS:
        return ["quantize", *arguments]
    return list(arguments)


def run_command(arguments: Sequence[str]) -> object:
    """Parse and run; a subcommand without the group around it, whose options would load pydantic."""
    group = typer.main.get_command(app)
    subcommand = group.commands.get(arguments[0]) if isinstance(group, TyperGroup) else None
    if subcommand is None or COMPLETION_VARIABLE in os.environ:
        return group.main(arguments, prog_name=PROGRAM, standalone_mode=False)
    return subcommand.main(arguments[1:], prog_name=f"{PROGRAM} {arguments[0]}", standalone_mode=False)


def invoke(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; without `argv`, this process's own."""
    arguments = spell_out(sys.argv[1:] if argv is None else argv)
    debug, reply = "--debug" in arguments, Reply("--json" in arguments)
    open_missing_streams()
    replace_unencodable()
    if argv is None and not debug:
        quiet_libraries()
    try:
        code = run_command(arguments)
        if code == INTERRUPTED:  # typer has caught Ctrl-C and says nothing
            raise KeyboardInterrupt
        flush_stdout()
    except SystemExit as leaving:
        code = leaving.code
    except BrokenPipeError:
        abandon_stdout()
        return 1
    except BaseException as error:
        code = report_failure(error, reply, debug=debug)
    return code if isinstance(code, int) else 0
