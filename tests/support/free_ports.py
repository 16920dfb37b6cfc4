"""Ports for what a test starts later, where the start itself cannot choose one."""

import random
import socket

# Below those that the kernel gives to connections, of which a starting Ray opens hundreds, and
# above those that Ray gives to workers.
FIRST, LAST = 20_000, 29_999


def free_port() -> int:
    """Return a port of this host that nobody listens at."""
    source = random.SystemRandom()  # processes of tests choose independently
    for _ in range(100):
        port = source.randint(FIRST, LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # somebody has it
                continue
            return port
    raise AssertionError(f"found no free port in 100 of {FIRST} to {LAST}")
