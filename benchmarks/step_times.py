"""Times each step of an engine within a worker, by events on its device; see served_steps.

Without a GPU a step has run when its launch returns, and the host's clock gives the times.
"""

import json
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from llm_engine.engine import Engine
from llm_engine.engine_step import EngineStep, StepResult

Mark = Any  # an event of CUDA, or seconds


def mark() -> Mark:
    """Return the moment that the device reaches next."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def between_ms(before: Mark, after: Mark) -> float:
    """Return the time between two moments, ms, once the device has reached them."""
    if isinstance(before, float):
        return 1e3 * float(after - before)
    after.synchronize()
    return float(before.elapsed_time(after))  # of float32, so only between moments that are close


class StepTimes:
    """Writes a line for each step of an engine.

    In it: rows; ms since the step before; ms of its own; 1 if it was launched before the tokens of
    the step before were read, else 0.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._begun: Mark = None  # of the step that is being launched
        self._launched: deque[tuple[int, int, Mark, Mark]] = deque()
        self._ended: Mark = None  # of the last step that was read

    def begin(self) -> None:
        """A step begins; if its launch replays recordings, with the last of them."""
        self._begun = mark()

    def launched(self, num_rows: int) -> None:
        """All of a step is launched."""
        is_ahead = int(len(self._launched) > 0)
        self._launched.append((num_rows, is_ahead, self._begun, mark()))

    def was_read(self) -> None:
        """The oldest step has ended."""
        num_rows, is_ahead, begun, ended = self._launched.popleft()
        if self._ended is not None:
            times = between_ms(self._ended, begun), between_ms(begun, ended)
            line = [num_rows, *(round(each, 4) for each in times), is_ahead]
            self._file.write(json.dumps(line) + "\n")
        self._ended = ended


def time_steps(folder: Path) -> None:
    """Let engines of this process time their steps, and write them to files in a folder."""
    times = StepTimes(folder / f"{os.getpid()}.steps")
    launch, read, replay = Engine.launch, Engine.read, torch.cuda.CUDAGraph.replay

    def launch_timed(engine: Engine, step: EngineStep) -> None:
        times.begin()
        launch(engine, step)
        # Prompts make a step another one.
        times.launched(0 if step.slices else len(step.decodes))

    def read_timed(engine: Engine) -> StepResult:
        result = read(engine)
        times.was_read()
        return result

    def replay_timed(graph: torch.cuda.CUDAGraph) -> None:
        times.begin()
        replay(graph)

    Engine.launch = launch_timed  # type: ignore[assignment, method-assign]
    Engine.read = read_timed  # type: ignore[assignment, method-assign]
    torch.cuda.CUDAGraph.replay = replay_timed  # type: ignore[assignment, method-assign]
