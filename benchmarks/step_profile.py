"""Shows where the device's time goes in steps of one engine: by kind of kernel, and idle.

    python -m benchmarks.step_profile --model DIR --out benchmarks/results/step-profile-X.json

Cases are those of benchmarks.engine_step that decode or compute prompt tokens; each step is
launched before the previous one is read. Per step: `ms` of the host's clock without the profiler;
`busy_ms` in which some kernel or copy runs; `idle_ms` between the first and the last of them in
which none does; `parts_ms`, the sum of the times of all kernels in a folder of attn_kernels, and of
torch's own kernels and copies. Kernels that are set up while the one before them ends overlap, so
the sum may exceed `busy_ms`.
"""

import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from triton.runtime.jit import JITFunction

import attn_kernels
from benchmarks.engine_step import (
    WARM_UP_STEPS,
    ahead_ms,
    main_of,
    one_by_one_ms,
    runs_of,
)
from llm_engine.engine import Engine

COPIES, OF_TORCH = "copies", "torch"


class Span(NamedTuple):
    """A kernel or copy on the device; us."""

    name: str
    start: float
    end: float


@cache
def folder_of_kernel() -> dict[str, str]:
    """Return the folder of attn_kernels that each kernel belongs to, by the kernel's name."""
    found = {}
    for module in pkgutil.walk_packages(attn_kernels.__path__, "attn_kernels."):
        if module.name.count(".") == 2:
            for value in vars(importlib.import_module(module.name)).values():
                if isinstance(value, JITFunction) and value.fn.__module__ == module.name:
                    found[value.fn.__name__] = module.name.split(".")[1]
    return found


def part_of(name: str) -> str:
    """Return the part of a step that a kernel or copy belongs to."""
    if name.startswith(("Memcpy", "Memset")):
        return COPIES
    return folder_of_kernel().get(name, OF_TORCH)


def summary(spans: Sequence[Span], num_steps: int) -> dict[str, Any]:
    """Return `busy_ms`, `idle_ms` and `parts_ms` of a step, the largest part first."""
    busy, until = 0.0, min(span.start for span in spans)
    first = until
    for span in sorted(spans, key=lambda each: each.start):
        busy += max(span.end - max(span.start, until), 0.0)
        until = max(until, span.end)
    parts: Counter[str] = Counter()
    for span in spans:
        parts[part_of(span.name)] += span.end - span.start  # type: ignore[assignment]
    of_a_step = 1000 * num_steps
    return {
        "busy_ms": round(busy / of_a_step, 3),
        "idle_ms": round((until - first - busy) / of_a_step, 3),
        "parts_ms": {part: round(us / of_a_step, 3) for part, us in parts.most_common()},
    }


def spans_of(events: Iterable[Any]) -> list[Span]:
    """Return what ran on the device, of a profile's events."""
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA
    ]


def profiled(
    engine: Engine, launch: Callable[[], None], name: str, repetitions: int
) -> dict[str, Any]:
    """Profile steps of one kind."""
    one_by_one_ms(engine, launch, WARM_UP_STEPS)
    plain_ms = ahead_ms(engine, launch, repetitions)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        ahead_ms(engine, launch, repetitions)
        torch.cuda.synchronize()
    spans = spans_of(profiler.events())
    # One more step is launched than is timed.
    return {"case": name, "ms": round(plain_ms, 3)} | summary(spans, repetitions + 1)


if __name__ == "__main__":
    main_of("step_profile", __doc__, partial(runs_of, measure=profiled), repetitions=20)
