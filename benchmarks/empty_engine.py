"""An engine without a model: steps take a fixed time beside the host, and draw made-up tokens."""

import time
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from kv_cache.layout import KVLayout
from kv_cache.page_storage import PageBytes
from llm_engine.engine_api import GpuMemory
from llm_engine.engine_step import EngineStep, StepResult
from llm_engine.sampling import SampledToken


class HostPages:
    """Pages in host memory, which no step changes; implements kv_cache.page_storage.PageStorage."""

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self._pages: PageBytes = np.zeros((num_pages, page_bytes), np.uint8)

    def export_pages(self, page_ids: Sequence[int]) -> PageBytes:
        return self._pages[list(page_ids)]

    def import_pages(self, page_ids: Sequence[int], contents: PageBytes) -> None:
        self._pages[list(page_ids)] = contents

    def digest_pages(self, page_ids: Sequence[int]) -> list[bytes]:
        return [blake2b(self._pages[each], digest_size=16).digest() for each in page_ids]


class EmptyEngine:
    """Implements engine_api.EngineLike: what a worker costs beside its device.

    Args:
        layout: The layout of its pages.
        num_pages: How many.
        step_s: Time that a device would take for a step; it begins when the one before has ended.
        token: What is drawn.
    """

    gpu_memory = GpuMemory()
    max_launched = 2

    def __init__(
        self, layout: KVLayout, *, num_pages: int, step_s: float, token: SampledToken
    ) -> None:
        self.layout = layout
        self.storage = HostPages(num_pages, layout.page_bytes)
        self._step_s = step_s
        self._token = token
        self._launched: deque[tuple[EngineStep, float]] = deque()  # with when each ends
        self._ends_at = 0.0  # of the step that was launched last

    def full_pass(self, num_decodes: int, most: int) -> int:
        return most

    def launch(self, step: EngineStep) -> None:
        self._ends_at = max(self._ends_at, time.monotonic()) + self._step_s
        self._launched.append((step, self._ends_at))

    def read(self) -> StepResult:
        step, ends_at = self._launched.popleft()
        time.sleep(max(ends_at - time.monotonic(), 0))
        return StepResult(
            decodes=[self._token] * len(step.decodes),
            slices=[(self._token,) * len(each.draws) for each in step.slices],
        )

    def record_next(self) -> bool:
        return False
