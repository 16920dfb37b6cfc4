"""Passes a gateway's listening socket to its successor, another process of this user and host.

Both then accept from one queue, so the first can close its copy while clients connect. A second
socket at the same port (SO_REUSEPORT) would have a queue of its own, and the kernel resets those
that wait in the queue of a socket that is closed.

The successor makes a unix socket that only this user can reach, and asks for the listener there.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from tempfile import TemporaryDirectory

PASS_S = 10.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid, as SO_PEERCRED gives them


class NotPassedOn(Exception):
    """A listening socket has not come from another gateway, or is not given to somebody else."""


async def receive_listener(ask: Callable[[str], Awaitable[None]]) -> socket.socket:
    """Return a copy of another gateway's listening socket.

    Args:
        ask: Has the other gateway call `send_listener` with a path, and waits until it has.

    Raises:
        NotPassedOn: It did not answer in time, or another user did.
        OSError: /tmp cannot be written.
        Exception: What `ask` raises.
    """
    with (  # a short path: those of unix sockets have at most 107 bytes
        TemporaryDirectory(prefix="pagewire-", dir="/tmp") as folder,
        socket.socket(socket.AF_UNIX) as meeting,
    ):
        meeting.setblocking(False)
        path = f"{folder}/listener"
        meeting.bind(path)
        meeting.listen()
        try:
            await asyncio.wait_for(ask(path), PASS_S)
        except TimeoutError:
            told = f"the gateway that serves did not pass on its listener within {PASS_S:g} s"
            raise NotPassedOn(told) from None
        other, _ = meeting.accept()  # it has come, and all that it sent
        with other:
            _check_user(other)
            _, [listener], _, _ = socket.recv_fds(other, 1, 1)
    os.set_inheritable(listener, False)
    return socket.socket(fileno=listener)


def send_listener(listener: socket.socket, path: str) -> None:
    """Send a copy of a listening socket to who waits in `receive_listener`.

    Raises:
        NotPassedOn: Another user waits there.
        OSError: Nobody waits there, or the listener is closed.
    """
    with socket.socket(socket.AF_UNIX) as successor:
        successor.setblocking(False)
        successor.connect(path)
        _check_user(successor)
        socket.send_fds(successor, [b"\0"], [listener.fileno()])


def _check_user(other: socket.socket) -> None:
    credentials = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        raise NotPassedOn(f"user of the other gateway: found {user}; allowed: {os.geteuid()}")
