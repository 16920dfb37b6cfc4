"""What holds for every test."""

import gc
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from cluster.environment import prepare_ray
from observability.serving_process import without_collections

if TYPE_CHECKING:
    from tests.support.certificates import Authority

# Failed asserts in what tests import from beside them show their values, too.
PACKAGES = [each.parent.name for each in Path(__file__).parent.glob("*/__init__.py")]
pytest.register_assert_rewrite(*(f"tests.{each}" for each in PACKAGES))

# A shell starts what runs in the background with SIGINT ignored, and processes inherit that: those
# that tests start would not notice the one they are sent.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy host may stop any example for longer than Hypothesis allows one to take.
settings.register_profile("pagewire", deadline=None)
settings.load_profile("pagewire")

# Keep Hypothesis from drawing the constants that it finds in this project's modules: with them, any
# edit would give a derandomized test other examples. It looks for them when tests are collected.
assert hasattr(providers, "is_local_module_file"), "Hypothesis finds constants elsewhere"
providers.is_local_module_file = lambda path: False

# Tests that import Ray are collected before those that start it.
prepare_ray(is_local=True)

THOROUGH_TIMEOUT_S = 600
THRESHOLD, SWITCH_S = gc.get_threshold(), sys.getswitchinterval()
FREEZE = gc.freeze


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Freeze what imports have made, or each full collection of garbage would take a second.

    Later nothing is frozen, though `settle_process` asks for it where a test serves: a worker in a
    cycle would keep its weights and pages.
    """
    with without_collections():
        yield
    gc.freeze = lambda: None


@pytest.fixture
def authority(tmp_path: Path) -> "Authority":
    """An authority whose files are the test's own."""
    from tests.support.certificates import Authority  # most tests run without its library

    return Authority(tmp_path)


@pytest.fixture
def freezing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test freeze what lives, for good, once the garbage of other tests is collected."""
    gc.collect()
    monkeypatch.setattr(gc, "freeze", FREEZE)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Undo what else `settle_process` does to the process in which a test serves."""
    yield
    gc.set_threshold(*THRESHOLD)
    sys.setswitchinterval(SWITCH_S)


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


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a pytest-xdist that ignores groups, as 3.8.0 does with pytest 9.2."""
    is_apart = item.get_closest_marker("xdist_group") and "@" not in item.nodeid.rpartition("]")[2]
    if is_apart and getattr(item.config.option, "loadgroup", False):
        pytest.fail("pytest-xdist does not keep a group in one process; see pyproject.toml")
