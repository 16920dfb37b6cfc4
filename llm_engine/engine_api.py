"""The engine as step loops see it; implemented by `engine.Engine`, and by a fake one in tests."""

from typing import Protocol

from kv_cache.layout import KVLayout
from kv_cache.page_storage import PageStorage
from llm_engine.engine_step import EngineStep, StepResult

# Why a request fails for which nothing was drawn
UNDRAWN = "no token can be drawn for it: the largest logit that may be is NaN or infinite"


class EngineLike(Protocol):
    """Computes steps over pages; used by one thread at a time.

    Steps run in the order in which they are launched, and `read` returns their results in it.
    """

    @property
    def layout(self) -> KVLayout: ...

    @property
    def storage(self) -> PageStorage: ...

    @property
    def max_launched(self) -> int:
        """Steps that may be launched and not read: 2 where they run beside the host, else 1."""
        ...

    def launch(self, step: EngineStep) -> None:
        """Begin a step; where it runs beside the host, return before it ends.

        A step that raises has no result, and what it computed has no meaning.
        """
        ...

    def read(self) -> StepResult:
        """Wait for the oldest step that was not read; its pages and tokens are final then."""
        ...
