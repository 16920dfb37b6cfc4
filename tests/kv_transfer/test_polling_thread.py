"""The thread that polls answers every command, also those that come after its end."""

import threading
import weakref
from collections.abc import Iterator

import pytest

from kv_transfer.errors import ConnectionBroken
from kv_transfer.polling_thread import PollingThread, Steps

TIMEOUT_S = 10.0


@pytest.fixture
def thread() -> Iterator[PollingThread]:
    thread = PollingThread("test")
    yield thread
    thread.close(TIMEOUT_S)


def forever() -> Steps[None]:
    while True:
        yield


def test_operations_end_with_the_thread(thread: PollingThread) -> None:
    operation = thread.submit("owner", forever())
    thread.close(TIMEOUT_S)
    with pytest.raises(ConnectionBroken):
        operation.result(TIMEOUT_S)


def test_what_comes_after_the_end_is_answered_at_once(thread: PollingThread) -> None:
    thread.close(TIMEOUT_S)
    with pytest.raises(ConnectionBroken):
        thread.submit("owner", forever()).result(TIMEOUT_S)
    thread.drop("owner").result(TIMEOUT_S)


def test_what_comes_while_the_thread_ends_is_answered(thread: PollingThread) -> None:
    runs, is_ending, may_end = threading.Event(), threading.Event(), threading.Event()

    def slow_to_end() -> Steps[None]:
        try:
            while True:
                runs.set()
                yield
        finally:
            is_ending.set()
            may_end.wait(TIMEOUT_S)

    thread.submit("first", slow_to_end())
    assert runs.wait(TIMEOUT_S)
    closing = threading.Thread(target=thread.close, args=(TIMEOUT_S,))
    closing.start()
    assert is_ending.wait(TIMEOUT_S)
    operation, dropped = thread.submit("second", forever()), thread.drop("first")
    assert not dropped.done(), "the thread is in an operation of this owner"
    may_end.set()
    with pytest.raises(ConnectionBroken):
        operation.result(TIMEOUT_S)
    dropped.result(TIMEOUT_S)
    closing.join(TIMEOUT_S)


class _Slab:
    """Stands for memory of the device."""


def test_an_error_keeps_nothing_of_its_operation_alive(thread: PollingThread) -> None:
    slabs: list[weakref.ref[_Slab]] = []

    def failing() -> Steps[None]:
        slab = _Slab()
        slabs.append(weakref.ref(slab))
        yield
        raise ConnectionBroken("the peer is gone")

    error = thread.submit("owner", failing()).exception(TIMEOUT_S)

    assert isinstance(error, ConnectionBroken)
    assert slabs[0]() is None
