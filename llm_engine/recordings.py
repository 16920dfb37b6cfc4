"""CUDA graphs: work recorded once, then replayed by one call of the host.

A graph replays launches with their recorded arguments. So data that changes between replays lies at
fixed addresses.
"""

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Generic, TypeVar

import torch

from attn_kernels.compile_ahead import only_compiles
from llm_engine.device_errors import is_device_lost
from observability.logs import fields

logger = logging.getLogger(__name__)

_only_loads: ContextVar[bool] = ContextVar("only_loads", default=False)

Result = TypeVar("Result")
Kind = TypeVar("Kind", bound=Hashable)


class CudaGraphRecorder:
    """Records a function's launches on the current device; its kernels have run before.

    Recordings of one recorder share their working memory: they run one after another, and a result
    is valid until the next recording runs. Those after one that failed share another memory.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._refused: list[torch.cuda.CUDAGraph] = []

    def __call__(self, work: Callable[[], Result]) -> Callable[[], Result]:
        graph = torch.cuda.CUDAGraph()
        # Not by torch.cuda.graph, which waits for the whole device, even for a transfer that waits
        # for its peer. Other threads may meanwhile make calls that cannot be recorded.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                result = self._captured(graph, work)
            except BaseException:
                # torch takes no further recording into a pool of which it has given up the only one
                self._pool = torch.cuda.graph_pool_handle()
                raise

        def repeat() -> Result:
            graph.replay()
            return result

        return repeat

    def _captured(self, graph: torch.cuda.CUDAGraph, work: Callable[[], Result]) -> Result:
        try:
            return work()
        finally:
            self._end(graph)

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except Exception:
            # Where CUDA refuses a recording, for instance because the work has waited for the
            # device, torch 2.11 does not tell its two allocators that it ended: the device's
            # would keep freed memory, and both would refuse each later recording in this pool.
            with suppress(RuntimeError):  # raised where they have been told
                device = torch.cuda.current_device()
                torch._C._cuda_endAllocateToPool(device, self._pool)
                torch._C._cuda_releasePool(device, self._pool)
                self._refused.append(graph)  # the allocator of pinned memory still has its address
            raise


def needs_results() -> bool:
    """Return False where work is launched for its kernels alone, to compile or to load them."""
    return not (only_compiles() or _only_loads.get())


@contextmanager
def loading_kernels() -> Iterator[None]:
    """While entered, work of this thread is launched for its kernels; results are arbitrary."""
    token = _only_loads.set(True)
    try:
        yield
    finally:
        _only_loads.reset(token)


class Recordings(Generic[Kind, Result]):
    """Recordings of work by kind; all memory whose addresses they contain stays where it is.

    The first work of a kind is launched kernel by kernel, which loads the kernels; the second one
    is recorded, unless `record` has done that before. Work that only loads kernels never is. Work
    that cannot be recorded is launched kernel by kernel each time.
    """

    def __init__(self) -> None:
        self._record = CudaGraphRecorder()
        self._repeats: dict[Kind, Callable[[], Result] | None] = {}  # None: its kernels are loaded

    def run(self, kind: Kind, work: Callable[[], Result], *, num_rows: int) -> Result:
        """Do work of a kind, by a recording if there is one.

        Args:
            kind: What a recording is valid for.
            work: Launches on the current stream and waits for nothing.
            num_rows: For the log.
        """
        if only_compiles():  # a recording would have no kernels
            return work()
        if kind not in self._repeats or not needs_results():  # a recording would lack layers
            result = work()
            self._repeats.setdefault(kind, None)
            return result
        return self._recorded(kind, work, num_rows)()

    def record(self, kind: Kind, work: Callable[[], Result], *, num_rows: int) -> bool:
        """Record work, and do none of it; return False if its kind is already recorded.

        Args:
            kind, work, num_rows: As those of `run`; the kernels are loaded.
        """
        if self._repeats.get(kind) is not None:
            return False
        self._recorded(kind, work, num_rows)
        return True

    def _recorded(
        self, kind: Kind, work: Callable[[], Result], num_rows: int
    ) -> Callable[[], Result]:
        repeat = self._repeats.get(kind)
        if repeat is None:
            try:
                repeat = self._record(work)
            except Exception as error:
                if is_device_lost(error):
                    raise
                # Slower without it, but no request fails.
                logger.warning("step_not_recorded", extra=fields(rows=num_rows, error=repr(error)))
                repeat = work
            self._repeats[kind] = repeat
        return repeat
