"""Times the kernels of attention, sampling and pages on one GPU and writes the cases as JSON.

    python -m benchmarks.kernels --out benchmarks/results/kernels-h200.json

Method: Llama-3-8B's shape (32 query heads, 8 key-value heads, head_dim 128), bfloat16, one layer of
a pool of all layers in random pages of random data; the launch in a CUDA graph; 256 MB are written
between runs, so that the L2 cache is cold; time from events around the replay; median and p99.
"@compact" is the same on a pool of one layer. "tbps" counts the bytes of keys and values read,
"tflops" the operations of the visible scores. plan() is host time and no part of "us". Matrix
products draw so much power that the clocks fall within a second: a prefill case starts after a
rest, "@sustained" follows at once.
"launch/empty" is the shortest time that the method can show.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attn_kernels.cascade import CascadeAttention
from attn_kernels.decode import DecodeAttention
from attn_kernels.digest import digest_pages
from attn_kernels.pages import gather_pages, scatter_pages
from attn_kernels.prefill import PrefillAttention
from benchmarks.cascade_cases import Forest, cascade_cases
from benchmarks.sampling_cases import sampling_cases

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS = 32, 8, 128, 32
TOKEN_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * 2  # of one layer
SCALE = HEAD_DIM**-0.5
FLUSH_BYTES = 256 << 20
REST_S = 0.5
GIB = 1 << 30


def lognormal_lens(seed: int) -> list[int]:
    """Lengths of 128 requests, as the targets' authors drew them."""
    rng = random.Random(seed)  # noqa: S311 -- a workload, not a secret
    return [min(65_536, max(64, int(rng.lognormvariate(7, 1.2)))) for _ in range(128)]


DECODE_CASES: dict[str, list[int]] = {
    **{
        f"decode/{batch}x{context}": [context] * batch
        for batch, context in (
            (1, 1024),
            (1, 4096),
            (1, 16384),
            (8, 1024),
            (8, 4096),
            (32, 1024),
            (64, 1024),
            (128, 1024),
            (256, 1024),
            (64, 4096),
            (128, 8192),
        )
    },
    **{f"decode/lognormal{seed}": lognormal_lens(seed) for seed in (1, 2, 3)},
    "decode/skew": [65_536] + [512] * 63,
    "decode/skew4": [32_768] * 4 + [1024] * 60,
}

# name -> (new tokens, all tokens) of each request
PREFILL_CASES: dict[str, list[tuple[int, int]]] = {
    "prefill/8192": [(8192, 8192)],
    "prefill/4x2048": [(2048, 2048)] * 4,
    "prefill/2048@34816": [(2048, 34_816)],
    "prefill/8x512@4096": [(512, 4096)] * 8,
    "prefill/16384": [(16_384, 16_384)],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """One row of the results."""

    case: str
    us: float  # median
    p99_us: float
    tbps: float | None = None  # 10**12 bytes per second
    tflops: float | None = None
    plan_us: float | None = None
    extend_us: float | None = None  # planning the next step of the same batch
    estimated_us: float | None = None  # by the model that chooses between cascade and flat
    num_shared_items: int | None = None  # 0: flat was chosen


class Bench:
    """Memory and clock that all cases share."""

    def __init__(self, *, pool_bytes: int, repetitions: int) -> None:
        self.repetitions = repetitions
        self.device = torch.device("cuda")
        self.flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=self.device)
        self.memory = torch.empty(pool_bytes // 2, dtype=torch.bfloat16, device=self.device)
        for part in torch.split(self.memory, 1 << 30):
            part.normal_()

    def pool(self, num_tokens: int, page_size: int, *, compact: bool) -> Tensor:
        """View the memory as the largest pool of at most 32 layers that holds the tokens."""
        num_pages = -(-num_tokens // page_size) + 1
        page_elements = 2 * NUM_KV_HEADS * page_size * HEAD_DIM
        layers = (
            1 if compact else min(NUM_LAYERS, self.memory.numel() // page_elements // num_pages)
        )
        if not compact:
            num_pages = self.memory.numel() // (page_elements * layers)
        shape = (num_pages, layers, 2, NUM_KV_HEADS, page_size, HEAD_DIM)
        used = num_pages * layers * page_elements
        return self.memory[:used].view(shape)

    def time(self, launch: Callable[[], object]) -> tuple[float, float]:
        """Return median and p99 of a launch in microseconds, with a cold L2."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())  # plans are copied there
        with torch.cuda.stream(side):
            launch()  # compiles outside the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        times = []
        for _ in range(self.repetitions):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self.flush.fill_(1)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000)
        times.sort()
        return statistics.median(times), times[min(len(times) - 1, int(len(times) * 0.99))]


def page_tables(pages: Tensor, kv_lens: Sequence[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Give each request random pages of the pool; return indptr and indices."""
    counts = torch.tensor([0] + [-(-kv_len // pages.shape[4]) for kv_len in kv_lens])
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(pages.shape[0], generator=generator)[: int(counts.sum())]
    indptr = counts.cumsum(0)
    return indptr.to(pages.device, torch.int32), indices.to(pages.device, torch.int32)


def bench_decode(
    bench: Bench,
    case: str,
    kv_lens: Sequence[int],
    *,
    page_size: int,
    compact: bool = False,
) -> Timing:
    """Time one decode case."""
    pages = bench.pool(sum(kv_lens) + page_size * len(kv_lens), page_size, compact=compact)
    attention = DecodeAttention(
        pages,
        num_qo_heads=NUM_QO_HEADS,
        scale=SCALE,
        max_requests=len(kv_lens),
        max_kv_tokens=sum(kv_lens),
    )
    _, indices = page_tables(pages, kv_lens)
    q = torch.randn(len(kv_lens), NUM_QO_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=bench.device)
    out = torch.empty_like(q)
    plan_times = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        attention.plan(kv_lens)
        plan_times.append((time.perf_counter() - began) * 1e6)
    layer = pages.shape[1] // 2
    us, p99_us = bench.time(lambda: attention.run(q, layer, indices, out=out))
    return Timing(
        case=case,
        us=us,
        p99_us=p99_us,
        tbps=sum(kv_lens) * TOKEN_BYTES / us / 1e6,
        plan_us=statistics.median(plan_times),
    )


def bench_cascade(bench: Bench, case: str, forest: Forest, *, page_size: int) -> list[Timing]:
    """Time one forest as planned, and flat; "tbps" counts shared keys and values once."""
    kv_lens = forest.kv_lens()
    num_tokens = forest.num_distinct_tokens()
    pages = bench.pool(num_tokens + page_size * len(kv_lens), page_size, compact=False)
    page_ids = torch.randperm(pages.shape[0], generator=torch.Generator().manual_seed(0))
    starts, indices = forest.page_tables(page_ids.tolist(), page_size)
    attention = CascadeAttention(
        pages,
        num_qo_heads=NUM_QO_HEADS,
        scale=SCALE,
        max_requests=len(kv_lens),
        max_kv_tokens=sum(kv_lens),
    )
    kv_page_indices = torch.from_numpy(indices).to(bench.device)
    q = torch.randn(len(kv_lens), NUM_QO_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=bench.device)
    out = torch.empty_like(q)
    layer = pages.shape[1] // 2
    plan_times, extend_times = [], []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        estimate = attention.plan(kv_lens, starts, indices)
        planned = time.perf_counter()
        attention.extend(kv_lens)
        plan_times.append((planned - began) * 1e6)
        extend_times.append((time.perf_counter() - planned) * 1e6)
    us, p99_us = bench.time(lambda: attention.run(q, layer, kv_page_indices, out=out))
    attention.decode.plan(np.asarray(kv_lens), table_starts=starts)
    flat_us, flat_p99_us = bench.time(
        lambda: attention.decode.run(q, layer, kv_page_indices, out=out)
    )
    return [
        Timing(
            case=case,
            us=us,
            p99_us=p99_us,
            tbps=num_tokens * TOKEN_BYTES / us / 1e6,
            plan_us=statistics.median(plan_times),
            extend_us=statistics.median(extend_times),
            estimated_us=estimate.cascade_us,
            num_shared_items=attention.num_shared_items,
        ),
        Timing(
            case=f"{case}@flat",
            us=flat_us,
            p99_us=flat_p99_us,
            tbps=num_tokens * TOKEN_BYTES / flat_us / 1e6,
            estimated_us=estimate.flat_us,
        ),
    ]


def bench_prefill(
    bench: Bench,
    case: str,
    lens: Sequence[tuple[int, int]],
    *,
    page_size: int,
    rest_s: float = REST_S,
) -> Timing:
    """Time one prefill case after the GPU has rested for some seconds."""
    qo_lens, kv_lens = [qo for qo, _ in lens], [kv for _, kv in lens]
    pages = bench.pool(sum(kv_lens) + page_size * len(kv_lens), page_size, compact=False)
    attention = PrefillAttention(pages, num_qo_heads=NUM_QO_HEADS, scale=SCALE)
    indptr, indices = page_tables(pages, kv_lens)
    q = torch.randn(sum(qo_lens), NUM_QO_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=bench.device)
    out = torch.empty_like(q)
    began = time.perf_counter()
    attention.plan(qo_lens, kv_lens)
    plan_us = (time.perf_counter() - began) * 1e6
    torch.cuda.synchronize()
    time.sleep(rest_s)
    us, p99_us = bench.time(lambda: attention.run(q, 0, indptr, indices, out=out))
    scores = sum(qo * (kv - qo) + qo * (qo + 1) / 2 for qo, kv in lens)
    flops = 4 * NUM_QO_HEADS * HEAD_DIM * scores
    tflops = flops / us / 1e6
    return Timing(case=case, us=us, p99_us=p99_us, tflops=tflops, plan_us=plan_us)


def page_cases(
    bench: Bench, num_pages: int, page_bytes: int
) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Yield page copies, beside a plain copy of as many bytes: name, bytes read and written."""
    elements = page_bytes // 2
    pages = bench.memory[: bench.memory.numel() // elements * elements].view(-1, elements)
    ids = torch.randperm(pages.shape[0] // 2)[:num_pages].to(bench.device)
    source = pages[: pages.shape[0] // 2]
    staging = pages[pages.shape[0] // 2 :][:num_pages]
    moved = 2 * num_pages * page_bytes
    words = source.view(torch.int32)
    multipliers = torch.randint(1 << 62, (2, words.shape[1]), device=bench.device) | 1
    size = f"{num_pages}x{page_bytes >> 20}MiB"
    yield f"copy/{size}", moved, lambda: staging.copy_(source[:num_pages])
    yield f"gather/{size}", moved, lambda: gather_pages(source, ids, staging)
    yield f"scatter/{size}", moved, lambda: scatter_pages(staging, ids, source)
    yield f"digest/{size}", moved // 2, lambda: digest_pages(words, ids, multipliers)


def main() -> None:
    """Run the cases whose names begin as asked; print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--only", default="", help="cases that begin with this")
    parser.add_argument("--page-size", type=int, default=64, help="tokens")
    parser.add_argument("--pool-gib", type=int, default=64, help="size of the pool")
    parser.add_argument("--repetitions", type=int, default=50, help="timed runs of a case")
    arguments = parser.parse_args()

    bench = Bench(pool_bytes=arguments.pool_gib * GIB, repetitions=arguments.repetitions)
    properties = torch.cuda.get_device_properties(bench.device)
    print(f"{properties.name}, torch {torch.__version__}, page_size {arguments.page_size}")
    rows = []
    for timing in run_cases(bench, arguments.only, arguments.page_size):
        _show(timing)
        rows.append({name: value for name, value in asdict(timing).items() if value is not None})
        if arguments.out is not None:  # after each case: a run that is cut short keeps the others
            arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


def run_cases(bench: Bench, prefix: str, page_size: int) -> Iterator[Timing]:
    """Time the shortest launch, then the cases whose names begin with the prefix."""
    nothing = torch.zeros(1, device=bench.device)
    us, p99_us = bench.time(lambda: nothing.zero_())
    yield Timing(case="launch/empty", us=us, p99_us=p99_us)
    for case, kv_lens in DECODE_CASES.items():
        if case.startswith(prefix):
            yield bench_decode(bench, case, kv_lens, page_size=page_size)
            yield bench_decode(bench, f"{case}@compact", kv_lens, page_size=page_size, compact=True)
    for case, forest in cascade_cases():
        if case.startswith(prefix):
            yield from bench_cascade(bench, case, forest, page_size=page_size)
    for case, lens in PREFILL_CASES.items():
        if case.startswith(prefix):
            yield bench_prefill(bench, case, lens, page_size=page_size)
            name = f"{case}@sustained"
            yield bench_prefill(bench, name, lens, page_size=page_size, rest_s=0.0)
    for case, launch in sampling_cases(bench.device):
        if case.startswith(prefix):
            us, p99_us = bench.time(launch)
            yield Timing(case=case, us=us, p99_us=p99_us)
    for page_bytes in (2 << 20, 8 << 20):
        for case, num_bytes, copy in page_cases(bench, 256, page_bytes):
            if case.startswith(prefix):
                us, p99_us = bench.time(copy)
                yield Timing(case=case, us=us, p99_us=p99_us, tbps=num_bytes / us / 1e6)


def _show(timing: Timing) -> None:
    columns = [f"{timing.case:28} {timing.us:9.1f} us  p99 {timing.p99_us:9.1f}"]
    if timing.tbps is not None:
        columns.append(f"{timing.tbps:7.2f} TB/s")
    if timing.tflops is not None:
        columns.append(f"{timing.tflops:7.0f} TFLOP/s")
    if timing.plan_us is not None:
        columns.append(f"plan {timing.plan_us:.0f} us")
    if timing.estimated_us is not None:
        columns.append(f"estimated {timing.estimated_us:.0f} us")
    if timing.num_shared_items is not None:
        columns.append(f"{timing.num_shared_items} shared items")
    print("  ".join(columns))


if __name__ == "__main__":
    main()
