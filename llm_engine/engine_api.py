"""The engine as step loops see it; implemented by `engine.Engine`, `fake_engine.FakeEngine`."""

from collections.abc import Sequence
from typing import Protocol

from kv_cache.layout import KVLayout
from kv_cache.page_storage import PageStorage
from llm_engine.sampling import Drawn, SequenceSlice

# Why a request fails for which nothing was drawn
UNDRAWN = "no token can be drawn for it: the model's largest logit is NaN or infinite"


class EngineLike(Protocol):
    """Computes slices of sequences over pages; used by one thread at a time."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def storage(self) -> PageStorage: ...

    def forward(self, slices: Sequence[SequenceSlice]) -> list[Drawn]:
        """Compute the slices in one pass and draw; blocks until pages and tokens are final.

        Returns what was drawn after each slice, in order. A slice may read pages that another slice
        of the same batch shares, but no two slices write the same page.
        """
        ...


class EngineExecutor(Protocol):
    """Runs an engine beside the event loop: in a thread in service, in virtual time in tests."""

    @property
    def engine(self) -> EngineLike: ...

    async def forward(self, slices: Sequence[SequenceSlice]) -> list[Drawn]: ...

    async def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages (source, target) in order."""
        ...
