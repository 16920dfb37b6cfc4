"""Ports for what a test starts later, where the start itself cannot choose one."""

import random
import socket
from contextlib import ExitStack

# Below those that the kernel gives to connections, of which a starting Ray opens hundreds, and
# above those that Ray gives to workers.
FIRST, LAST = 20_000, 29_999
HOST = "127.0.0.1"


def free_port() -> int:
    """Return a port of this host on which nobody listens."""
    source = random.SystemRandom()  # processes of tests choose independently
    for _ in range(100):
        port = source.randint(FIRST, LAST)
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:  # somebody has it
                continue
            return port
    raise AssertionError(f"found no free port in 100 of {FIRST} to {LAST}")


def listening(port: int) -> socket.socket:
    """Return a socket that listens on a port of this host."""
    return socket.create_server((HOST, port))


def free_range(num_ports: int) -> tuple[int, str]:
    """Return consecutive ports on which nobody listens: the first, and the text of an option."""
    source = random.SystemRandom()
    for _ in range(100):
        first = source.randint(FIRST, LAST - num_ports)
        with ExitStack() as stack:
            try:
                for port in range(first, first + num_ports):
                    stack.enter_context(listening(port))
            except OSError:
                continue
        return first, f"{first}-{first + num_ports - 1}"
    raise AssertionError(f"found no {num_ports} free ports in 100 of {FIRST} to {LAST}")
