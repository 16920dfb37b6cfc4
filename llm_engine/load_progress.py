"""Shows how far the loading of weights has come: a bar on a terminal, else a bar a line.

Workers have no terminal of their own, so what `pagewire serve` shows of them are lines.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from llm_engine.checkpoint import Tensors
from llm_engine.weights import LoadProgress

LINE_PERIOD_S = 2.0  # between two plain lines; what loads faster needs none
BAR_CHARS = 30  # of a plain line


@contextmanager
def show_progress(
    tensors: Tensors,
    *,
    enabled: bool,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[LoadProgress]:
    """Yield the function to call after each tensor; it writes to `stream` (standard error)."""
    total_bytes = sum(entry.end - entry.begin for entry in tensors.values())
    stream = stream or sys.stderr
    if not enabled:
        yield lambda path, num_bytes: None
    elif stream.isatty():
        with _bar(stream) as bar:
            task = bar.add_task("Loading weights", total=total_bytes)
            yield lambda path, num_bytes: bar.update(
                task, advance=num_bytes, description=f"Loading {path.name}"
            )
    else:
        yield _PlainLines(stream, total_bytes, clock).advance


def _bar(stream: TextIO) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(file=stream),
    )


class _PlainLines:
    def __init__(self, stream: TextIO, total_bytes: int, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._clock = clock
        self._next_at = clock() + LINE_PERIOD_S

    def advance(self, path: Path, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        if self._clock() < self._next_at:
            return
        self._next_at = self._clock() + LINE_PERIOD_S
        done, total = self._done_bytes / 1e6, self._total_bytes / 1e6
        bar = "#" * (BAR_CHARS * self._done_bytes // self._total_bytes)
        print(
            f"loading weights [{bar:-<{BAR_CHARS}}] {done:.0f} of {total:.0f} MB ({path.name})",
            file=self._stream,
            flush=True,
        )
