"""Shows the progress of loading weights: a bar on a terminal, otherwise lines."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from llm_engine.load_progress import ReportLoaded
from pagewire.cli.units import format_bytes

LINE_PERIOD_S = 5.0  # between two lines


@contextmanager
def load_display(
    say: Callable[[str], None],
    *,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[ReportLoaded]:
    """Yield the function that shows progress; nothing is shown before its first call.

    Args:
        say: Takes a line. On a terminal, these lines and all other output go above the bar.
        stream: Where `say` writes; default: standard output.
        clock: Seconds.
    """
    out = Console(file=stream or sys.stdout, soft_wrap=True)  # lines above the bar do not wrap
    # FORCE_COLOR would make any console a terminal.
    if not out.file.isatty() or out.is_dumb_terminal:
        yield _Lines(say, clock).show
        return
    bar = _Bar(out)
    try:
        yield bar.show
    finally:
        bar.close()


class _Lines:
    def __init__(self, say: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._say = say
        self._clock = clock
        self._next_at = clock()

    def show(self, done_bytes: int, total_bytes: int) -> None:
        if done_bytes < total_bytes and self._clock() >= self._next_at:
            self._next_at = self._clock() + LINE_PERIOD_S
            self._say(f"loading weights: {format_bytes(done_bytes)} of {format_bytes(total_bytes)}")


class _Bar:
    def __init__(self, out: Console) -> None:
        self._out = out
        self._progress: Progress | None = None  # while there is something to load

    def show(self, done_bytes: int, total_bytes: int) -> None:
        if done_bytes >= total_bytes:
            self.close()
            return
        if not self._progress:
            self._progress = self._open(total_bytes)
        [task] = self._progress.task_ids
        self._progress.update(task, completed=done_bytes, total=total_bytes, refresh=True)

    def close(self) -> None:
        if self._progress:
            self._progress.stop()
        self._progress = None

    def _open(self, total_bytes: int) -> Progress:
        progress = Progress(
            TextColumn("loading weights"),
            BarColumn(bar_width=30),  # fits into 80 columns
            DownloadColumn(binary_units=True),
            TimeRemainingColumn(),
            console=self._out,
            auto_refresh=False,  # its thread could not report lost output
            transient=True,
            redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),  # else a file's
        )
        progress.add_task("", total=total_bytes)
        progress.start()
        self._out.show_cursor()  # the bar hides it; a second Ctrl-C would leave it hidden
        return progress
