"""The engine as step loops see it; implemented by `engine.Engine`, and by a fake one in tests."""

from dataclasses import dataclass
from typing import Protocol

from kv_cache.layout import KVLayout
from kv_cache.page_storage import PageStorage
from llm_engine.engine_step import EngineStep, StepResult

# A full pass has at least this share of the prompt tokens that a step may compute.
FULL_SHARE = 0.75

# The error of a request for which no token could be drawn
UNDRAWN = "no token can be drawn for it: the largest allowed logit is NaN or infinite"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMemory:
    """What torch's allocator holds of the engine's GPU, bytes; 0 without one."""

    allocated_bytes: int = 0  # of tensors: weights, pages, buffers
    reserved_bytes: int = 0  # of these and of what is kept for later ones


class EngineLike(Protocol):
    """Computes steps over pages; used by one thread at a time.

    Steps run in launch order, and `read` returns their results in that order.
    """

    @property
    def layout(self) -> KVLayout: ...

    @property
    def storage(self) -> PageStorage: ...

    @property
    def max_launched(self) -> int:
        """Most steps launched but not read: 2 if steps run asynchronously, else 1."""
        ...

    @property
    def gpu_memory(self) -> GpuMemory:
        """The memory that this process holds now; may be asked by any thread."""
        ...

    def full_pass(self, num_decodes: int, most: int) -> int:
        """Return how many prompt tokens, at most `most`, a step should compute beside decodes.

        If passes are padded to few sizes, a token costs least in a full pass, which has no padding.
        If a full pass has less than FULL_SHARE of `most`, return `most`. Any thread may call this.
        """
        ...

    def launch(self, step: EngineStep) -> None:
        """Begin a step; if it runs asynchronously, return before it ends.

        A step that raises has no result, and its computed values are meaningless; nothing of it
        runs any more.
        """
        ...

    def read(self) -> StepResult:
        """Wait for the oldest unread step; its pages and tokens are then final."""
        ...

    def record_next(self) -> bool:
        """Record a pass, so that none of its kind waits for that; False: none is left to record.

        For times without work: all steps are read. Computes nothing, and changes no page.
        """
        ...
