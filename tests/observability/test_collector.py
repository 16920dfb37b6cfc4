import gc
import weakref
from collections.abc import Iterator

import pytest

from observability.collector import YOUNG_OBJECTS, settle_collector


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Leave the collector as it was."""
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    gc.unfreeze()


class Node:
    """Part of a cycle."""

    def __init__(self) -> None:
        self.me = self


def test_what_lives_is_frozen_and_new_garbage_is_still_collected() -> None:
    settle_collector()
    node = weakref.ref(Node())

    assert gc.get_freeze_count() > 1000
    assert node() is not None
    _kept = [[] for _ in range(2 * YOUNG_OBJECTS)]
    assert node() is None, "a collection began by itself"
