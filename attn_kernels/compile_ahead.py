"""Compiles kernels in parallel, before their first launch would compile them one by one.

Whoever is about to launch many kernels for the first time launches them twice: inside
`compiling_ahead`, where nothing runs, and then as usual. The second time Triton finds the compiled
kernels in its cache on the disk. Its state in memory stays as it was. So a kernel that could not be
compiled ahead is compiled at its launch, or fails there.

Importing this module does not import Triton.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

Compilations = dict[tuple[object, str], Callable[[], object]]  # by function and specialization

# More gain nothing: about a sixth of a compilation holds the interpreter's lock.
MAX_THREADS = 16

_only_compiles: ContextVar[bool] = ContextVar("only_compiles", default=False)
_taking_turns = threading.Lock()


def only_compiles() -> bool:
    """Return whether launches of this thread compile and do not run."""
    return _only_compiles.get()


def hash_compiler() -> None:
    """Hash Triton's own files, which is half a second's work that hardly holds Python's lock.

    Each look into Triton's cache needs the hash, and those of many threads at once would each make
    it. So let a thread do this early, such as while weights load.
    """
    from triton.runtime.cache import triton_key

    triton_key()


def marker_of(*facts: object) -> Path:
    """Return a path in Triton's cache that is to exist once all that a start needs is compiled.

    Launching everything twice takes most of a second, even if nothing is left to compile. The path
    changes with whatever may change what is compiled. A marker that wrongly exists costs time:
    kernels are then compiled one by one.

    Args:
        facts: What launches depend on besides code, Triton and the current device, by their repr.
    """
    import torch
    from triton import knobs
    from triton.runtime.cache import triton_key

    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    compiler = (triton_key(), device.name, device.multi_processor_count)
    digest = sha256(repr((compiler, facts)).encode())
    root = Path(__file__).resolve().parent.parent
    for folder in ("attn_kernels", "llm_engine"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return Path(knobs.cache.dir) / f"pagewire-{digest.hexdigest()[:32]}"


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Run nothing of what this thread launches inside; on leaving, compile it in other threads.

    A launch returns at once, and leaves its outputs as they are: values that later work reads are
    arbitrary. Leaving takes as long as the compilations. An error inside prevents them.

    Raises:
        RuntimeError: Inside another one.
        Exception: On leaving, what the compiler raised for one of the kernels. Inside, whatever a
            launch raises if another version of Triton has changed what is replaced here.
    """
    if only_compiles():
        raise RuntimeError("compiling_ahead: found one inside another; allowed: one at a time")
    compilations: Compilations = {}
    with _replaced_launches(compilations):
        token = _only_compiles.set(True)
        try:
            yield
        finally:
            _only_compiles.reset(token)
    # Compilations hold the interpreter's lock. They begin only now, since launches beside them
    # would wait for it again and again.
    num_threads = min(len(os.sched_getaffinity(0)), MAX_THREADS)
    with ThreadPoolExecutor(num_threads, "compile-ahead") as threads:
        for done in as_completed([threads.submit(each) for each in compilations.values()]):
            done.result()


def _compile(compile_kernel: Callable[..., Any], source: Any, **options: Any) -> None:
    """Compile a kernel and what launches it, both to the cache on the disk."""
    from triton.runtime.driver import driver

    kernel = compile_kernel(source, **options)
    # Before version 3.7, Triton has a C compiler make a launcher for each signature.
    driver.active.launcher_cls(kernel.src, kernel.metadata)


@contextmanager
def _replaced_launches(compilations: Compilations) -> Iterator[None]:
    """Collect the compilations of launches that only compile; other threads' launches run."""
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=warmup or only_compiles(), **options)

    def compile_later(
        self: Any,
        key: str,
        signature: Any,
        device: int,
        constexprs: Any,
        options: Any,
        attrs: Any,
        warmup: bool,
    ) -> Any:
        if not only_compiles():
            return compile_now(self, key, signature, device, constexprs, options, attrs, warmup)
        if (self, key) not in compilations:
            _, _, target, *_ = self.device_caches[device]
            source = self.ASTSource(self, signature, constexprs, attrs)
            compilations[self, key] = partial(
                _compile, self.compile, source, target=target, options=options.__dict__
            )
        return None  # Triton takes it that there is nothing to launch

    with _taking_turns:
        launch, compile_now = JITFunction.run, JITFunction._do_compile
        JITFunction.run, JITFunction._do_compile = run, compile_later
        try:
            yield
        finally:
            JITFunction.run, JITFunction._do_compile = launch, compile_now
