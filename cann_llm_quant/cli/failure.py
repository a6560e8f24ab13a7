"""A failure becomes one line on stderr, an exit code and, with `--json`, one object on stdout.

0    done
1    failed, or a threshold missed      (CannQuantError, an unexpected exception)
2    bad request or unusable input      (InputError, a wrong option, a file that cannot be read)
3    an evaluation gave NaN or infinity (NonFiniteResultError)
130  interrupted                        (Ctrl-C)
"""

import os
import sys
import traceback

import typer

from cann_llm_quant.cli.main import INTERRUPTED
from cann_llm_quant.cli.terminal import Reply, abandon_stdout, flush_stdout, one_line
from cann_llm_quant.errors import CannQuantError

UNUSABLE_INPUT = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)


def report_failure(error: BaseException, reply: Reply, *, debug: bool) -> int:
    """Tell the user about `error` and return the exit code; the traceback is shown only with `debug`."""
    code, message = describe(error, debug=debug)
    if debug:
        traceback.print_exception(error)
    print(f"error: {message}", file=sys.stderr, flush=True)
    try:
        if reply.json:
            reply.write_json({"status": "error", "error": message, "exit_code": code})
        flush_stdout()
    except OSError:  # stdout itself may be what failed
        abandon_stdout()
    return code


def describe(error: BaseException, *, debug: bool = False) -> tuple[int, str]:
    """Exit code and one-line message of an exception."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return INTERRUPTED, "interrupted; the same command goes on with an unfinished output"
    if isinstance(error, CannQuantError):
        return error.exit_code, one_line(str(error))
    if isinstance(error, typer.TyperException):
        return 2, _usage_message(error)
    if isinstance(error, OSError) and error.strerror:
        where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        return 2 if isinstance(error, UNUSABLE_INPUT) else 1, one_line(f"{where}{error.strerror}")
    if isinstance(error, MemoryError):
        return 1, "out of memory; lower --activation-budget or close other programs"
    hint = "" if debug else "; rerun with --debug for the traceback"
    return 1, one_line(f"internal error: {type(error).__name__}: {error}") + hint


def _usage_message(error: typer.TyperException) -> str:
    """The option parser's complaint, with the command whose help explains it."""
    message = one_line(error.format_message()).rstrip(".")
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "cann-llm-quant"
    return f"{message}; see '{command} --help'"
