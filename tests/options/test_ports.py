"""Servers take their ports from a range, and say so when there is none left."""

import re
from contextlib import ExitStack

import pytest

from options.ports import FreePorts, NoPortFree, is_port_range
from tests.support.free_ports import HOST, free_range, listening


@pytest.mark.parametrize("value", ["", "1024-1024", "20000-20099", "1024-65535"])
def test_ranges_that_are_taken(value):
    assert is_port_range(value)


@pytest.mark.parametrize(
    "value", ["20000", "20000-", "-1-5", "20099-20000", "80-90", "1024-65536", "a-b", 20000, None]
)
def test_what_is_no_range_is_told_apart(value):
    assert not is_port_range(value)


def test_all_ports_of_a_range_are_used_once_and_then_it_is_named_as_full():
    first, text = free_range(4)
    with ExitStack() as stack:
        servers = [stack.enter_context(FreePorts(text).listen(HOST, listening)) for _ in range(4)]
        ports = sorted(server.getsockname()[1] for server in servers)
        assert ports == list(range(first, first + 4))

        with pytest.raises(NoPortFree, match=re.escape(f"port_range: found '{text}', of")):
            FreePorts(text).listen(HOST, listening)


def test_without_a_range_any_free_port_is_taken():
    with FreePorts().listen(HOST, listening) as server:
        assert server.getsockname()[1] > 0


def test_a_port_that_somebody_takes_first_is_left_out():
    _, text = free_range(3)
    tried = []

    def listen(port):
        tried.append(port)
        if len(tried) < 3:
            raise RuntimeError("Failed to bind to address")
        return port

    assert FreePorts(text).listen(HOST, listen) == tried[-1]
    assert len(set(tried)) == 3


def test_ports_that_options_give_to_a_server_are_left_to_it():
    first, text = free_range(3)
    ports = FreePorts(text, frozenset({first, first + 2}))

    with ports.listen(HOST, listening) as server:
        assert server.getsockname()[1] == first + 1
        with pytest.raises(NoPortFree):
            ports.listen(HOST, listening)
    with pytest.raises(NoPortFree):
        FreePorts(text, frozenset(range(first, first + 3))).listen(HOST, listening)


def test_ports_in_order_are_the_lowest_free_ones_and_an_error_names_their_option():
    first, text = free_range(4)
    ports = FreePorts(text, frozenset({first + 1}), option="some_ports", is_in_order=True)
    with ExitStack() as stack:
        servers = [stack.enter_context(ports.listen(HOST, listening)) for _ in range(3)]
        assert [each.getsockname()[1] - first for each in servers] == [0, 2, 3]
        with pytest.raises(NoPortFree, match=f"some_ports: found '{text}', of"):
            ports.listen(HOST, listening)
        servers[1].close()

        again = stack.enter_context(ports.listen(HOST, listening))

        assert again.getsockname()[1] == first + 2
