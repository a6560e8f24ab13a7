"""Progress of long work on stderr: two live lines on a terminal, plain lines elsewhere (logs, CI).

calibrate ━━━━━━━━━━━╺━━━━━━━━━━━  43%  812.4 windows/s  eta 2:11
layer 12 of 30  output error 0.0123  memory 812 MB
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from cann_llm_quant.cli.terminal import TextStream, console, duration, one_line, size

PLAIN_INTERVAL = 10.0  # seconds between plain lines that carry no news but the count


@runtime_checkable
class ProgressEvent(Protocol):
    """What long work tells while it runs.

    `done` of `total` steps, what it is doing (`stage`), to which layer; `error` of the layer just finished;
    `message` is a sentence for the user, a warning when `warning`.
    """

    @property
    def stage(self) -> str: ...
    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def layer(self) -> str | None: ...
    @property
    def error(self) -> float | None: ...
    @property
    def message(self) -> str | None: ...
    @property
    def warning(self) -> bool: ...


@runtime_checkable
class Progress(Protocol):
    """Receives events."""

    def __call__(self, event: ProgressEvent) -> None: ...


@dataclass(frozen=True)
class Step:
    """An event of work that a command does itself."""

    stage: str
    done: int = 0
    total: int = 0
    layer: str | None = None
    error: float | None = None
    message: str | None = None
    warning: bool = False


@contextmanager
def show_progress(unit: str, stream: TextStream | None = None) -> Iterator[Progress]:
    """A receiver of events that draws them on `stream` (stderr); steps are counted in `unit`s."""
    stream = sys.stderr if stream is None else stream
    if not stream.isatty():
        yield PlainProgress(unit, stream)
        return
    with LiveProgress(unit, stream) as live:
        yield live


class Pace:
    """Rate and remaining time, measured from the first step on."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.started: float | None = None
        self.first = 0
        self.last = 0

    def describe(self, done: int, total: int) -> str:
        """`8.2 windows/s  eta 2:11`; empty until a step was finished, and again when a new count begins."""
        now = time.monotonic()
        if self.started is None or done < self.last:
            self.started, self.first = now, done
        self.last = done
        elapsed = now - self.started
        if done == self.first or elapsed <= 0:
            return ""
        rate = (done - self.first) / elapsed
        speed = f"{rate:.1f} {self.unit}/s" if rate >= 1 else f"{rate * 60:.1f} {self.unit}/min"
        return f"{speed}  eta {duration((total - done) / rate)}" if done < total else speed


def details(layer: str | None, error: float | None) -> str:
    """Current layer, the last finished layer's error, and this process's memory."""
    parts = [
        layer or "",
        "" if error is None else f"output error {error:.4g}",
        f"memory {size(resident_bytes())}",
    ]
    return one_line("  ".join(part for part in parts if part))


def remark(event: ProgressEvent) -> str:
    """What the work says, as one line."""
    return one_line(f"{'warning' if event.warning else event.stage}: {event.message}")


def resident_bytes() -> int:
    """Resident memory of this process."""
    import psutil

    return int(psutil.Process().memory_info().rss)


class PlainProgress:
    """A line for every remark and finished layer, and one now and then in between."""

    def __init__(self, unit: str, stream: TextStream) -> None:
        self.stream = stream
        self.pace = Pace(unit)
        self.written = 0.0
        self.finished: str | None = None  # the last layer whose error was written

    def __call__(self, event: ProgressEvent) -> None:
        if event.message:
            print(remark(event), file=self.stream, flush=True)
        if not event.total:
            return
        pace = self.pace.describe(event.done, event.total)
        now = time.monotonic()
        news = event.done == event.total or (event.error is not None and event.layer != self.finished)
        if not news and now - self.written < PLAIN_INTERVAL:
            return
        self.written = now
        self.finished = self.finished if event.error is None else event.layer
        share = f"{event.stage} {100 * event.done // event.total}%"
        line = "  ".join(part for part in (share, pace, details(event.layer, event.error)) if part)
        print(line, file=self.stream, flush=True)


class LiveProgress:
    """Two lines that are redrawn in place below the remarks."""

    def __init__(self, unit: str, stream: TextStream) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Bars
        from rich.text import Text

        self.bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[pace]}"),
        )
        self.task = self.bars.add_task("", total=None, pace="", visible=False)
        self.text = Text
        self.details = Text("", overflow="ellipsis", no_wrap=True, style="dim")
        self.live = Live(Group(self.bars, self.details), console=console(stream), refresh_per_second=8, transient=True)
        self.pace = Pace(unit)
        self.error: float | None = None

    def __enter__(self) -> "LiveProgress":
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def __call__(self, event: ProgressEvent) -> None:
        if event.message:
            self.live.console.print(self.text(remark(event), style="yellow" if event.warning else ""))
        if not event.total:
            return
        self.error = self.error if event.error is None else event.error
        pace = self.pace.describe(event.done, event.total)
        self.bars.update(
            self.task,
            description=event.stage,
            completed=event.done,
            total=event.total,
            pace=pace,
            visible=True,
        )
        self.details.plain = details(event.layer, self.error)
