"""What reaches the terminal: results on stdout (text, or JSON with `--json`), everything else on stderr.

No write raises because of the terminal's encoding, and no text out of a file can send control sequences.
"""

import io
import json
import math
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

if TYPE_CHECKING:
    from rich.console import Console

FACT_TITLE = 13  # characters
LONGEST = 4000  # characters of a line: a tensor's name alone can be longer
NO_BYTE = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # surrogates that stand for no undecodable byte
LINE_BREAK = re.compile(r"\s*[\r\n]+\s*")


def open_missing_streams() -> None:
    """Put /dev/null where a standard stream was closed (`>&-`), so that no file of ours takes its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (open until the end)


def flush_stdout() -> None:
    """Write out what waits; a reader that has left (`| head -1`) has had what it wanted.

    Raises OSError when stdout cannot take it.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        abandon_stdout()


def abandon_stdout() -> None:
    """Let the rest of stdout, and the interpreter's last flush, go nowhere instead of complaining."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def replace_unencodable() -> None:
    """Make stdout and stderr print `?` for what their encoding lacks (a C locale) instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def quiet_libraries() -> None:
    """Keep the chatter of the libraries below us off the user's terminal; `--debug` leaves it on."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def printable(text: str, keep: str = "\n\t") -> str:
    """The text with control characters (terminal escape sequences) made visible, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c in keep or c.isprintable() or ord(c) > 0x9F else f"\\x{ord(c):02x}" for c in text)


def one_line(text: str) -> str:
    """The text on one line, safe to print; what is past `LONGEST` characters is left out."""
    line = printable(LINE_BREAK.sub(" ", text.strip()), keep="")
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}… ({len(line)} characters)"


@runtime_checkable
class TextStream(Protocol):
    """What is written to: a terminal, a file, a pipe."""

    def write(self, text: str, /) -> int: ...
    def flush(self) -> None: ...
    def isatty(self) -> bool: ...


def console(stream: TextStream) -> "Console":
    """A rich console that writes strings as they are: no markup, no highlighted numbers, no emoji codes.

    Off a terminal it is wide enough that no table is cut.
    """
    from rich.console import Console

    class PassingOn(Console):
        """Leaves a reader that has left to whoever prints, where rich would end the process with code 1."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    width = None if stream.isatty() else 160
    return PassingOn(
        file=cast(IO[str], stream), markup=False, highlight=False, emoji=False, soft_wrap=False, width=width
    )


def print_facts(console: "Console", facts: Iterable[tuple[str, str]]) -> None:
    """Lines of a title and a text; on a terminal long texts go on below themselves."""
    for title, text in facts:
        line = f"  {title:<{FACT_TITLE}} {printable(text)}"
        if console.is_terminal:
            indent = " " * (FACT_TITLE + 3)
            wrapper = textwrap.TextWrapper(console.width, subsequent_indent=indent, break_on_hyphens=False)
            line = wrapper.fill(line)
        console.print(line, soft_wrap=True)


@dataclass(frozen=True)
class Reply:
    """How one invocation answers: `json` for machines or text for people."""

    json: bool = False

    def note(self, text: str) -> None:
        """A remark for people, on stderr."""
        print(one_line(text), file=sys.stderr, flush=True)

    def result(self, value: Mapping[str, Any], show: "Callable[[Console], None]", *, status: str = "ok") -> None:
        """The outcome: `value` plus `status` as JSON, or whatever `show` draws for people, on stdout."""
        try:
            if self.json:
                self.write_json({"status": status, **value})
            else:
                show(console(sys.stdout))
        except BrokenPipeError:  # the reader has left; the work is done all the same
            abandon_stdout()

    def write_json(self, value: Mapping[str, Any]) -> None:
        """One JSON object on stdout, in ASCII so that every locale carries it."""
        print(json.dumps(strict_json(value), ensure_ascii=True, allow_nan=False), flush=True)


def strict_json(value: Any) -> Any:
    """The value with what JSON cannot hold replaced: NaN and infinity by null, other objects by their text."""
    if isinstance(value, Mapping):
        return {readable(str(key)): strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    return readable(str(value))


def readable(text: str) -> str:
    """The text without lone surrogates: bytes that the locale could not decode (a C locale's) are read as UTF-8."""
    return NO_BYTE.sub("�", text).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def size(count: float) -> str:
    """Bytes for people, in powers of ten: `269.1 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def duration(seconds: float) -> str:
    """Time for people: `0.4 s`, `12 s`, `3:05`, `2:03:05`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
