"""What holds for every test."""

import gc
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from cluster.environment import prepare_ray

# A shell starts what runs in the background with SIGINT ignored, and processes inherit that: those
# that tests start would not notice the one they are sent.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy host may stop any example for longer than Hypothesis allows one to take.
settings.register_profile("pagewire", deadline=None)
settings.load_profile("pagewire")

# Tests that import Ray are collected before those that start it.
prepare_ray(is_local=True)

THOROUGH_TIMEOUT_S = 600
SETTINGS = gc.get_freeze_count(), gc.get_threshold(), sys.getswitchinterval()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Undo what `settle_process` does to the process in which a test serves.

    Otherwise what was frozen is never collected: a worker in a cycle keeps its weights and pages.
    """
    yield
    frozen, threshold, interval = SETTINGS
    if gc.get_freeze_count() > frozen:
        gc.unfreeze()
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval)
        gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the collector of cyclic garbage from imports, whose many objects stay."""
    gc.disable()
    yield
    gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give thorough tests time, and keep tests that share a fixture in one process.

    Each other process would make the fixture again.
    """
    if item.get_closest_marker("thorough") and not item.get_closest_marker("timeout"):
        item.add_marker(pytest.mark.timeout(THOROUGH_TIMEOUT_S))
    if isinstance(item, pytest.Function) and not item.get_closest_marker("xdist_group"):
        made = item._fixtureinfo.name2fixturedefs.values()
        if any(each[-1].scope == "module" for each in made):
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))


def pytest_collection_finish() -> None:
    """Keep Hypothesis from drawing the constants that it finds in this project's modules.

    A derandomized test would have other examples after any edit, and beside other tests.
    """
    if providers := sys.modules.get("hypothesis.internal.conjecture.providers"):
        assert hasattr(providers, "is_local_module_file"), "Hypothesis finds constants elsewhere"
        providers.is_local_module_file = lambda path: False


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a pytest-xdist that ignores groups, as 3.8.0 does with pytest 9.2."""
    is_apart = item.get_closest_marker("xdist_group") and "@" not in item.nodeid.rpartition("]")[2]
    if is_apart and getattr(item.config.option, "loadgroup", False):
        pytest.fail("pytest-xdist does not keep a group in one process; see pyproject.toml")
