"""Times the kernels of attention, sampling and pages on one GPU and writes the cases as JSON.

    python -m benchmarks.kernels --out benchmarks/results/kernels-h200.json

Method: Llama-3-8B's shape (32 query heads, 8 key-value heads, head_dim 128), bfloat16, one layer of
a pool of all layers in random pages of random data; the launch in a CUDA graph; 256 MB are written
between runs, so that the L2 cache is cold; time from events around the replay; median and longest.
Decode, and its reads alone, are timed over five sets of random pages: the median of their medians,
and the longest of all.
"@compact" is the same on a pool of one layer. Where a case's tokens do not fit the pool in all 32
layers, its pages have as many as fit (15 for 128x8192 in 64 GB). "tbps" counts the bytes of keys
and values read, or of logits, each once, "tflops" the operations of the visible scores. plan() is
host time, the least of medians on 16 cores, and no part of "us". Matrix products draw so much
power that the clocks fall within a second: a prefill case starts after a rest, "@sustained" follows
at once.

The write leaves about 50 MB in L2 that must be written back while the kernel reads, and "us"
includes that; "clean_us" does not: 256 MB have been read after the write. "read/..." is a decode
case's reads alone, without attention: the fastest read found. "launch/empty" is the shortest time
of the method. "@fp8" is the same on a pool of e4m3, "@inexact" cascade attention that need not be
bit-identical to flat decode.

"gather/...@host" and "scatter/...@host" have their staging in pinned host memory, beside plain
copies of as many bytes to it, "copy/...@host", and from it, "copy/...@from-host". "tbps" counts
these bytes once, as the link between host and GPU carries them.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from attn_kernels.pages.launch import gather_pages, scatter_pages
from attn_kernels.pages.launch_digest import digest_pages
from benchmarks.attention_cases import attention_cases
from benchmarks.bench import Bench, Timing
from benchmarks.sampling_cases import sampling_cases

GIB = 1 << 30


def page_cases(
    bench: Bench, num_pages: int, page_bytes: int
) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Yield page copies, beside a plain copy of as many bytes: name, bytes read and written."""
    pages = _pages_of(bench, page_bytes)
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


def host_cases(
    bench: Bench, num_pages: int, page_bytes: int
) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Yield page copies to and from pinned host memory, beside plain ones: name, bytes moved."""
    pages = _pages_of(bench, page_bytes)
    ids = torch.randperm(pages.shape[0])[:num_pages].to(bench.device)
    near = pages[:num_pages]
    has_gpu = bench.device.type == "cuda"
    staging = torch.zeros((num_pages, pages.shape[1]), dtype=pages.dtype, pin_memory=has_gpu)
    moved = num_pages * page_bytes
    size = f"{num_pages}x{page_bytes >> 20}MiB"
    yield f"copy/{size}@host", moved, lambda: staging.copy_(near, non_blocking=True)
    yield f"gather/{size}@host", moved, lambda: gather_pages(pages, ids, staging)
    yield f"copy/{size}@from-host", moved, lambda: near.copy_(staging, non_blocking=True)
    yield f"scatter/{size}@host", moved, lambda: scatter_pages(staging, ids, pages)


def main() -> None:
    """Run the cases whose names begin as asked; print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument(
        "--only", default="", help="run only cases whose names begin with one of these: a,b,c"
    )
    parser.add_argument(
        "--page-size", type=int, default=64, choices=(16, 32, 64, 128), help="tokens of a page"
    )
    parser.add_argument("--pool-gib", type=int, default=64, help="size of the pool, GiB")
    parser.add_argument("--repetitions", type=int, default=50, help="timed runs of a case")
    arguments = parser.parse_args()

    bench = Bench(pool_bytes=arguments.pool_gib * GIB, repetitions=arguments.repetitions)
    properties = torch.cuda.get_device_properties(bench.device)
    print(f"{properties.name}, torch {torch.__version__}, page_size {arguments.page_size}")
    rows = []
    for timing in run_cases(bench, prefixes_of(arguments.only), arguments.page_size):
        _show(timing)
        rows.append(
            {
                name: round(value, 3) if isinstance(value, float) else value
                for name, value in asdict(timing).items()
                if value is not None
            }
        )
        if arguments.out is not None:  # after each case: a run that is cut short keeps the others
            arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


def prefixes_of(only: str) -> tuple[str, ...]:
    """Return the prefixes of chosen cases' names; an empty text chooses all.

    A name begins with a letter, and its own commas stand before digits.
    """
    return tuple(re.split(r",\s*(?=[a-z])", only))


def run_cases(bench: Bench, prefixes: tuple[str, ...], page_size: int) -> Iterator[Timing]:
    """Time the shortest launch, then the cases whose names begin with one of the prefixes."""
    nothing = torch.zeros(1, device=bench.device)
    empty = bench.time("launch/empty", lambda: nothing.zero_(), also_with_clean_l2=True)
    yield replace(empty, tbps=nothing.nbytes / empty.us / 1e6)
    for case, run in attention_cases():
        if case.startswith(prefixes):
            yield from run(bench, page_size)
    for case, num_bytes, launch in sampling_cases(bench.device):
        if case.startswith(prefixes):
            timing = bench.time(case, launch)
            yield replace(timing, tbps=num_bytes / timing.us / 1e6)
    copies = (
        page_cases(bench, 256, 2 << 20),
        page_cases(bench, 256, 8 << 20),
        host_cases(bench, 64, 2 << 20),
    )
    for case, num_bytes, copy in chain.from_iterable(copies):
        if case.startswith(prefixes):
            timing = bench.time(case, copy)
            yield replace(timing, tbps=num_bytes / timing.us / 1e6)


def _pages_of(bench: Bench, page_bytes: int) -> Tensor:
    elements = page_bytes // 2
    return bench.memory[: bench.memory.numel() // elements * elements].view(-1, elements)


def _show(timing: Timing) -> None:
    columns = [f"{timing.case:34} {timing.us:9.1f} us  max {timing.max_us:9.1f}"]
    if timing.clean_us is not None:
        columns.append(f"clean {timing.clean_us:9.1f}")
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
    if timing.vs_flat is not None:
        columns.append(f"{timing.vs_flat:.3f} of flat")
    print("  ".join(columns), flush=True)


if __name__ == "__main__":
    main()
