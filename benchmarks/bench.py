"""The clock and memory that all cases of benchmarks.kernels share, and a row of its results."""

import functools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Llama-3-8B
NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS = 32, 8, 128, 32
FLUSH_BYTES = 256 << 20
WARM_UP_CALLS, HOST_CALLS, HOST_CORES = 5, 20, 16
FP8_SCALE = 1 / 32  # normal values stay far below 448, and few are too small for e4m3
CHUNK = 1 << 30  # elements that are filled or converted at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """One row of the results."""

    case: str
    us: float  # median
    max_us: float
    clean_us: float | None = None  # median with an L2 that has nothing to write back
    tbps: float | None = None  # 10**12 bytes per second
    tflops: float | None = None
    plan_us: float | None = None
    next_step_plan_us: float | None = None  # planning the next step of the same batch
    estimated_us: float | None = None  # by the model that chooses between cascade and flat
    num_shared_items: int | None = None  # 0: flat was chosen
    vs_flat: float | None = None  # "us" over that of flat attention of the same batch


class Bench:
    """Random normal contents for pools, and the method of timing.

    Args:
        pool_bytes: Size of the memory of bfloat16; those of float16 and of fp8, made when first
            asked for, have as many elements.
        repetitions: Timed runs of a launch.
        device: Where pools lie; only a CUDA device has a clock.
    """

    def __init__(self, *, pool_bytes: int, repetitions: int, device: str = "cuda") -> None:
        self.repetitions = repetitions
        self.device = torch.device(device)
        self.flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=self.device)
        self._others = torch.zeros_like(self.flush)
        self._sum = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.memory = torch.empty(pool_bytes // 2, dtype=torch.bfloat16, device=self.device)
        for part in torch.split(self.memory, CHUNK):
            part.normal_()

    @functools.cached_property
    def fp8_memory(self) -> Tensor:
        """The values of `memory` divided by FP8_SCALE, in e4m3."""
        fp8_memory = torch.empty_like(self.memory, dtype=torch.float8_e4m3fn)
        parts = zip(torch.split(self.memory, CHUNK), torch.split(fp8_memory, CHUNK), strict=True)
        for part, fp8_part in parts:
            fp8_part.copy_(part / FP8_SCALE)
        return fp8_memory

    @functools.cached_property
    def float16_memory(self) -> Tensor:
        return self.memory.to(torch.float16)

    def pool(
        self,
        num_tokens: int,
        page_size: int,
        *,
        is_compact: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        num_kv_heads: int = NUM_KV_HEADS,
        head_dim: int = HEAD_DIM,
    ) -> Tensor:
        """View the memory as the largest pool of at most 32 layers that holds the tokens."""
        memory = self.memory
        if dtype == torch.float8_e4m3fn:
            memory = self.fp8_memory
        elif dtype == torch.float16:
            memory = self.float16_memory
        num_pages = -(-num_tokens // page_size) + 1
        page_elements = 2 * num_kv_heads * page_size * head_dim
        layers = 1 if is_compact else min(NUM_LAYERS, memory.numel() // page_elements // num_pages)
        if not is_compact:
            num_pages = memory.numel() // (page_elements * layers)
        shape = (num_pages, layers, 2, num_kv_heads, page_size, head_dim)
        used = num_pages * layers * page_elements
        return memory[:used].view(shape)

    def time(
        self, case: str, launch: Callable[[], object], *, also_with_clean_l2: bool = False
    ) -> Timing:
        """Time a launch in a CUDA graph with a cold L2."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())  # plans are copied there
        with torch.cuda.stream(side):
            launch()  # compiles outside the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        times = sorted(self._replay_us(graph, is_clean=False) for _ in range(self.repetitions))
        clean_us = None
        if also_with_clean_l2:
            clean_us = statistics.median(
                self._replay_us(graph, is_clean=True) for _ in range(self.repetitions)
            )
        return Timing(
            case=case,
            us=statistics.median(times),
            max_us=times[-1],
            clean_us=clean_us,
        )

    def time_over(self, case: str, launches: Iterable[Callable[[], object]]) -> Timing:
        """Time launches that differ in where their data lies, and return medians of medians."""
        timings = [self.time(case, each, also_with_clean_l2=True) for each in launches]
        return Timing(
            case=case,
            us=statistics.median(each.us for each in timings),
            max_us=max(each.max_us for each in timings),
            clean_us=statistics.median(each.clean_us or 0.0 for each in timings),
        )

    def host_us(self, call: Callable[[], object]) -> float:
        """Return the time of a call on the host, made while the GPU is idle.

        It is the least of the medians on a few cores: a core whose other hardware thread is busy,
        perhaps with another virtual machine, takes nearly twice as long.
        """
        cores = os.sched_getaffinity(0)
        medians = []
        for core in sorted(cores)[:HOST_CORES]:
            os.sched_setaffinity(0, {core})
            times = []
            for _ in range(WARM_UP_CALLS + HOST_CALLS):
                torch.cuda.synchronize()
                began = time.perf_counter()
                call()
                times.append((time.perf_counter() - began) * 1e6)
            medians.append(statistics.median(times[WARM_UP_CALLS:]))
        os.sched_setaffinity(0, cores)
        return min(medians)

    def rest(self, seconds: float) -> None:
        """Leave the GPU idle, so that its clocks rise."""
        torch.cuda.synchronize()
        time.sleep(seconds)

    def _replay_us(self, graph: torch.cuda.CUDAGraph, *, is_clean: bool) -> float:
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.flush.fill_(1)
        if is_clean:  # the read data replaces the written data
            torch.sum(self._others, dim=0, keepdim=True, out=self._sum)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000


def page_tables(pages: Tensor, kv_lens: Sequence[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Give each request random pages of the pool; return indptr and indices."""
    counts = torch.tensor([0] + [-(-kv_len // pages.shape[4]) for kv_len in kv_lens])
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(pages.shape[0], generator=generator)[: int(counts.sum())]
    indptr = counts.cumsum(0)
    return indptr.to(pages.device, torch.int32), indices.to(pages.device, torch.int32)
