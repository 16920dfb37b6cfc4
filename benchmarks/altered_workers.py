"""Workers that lack a part, start from another state or time what they do, for measurements.

The product has no switches for them. Each alteration replaces a function in the process of a worker
before it starts, and a run with altered workers must show in its counts that the alteration works.
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock


@dataclass(frozen=True, kw_only=True, slots=True)
class Alteration:
    """Differences from the product; none by default."""

    reads_again: bool = False  # each request reads its prefix for itself: no cascade
    moves_again: bool = False  # decode workers ask for all pages of a prompt: no delta
    scatters_pages: bool = False  # pages of a prompt lie far apart in the pools of both sides
    lives_apart: bool = False  # NCCL takes each worker's host for another one
    times_steps_to: str = ""  # a folder for files of steps' times
    times_moves_to: str = ""  # a folder for files of received chunks' times

    def apply(self) -> None:
        """Alter this process."""
        if self.reads_again:
            read_again()
        if self.moves_again:
            move_again()
        if self.scatters_pages:
            scatter_pages()
        if self.lives_apart:
            live_apart()
        if self.times_steps_to:
            from benchmarks.step_times import time_steps

            time_steps(Path(self.times_steps_to))
        if self.times_moves_to:
            from benchmarks.move_times import time_moves

            time_moves(Path(self.times_moves_to))

    @contextmanager
    def in_launcher(self) -> Iterator[None]:
        """Make clusters that this process starts meanwhile use altered workers."""
        if self == Alteration():
            yield
            return
        from cluster import placement
        from decode_worker.actor import DecodeActor
        from prefill_worker.actor import PrefillActor

        of_prefill = replace(self, reads_again=False, moves_again=False)
        with mock.patch.multiple(
            placement,
            DecodeActor=altered(DecodeActor, self),
            PrefillActor=altered(PrefillActor, of_prefill),
        ):
            yield


# Of a prompt that is asked for again, all pages move each time, between any two places.
ALL_MOVE = Alteration(moves_again=True, scatters_pages=True)


def altered(actor: type, alteration: Alteration) -> type:
    """Return an actor class whose process is altered before the engine is loaded."""

    class Altered(actor):  # type: ignore[misc] # whichever it is
        async def __init__(self, start: Any) -> None:  # type: ignore[misc] # Ray awaits it
            alteration.apply()
            await super().__init__(start)

    Altered.__name__ = Altered.__qualname__ = f"Altered{actor.__name__}"
    return Altered


def read_again() -> None:
    """Let decode attention be flat (docs/decisions/0009)."""
    from llm_engine import decode_triton

    decode_triton.reads_prefixes_once = lambda pages, sliding_window: False


def move_again() -> None:
    """Let prompts find nothing in the cache; equal pages still become one after they arrive."""
    from kv_cache.prefix_cache import PrefixCache

    PrefixCache._match_path = lambda self, page_tokens, num_tokens, salt: []  # type: ignore[method-assign]


def scatter_pages() -> None:
    """Let new pools hand out their pages in random order, as after long service."""
    from kv_cache.page_pool import PagePool

    make = PagePool.__init__

    def make_and_shuffle(self: PagePool, num_pages: int) -> None:
        make(self, num_pages)
        random.Random(num_pages).shuffle(self._free)  # noqa: S311 - nothing secret

    PagePool.__init__ = make_and_shuffle  # type: ignore[method-assign]


def live_apart() -> None:
    """Let NCCL use sockets, as between hosts; only so can two workers on one GPU connect."""
    os.environ.update(NCCL_HOSTID=f"host of {os.getpid()}")
