"""A start compiles ahead, in parallel, what its warm-up launches; on CPU tensors, for Hopper."""

import logging
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

from attn_kernels.compile_ahead import marker_of, only_compiles
from attn_kernels.debug_checks import debug
from attn_kernels.pages import launch_digest  # noqa: F401  # else it stays interpreted
from llm_engine import (
    load_engine,
    operations_triton,  # noqa: F401  # else it stays interpreted
    recordings,
)
from llm_engine.engine import Engine
from llm_engine.errors import InvalidLogits
from tests.llm_engine.driver import record_all, recording, small_engine
from tests.support.compile_driver import compile_driver
from tests.support.log_records import records_of
from tests.support.triton_interpreter import interpreted

Compiled = list[tuple[str, bool]]  # each source, and whether it was compiled ahead


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    """What is compiled: launches compile, by what stands for the compiler, and never run."""
    sources: Compiled = []
    is_ahead: list[bool] = []  # of the last launch, as those ahead are compiled after the last one
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        is_ahead[:] = [only_compiles()]
        return launch(self, *args, grid=grid, warmup=True, **options)

    def compile_source(source: Any, *, options: dict[str, Any], **_: object) -> object:
        sources.append((f"{source.name} {source.hash()} {options}", is_ahead[0]))
        return SimpleNamespace(src=source, metadata=None)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(triton.compiler, "compile", compile_source)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)  # launchers take CPU tensors
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(
        recordings, "CudaGraphRecorder", lambda: lambda work: partial(returned, work())
    )
    with compile_driver():
        yield sources


def returned(value: object) -> object:
    return value


def cold_engine(model: Path, num_seats: int) -> Engine:
    """Return an engine that has launched nothing."""
    with patch.object(Engine, "warm_up"):
        own = small_engine(model, num_layers=2)
    return recording(own, num_seats=num_seats, max_step_tokens=64)


@pytest.mark.parametrize("num_seats", [0, 8], ids=["prefill", "decode"])
def test_a_warm_up_compiles_nothing_that_was_not_compiled_ahead(
    tmp_path: Path, compiled: Compiled, num_seats: int
) -> None:
    engine = cold_engine(tmp_path, num_seats)
    decoder = engine.decoder
    load_kernels = partial(
        load_engine._load_kernels, decoder._attention, decoder._weights, torch.device("cpu")
    )

    load_engine._compile_ahead(engine.launch_kernels, load_kernels)
    load_kernels()
    with suppress(InvalidLogits):  # nothing has run: any tokens are drawn
        engine.warm_up()
    record_all(engine)

    ahead = {source for source, is_ahead in compiled if is_ahead}
    later = {source for source, is_ahead in compiled if not is_ahead}
    assert later
    assert later == ahead


def test_a_start_compiles_ahead_though_launchers_check_values(
    tmp_path: Path, compiled: Compiled, caplog: pytest.LogCaptureFixture
) -> None:
    engine = cold_engine(tmp_path, num_seats=8)

    with patch.object(debug, "is_on", new=True):
        load_engine._compile_ahead(engine.launch_kernels)

    assert compiled
    assert "not_compiled_ahead" not in caplog.messages


def test_a_start_goes_on_where_kernels_cannot_be_compiled_ahead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def launch() -> None:
        raise torch.OutOfMemoryError("no memory")

    with caplog.at_level(logging.INFO):
        load_engine._compile_ahead(launch)

    (record,) = records_of(caplog)
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "not_compiled_ahead"
    assert "no memory" in vars(record)["fields"]["error"]


def test_a_start_looks_for_what_to_compile_until_one_has_compiled_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    engine: Any = SimpleNamespace(
        launch_kernels=partial(calls.append, "launch"), warm_up=partial(calls.append, "warm up")
    )
    monkeypatch.setattr(load_engine, "_compile_ahead", lambda *_: calls.append("compile"))
    marker = tmp_path / "marker"

    def start() -> list[str]:
        calls.clear()
        load_engine._compile_and_load(engine, partial(calls.append, "load"), marker)
        return calls

    with monkeypatch.context() as patched:
        patched.setattr(engine, "warm_up", raise_invalid_logits)
        with pytest.raises(InvalidLogits):
            start()
    assert start() == ["compile", "load", "warm up"]
    assert start() == ["load", "warm up"]


def raise_invalid_logits() -> None:
    raise InvalidLogits("injected")


def test_a_start_goes_on_where_it_cannot_mark_what_is_compiled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine: Any = SimpleNamespace(launch_kernels=lambda: None, warm_up=lambda: None)
    load_engine._compile_and_load(engine, lambda: None, tmp_path / "no folder" / "marker")
    assert "not_marked_as_compiled" in caplog.messages


def test_another_model_device_or_compiler_has_another_marker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = SimpleNamespace(name="H100", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(triton.runtime.cache, "triton_key", lambda: "3.6")
    found = [marker_of("model", 1), marker_of("model", 2)]
    device.multi_processor_count = 114
    found.append(marker_of("model", 1))
    monkeypatch.setattr(triton.runtime.cache, "triton_key", lambda: "3.7")
    found.append(marker_of("model", 1))

    assert len(set(found)) == len(found)
    assert found[-1] == marker_of("model", 1)
    assert {each.parent for each in found} == {Path(triton.knobs.cache.dir)}


def test_an_engine_on_a_cpu_compiles_nothing_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("compiles ahead")

    monkeypatch.setattr(load_engine, "_compile_ahead", fail)

    with interpreted():
        small_engine(tmp_path)
