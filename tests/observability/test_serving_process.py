import gc
import sys
import time
import weakref
from contextlib import suppress

import psutil
import pytest

from observability.serving_process import (
    SWITCH_S,
    YOUNG_OBJECTS,
    process_age_s,
    settle_process,
    without_collections,
)

pytestmark = pytest.mark.usefixtures("freezing")


class Node:
    """Part of a cycle."""

    def __init__(self) -> None:
        self.me = self


def test_what_lives_is_frozen_and_new_garbage_is_still_collected() -> None:
    living = Node()
    old = weakref.ref(living)
    settle_process()
    del living
    gc.collect()
    node = weakref.ref(Node())

    assert old() is not None
    assert node() is not None
    _kept = [[] for _ in range(2 * YOUNG_OBJECTS)]
    assert node() is None, "a collection began by itself"


def test_nothing_is_collected_during_imports_and_then_only_what_is_new() -> None:
    with suppress(ImportError), without_collections():
        assert not gc.isenabled()
        imported = weakref.ref(Node())
        raise ImportError("no torch")
    later = weakref.ref(Node())

    assert gc.isenabled()
    gc.collect()
    assert imported() is not None
    assert later() is None


def test_threads_take_turns_more_often() -> None:
    settle_process()

    assert sys.getswitchinterval() == SWITCH_S < 0.005


def test_the_age_of_a_process_is_that_which_the_system_knows() -> None:
    since_creation_s = time.time() - psutil.Process().create_time()
    # psutil has the time of the boot in whole seconds, rounded down.
    assert -0.1 < since_creation_s - process_age_s() < 1.1
