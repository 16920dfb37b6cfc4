"""Times of steps within a worker: what is written, and what is made of it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import step_times
from benchmarks.served_steps import steps_of, summary
from llm_engine.engine import Engine
from llm_engine.engine_step import EngineStep, StepResult


def test_steps_count_that_follow_one_of_the_same_size() -> None:
    lines = ("[8, 5.0, 1.0, 0]", "[8, 0.2, 2.0, 1]", "[0, 0.1, 9.0, 1]", "[8, 0.3, 3.0, 1]")

    steps = steps_of("\n".join((*lines, "[8, 0.0, 4.0, 0]\n")), 8)

    assert steps == [(8, 0.2, 2.0, 1), (8, 0.0, 4.0, 0)]
    assert summary(steps) == {
        "num_steps": 2,
        "busy_ms": 3.0,
        "between_ms": 0.1,
        "between_ms_p50": 0.1,
        "between_ms_p99": 0.198,
        "late": 0.5,
        "ahead": 0.5,
    }


def test_each_step_is_timed_from_the_end_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def launch(engine: Any, step: EngineStep) -> None:
        nonlocal now
        now += 0.004

    monkeypatch.setattr(Engine, "launch", launch)
    monkeypatch.setattr(Engine, "read", lambda engine: StepResult(decodes=[], slices=[]))
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: None)  # to be restored
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: now)
    engine = object.__new__(Engine)
    step_times.time_steps(tmp_path)

    for seats in ((0, 1), (0, 1), (0,)):
        engine.launch(EngineStep(decodes=seats))
        engine.read()
        now += 0.001
    for _ in range(2):
        engine.launch(EngineStep(decodes=(0,)))
    for _ in range(2):
        engine.read()

    (path,) = tmp_path.iterdir()
    lines = ("[2, 1.0, 4.0, 0]", "[1, 1.0, 4.0, 0]", "[1, 1.0, 4.0, 0]", "[1, 0.0, 4.0, 1]")
    assert path.read_text().splitlines() == list(lines)
