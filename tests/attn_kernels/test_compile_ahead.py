"""What is launched inside `compiling_ahead` is compiled, in parallel, and does not run."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from attn_kernels.compile_ahead import compiling_ahead, only_compiles
from tests.support.compile_driver import CompileDriver, compile_driver


@triton.jit
def double_kernel(x_ptr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(x_ptr + index, tl.load(x_ptr + index) * 2)


@triton.jit
def clear_kernel(x_ptr, SIZE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, SIZE), 0.0)


X = torch.ones(64)
ORIGINAL = JITFunction.run, JITFunction._do_compile

Compile = Callable[[str], None]


@pytest.fixture(autouse=True)
def hopper() -> Iterator[CompileDriver]:
    with compile_driver() as driver:
        yield driver
    assert (JITFunction.run, JITFunction._do_compile) == ORIGINAL
    assert not only_compiles()


@pytest.fixture
def compile_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Compile], list[str]]:
    """Let a function of a kernel's name stand for the compiler; returns the names, as they come."""

    def replace(action: Compile) -> list[str]:
        names: list[str] = []

        def compile_source(source: Any, **options: object) -> object:
            names.append(source.name)
            action(source.name)
            return SimpleNamespace(name=source.name, src=source, metadata=None)

        monkeypatch.setattr(triton.compiler, "compile", compile_source)
        return names

    return replace


def test_a_kernel_is_compiled_to_the_cache_where_its_launch_finds_it(tmp_path: Path) -> None:
    found: list[bool] = []

    def listen(*, cache_hit: bool, **_: object) -> None:
        found.append(cache_hit)

    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = str(tmp_path)
        triton.knobs.compilation.listener = listen
        with compiling_ahead():
            for _ in range(2):
                double_kernel[(1,)](X, SIZE=64)
        double_kernel.warmup(X, SIZE=64, grid=(1,))

    assert X.sum() == 64, "the kernel has run"
    assert found == [False, True]


def test_what_launches_a_kernel_is_made_ahead_too(hopper: CompileDriver) -> None:
    with compiling_ahead():
        for _ in range(2):
            double_kernel[(1,)](X, SIZE=64)
        clear_kernel[(1,)](X, SIZE=64)

    assert sorted(hopper.launched) == ["clear_kernel", "double_kernel"]


def test_kernels_are_compiled_at_the_same_time(
    compile_by: Callable[[Compile], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    both = threading.Barrier(2, timeout=10)
    names = compile_by(lambda _: both.wait() and None)

    with compiling_ahead():
        double_kernel[(1,)](X, SIZE=64)
        clear_kernel[(1,)](X, SIZE=64)

    assert sorted(names) == ["clear_kernel", "double_kernel"]


def test_each_specialization_is_compiled_once_ahead(
    compile_by: Callable[[Compile], list[str]],
) -> None:
    names = compile_by(lambda _: None)

    with compiling_ahead():
        for size in (32, 64, 32):
            double_kernel[(1,)](X, SIZE=size)

    assert len(names) == 2


def test_a_kernel_compiled_before_does_not_run_inside(
    compile_by: Callable[[Compile], list[str]],
) -> None:
    names = compile_by(lambda _: None)
    double_kernel.warmup(X, SIZE=64, grid=(1,))

    with compiling_ahead():
        double_kernel[(1,)](X, SIZE=64)  # what stands for the compiled kernel cannot run

    assert names == ["double_kernel"]


def test_an_error_of_the_compiler_comes_at_the_end_and_at_the_launch(
    compile_by: Callable[[Compile], list[str]],
) -> None:
    def compile_some(name: str) -> None:
        if name == "double_kernel":
            raise OSError("no space left")

    names = compile_by(compile_some)

    def launch_ahead() -> None:
        with compiling_ahead():
            double_kernel[(1,)](X, SIZE=64)
            clear_kernel[(1,)](X, SIZE=64)

    with pytest.raises(OSError, match="no space left"):
        launch_ahead()

    assert sorted(names) == ["clear_kernel", "double_kernel"], "the error kept others away"
    with pytest.raises(OSError, match="no space left"):
        double_kernel[(1,)](X, SIZE=64)


def test_what_failed_ahead_may_succeed_at_the_launch(
    compile_by: Callable[[Compile], list[str]],
) -> None:
    def fail_once(name: str) -> None:
        if len(names) == 1:
            raise OSError("too many processes")

    names = compile_by(fail_once)

    with pytest.raises(OSError, match="too many processes"), compiling_ahead():
        double_kernel[(1,)](X, SIZE=64)

    assert double_kernel.warmup(X, SIZE=64, grid=(1,)).name == "double_kernel"


def test_launches_that_break_off_leave_nothing_behind(
    compile_by: Callable[[Compile], list[str]],
) -> None:
    names = compile_by(lambda _: None)

    def launch_ahead() -> None:
        with compiling_ahead():
            double_kernel[(1,)](X, SIZE=64)
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        launch_ahead()

    assert not names
    assert double_kernel.warmup(X, SIZE=64, grid=(1,)).name == "double_kernel"


def test_one_inside_another_is_refused(compile_by: Callable[[Compile], list[str]]) -> None:
    names = compile_by(lambda _: None)

    with compiling_ahead():
        with pytest.raises(RuntimeError, match="found one inside another"), compiling_ahead():
            pass
        double_kernel[(1,)](X, SIZE=64)

    assert names == ["double_kernel"]


def test_launches_of_other_threads_are_as_ever(
    compile_by: Callable[[Compile], list[str]],
) -> None:
    compile_by(lambda _: None)
    compiled: list[object] = []

    def launch() -> None:
        compiled.append(double_kernel.warmup(X, SIZE=64, grid=(1,)))

    with compiling_ahead():
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
        ahead = double_kernel.warmup(X, SIZE=32, grid=(1,))

    assert [each.name for each in compiled] == ["double_kernel"]
    assert ahead is None
