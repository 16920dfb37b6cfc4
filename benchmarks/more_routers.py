"""Routers beside a cluster's own, each in a process of its own, as `pagewire router` runs them."""

import asyncio
import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection

from router.process import RouterProcess
from router.settings import RouterSettings

START_TIMEOUT_S = 60.0


@contextmanager
def more_routers(count: int, settings: RouterSettings, controller: str) -> Iterator[list[str]]:
    """Run routers; yields their addresses.

    Args:
        count: How many.
        settings: Of each; its port is not used.
        controller: Address of the cluster's controller.

    Raises:
        TimeoutError: One has not started in time.
    """
    context = multiprocessing.get_context("spawn")
    started = []
    try:
        for number in range(1, count + 1):
            config = replace(settings.config, router_id=f"router-{number}")
            pipe, theirs = context.Pipe()
            own = replace(settings, config=config, port=0)
            process = context.Process(target=_run, args=(own, controller, theirs), daemon=True)
            process.start()
            theirs.close()
            started.append((process, pipe))
        yield [_address(pipe) for _, pipe in started]
    finally:
        for process, _ in started:
            process.kill()
            process.join()


def _address(pipe: Connection) -> str:
    if not pipe.poll(START_TIMEOUT_S):
        raise TimeoutError(f"a router did not start within {START_TIMEOUT_S:.0f} s")
    return str(pipe.recv())


def _run(settings: RouterSettings, controller: str, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle

    async def find_controller() -> str:
        return controller

    async def serve() -> None:
        process = RouterProcess(settings, find_controller)
        pipe.send(await process.start())
        await asyncio.Event().wait()

    asyncio.run(serve())
