"""Times each chunk that a decode worker reads from another GPU of its host; see served_moves.

Of chunks that are copied in one call, the first has the times of the call, and the others begin and
end when it ends.
"""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.step_times import between_ms, mark


@dataclass(kw_only=True, slots=True)
class MoveTimes:
    """A chunk's way; times are seconds of one clock of the worker."""

    num_bytes: int = 0
    posted_s: float = 0.0  # its receive
    begun_s: float = 0.0  # in the thread that copies
    launched_s: float = 0.0  # all copies of its pages
    copied_s: float = 0.0  # and seen by that thread
    received_s: float = 0.0  # seen by the event loop
    device_ms: float = 0.0  # from before the first copy to behind the last one


def time_moves(folder: Path) -> None:
    """Let receivers of this process time their chunks, and write a line of JSON for each."""
    from kv_transfer.cuda_ipc_memory import CudaPeerPages
    from kv_transfer.receiver import Receiver

    file = (folder / f"{os.getpid()}.moves").open("w", encoding="utf-8", buffering=1)
    # Calls and how many of their pages are not received yet; in the order of the receives.
    copied: deque[tuple[MoveTimes, int]] = deque()
    mine = threading.local()
    copy, launch, receive = CudaPeerPages.copy, CudaPeerPages._copy_by_engine, Receiver._receive

    def copy_timed(self: Any, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        mine.times = MoveTimes(begun_s=time.perf_counter())
        copy(self, source_ids, target_ids)
        mine.times.copied_s = time.perf_counter()
        mine.times.device_ms = between_ms(*mine.marks)
        copied.append((mine.times, len(source_ids)))

    def launch_timed(self: Any, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        begun = mark()
        launch(self, source_ids, target_ids)
        mine.marks = begun, mark()
        mine.times.launched_s = time.perf_counter()

    async def receive_timed(self: Any, post: Any) -> None:
        posted_s = time.perf_counter()
        await receive(self, post)
        received_s = time.perf_counter()
        if not copied:
            return  # it failed, or came another way
        call, num_left = copied.popleft()
        times = replace(call)
        if num_left > post.num_pages:
            rest = replace(call, begun_s=call.copied_s, launched_s=call.copied_s, device_ms=0.0)
            copied.appendleft((rest, num_left - post.num_pages))
        times.posted_s, times.received_s = posted_s, received_s
        times.num_bytes = post.num_pages * self._storage.page_bytes
        file.write(json.dumps(asdict(times)) + "\n")

    CudaPeerPages.copy = copy_timed  # type: ignore[method-assign]
    CudaPeerPages._copy_by_engine = launch_timed  # type: ignore[method-assign]
    Receiver._receive = receive_timed  # type: ignore[method-assign]
