"""The child process of a router around its work; see child_pool.py.

Standard input is a socket to the router. Each message on it is a JSON object after its length, four
bytes big-endian. The first one carries the settings, with the limits; its answer is {} once the
child is ready. The answer to each later one is the result of the work, or

    {"exceeded": ...}  it exceeded a limit; the process ends

Work that exceeds its processor time ends the process by a signal. The process also ends with its
router: the socket closes, and running work has its time limit.
"""

import json
import os
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

LENGTH_BYTES = 4
NICENESS = 10  # the router's own event loop goes first

Answer = dict[str, str]
Work = Callable[[Any], Answer]


def serve(make_work: Callable[[Any], tuple[Callable[[], Answer], Work]]) -> None:
    """Serve the socket that is standard input until it ends.

    Args:
        make_work: Takes the settings, without limits; returns a function that gets ready within
            the limits, and one that answers a message.
    """
    router = socket.socket(fileno=0)
    with suppress(BrokenPipeError, ConnectionResetError, EOFError):
        settings = _receive(router)
        get_ready, work = make_work(settings)
        _give_up_rights()
        _limit_memory(settings["memory_bytes"])
        answer = _limited(settings, get_ready)
        _send(router, answer)
        while "exceeded" not in answer:
            question = _receive(router)
            answer = _limited(settings, partial(work, question))
            _send(router, answer)


def _limited(settings: dict[str, Any], work: Callable[[], Answer]) -> Answer:
    # The default action of the signal is the process's end, also in the middle of one long
    # operation, where no Python code runs.
    signal.setitimer(signal.ITIMER_PROF, settings["cpu_s"])
    try:
        return work()
    except MemoryError:
        return {"exceeded": f"needed more than {settings['memory_bytes'] >> 20} MiB of memory"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _give_up_rights() -> None:
    os.nice(NICENESS)
    # No core dump with prompts in it, no file written, no other process.
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (0, 0))


def _limit_memory(num_bytes: int) -> None:
    """Let the process take this much more memory than it has now."""
    with open("/proc/self/statm") as file:
        num_pages = int(file.read().split()[0])
    limit = num_pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _receive(router: socket.socket) -> Any:
    length = int.from_bytes(_read(router, LENGTH_BYTES), "big")
    return json.loads(_read(router, length))


def _read(router: socket.socket, num_bytes: int) -> bytes:
    parts = []
    while num_bytes:
        part = router.recv(min(num_bytes, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def _send(router: socket.socket, answer: Answer) -> None:
    # Invalid text can only occur in an error's message; JSON can write it as escapes.
    encoded = json.dumps(answer, ensure_ascii=False).encode(errors="backslashreplace")
    router.sendall(len(encoded).to_bytes(LENGTH_BYTES, "big") + encoded)
