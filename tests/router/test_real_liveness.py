"""Which workers count as alive over real gRPC: what the pretended network takes for granted."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc

from pagewire.protos.grpc_options import (
    PING_AFTER_MS,
    PING_TIMEOUT_MS,
    WORKER_CHANNEL_OPTIONS,
    WORKER_SERVER_OPTIONS,
)
from router.config import RouterConfig
from router.membership import WorkerMember
from router.prefix_index import PrefixIndex
from router.worker_registry import WorkerRegistry
from tests.support.wall_clock import assert_within

PING_S = (PING_AFTER_MS + PING_TIMEOUT_MS) / 1000
# Each line of its input is a time for which its event loop is held up, most of it within calls that
# do not let go of Python's lock.
WORKER = """
import asyncio, sys, threading, time
import grpc
from pagewire.protos import worker_pb2_grpc
from pagewire.protos.grpc_options import WORKER_SERVER_OPTIONS
from tests.router.scripted_worker import ScriptedWorker

def hold_up(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10**7))
    print("held up", flush=True)

def listen(loop):
    for line in sys.stdin:
        loop.call_soon_threadsafe(hold_up, float(line))

async def serve():
    server = grpc.aio.server(options=WORKER_SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(ScriptedWorker("decode-0"), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    loop = asyncio.get_running_loop()
    threading.Thread(target=listen, args=(loop,), daemon=True).start()
    await server.wait_for_termination()

asyncio.run(serve())
"""
# Its input is an address. It opens a stream and says nothing on it.
CALLER = """
import asyncio
import grpc
from pagewire.protos.grpc_options import WORKER_CHANNEL_OPTIONS

async def call():
    async with grpc.aio.insecure_channel(input(), options=WORKER_CHANNEL_OPTIONS) as channel:
        await channel.stream_stream("/test/Listen")().read()

asyncio.run(call())
"""


def test_a_worker_lives_while_its_event_loop_is_late_and_not_when_its_process_hangs() -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
    ) as process:
        try:
            asyncio.run(scenario(process))
        finally:
            process.kill()


async def scenario(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    lost: list[str] = []
    registry = WorkerRegistry(
        config=RouterConfig(),
        tokenizer_digest="",
        connect_channel=lambda member: grpc.aio.insecure_channel(
            member.address, options=WORKER_CHANNEL_OPTIONS
        ),
        index=PrefixIndex(max_pages=10),
        on_lost=lambda worker, reason: lost.append(reason),
    )
    port = (await asyncio.to_thread(process.stdout.readline)).strip()
    member = WorkerMember(
        worker_id="decode-0", incarnation=1, address=f"127.0.0.1:{port}", pool="decode"
    )
    registry.set_members([member])
    await until(registry, "READY", 10)

    process.stdin.write(f"{PING_S + 1.5}\n")
    process.stdin.flush()
    assert await asyncio.to_thread(process.stdout.readline) == "held up\n"
    assert lost == []
    assert registry.get("decode-0").state == "READY"

    os.kill(process.pid, signal.SIGSTOP)
    stopped_at = time.monotonic()
    await until(registry, "DEAD", 12)
    assert_within(time.monotonic() - stopped_at, 3 * PING_S)  # silence alone would take longer
    assert len(lost) == 1
    assert "ping timeout" in lost[0]
    os.kill(process.pid, signal.SIGCONT)
    await until(registry, "READY", 15)
    await registry.stop()


def test_a_worker_loses_the_stream_of_a_caller_whose_process_hangs() -> None:
    """The pages that it holds for a decode worker are then free."""
    with subprocess.Popen(
        [sys.executable, "-c", CALLER],
        stdin=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        try:
            seconds = asyncio.run(asyncio.wait_for(seconds_until_lost(process), 60))
        finally:
            process.kill()
    assert_within(seconds, 3 * PING_S)


async def seconds_until_lost(caller: "subprocess.Popen[str]") -> float:
    """Stop a caller's process, and return after how long its call ended."""
    assert caller.stdin is not None
    called, lost = asyncio.Event(), asyncio.Event()

    async def listen(requests: object, context: object) -> None:
        called.set()
        try:
            await asyncio.Event().wait()
        finally:
            lost.set()

    server = grpc.aio.server(options=WORKER_SERVER_OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(listen)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test", {"Listen": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        caller.stdin.write(f"127.0.0.1:{port}\n")
        caller.stdin.flush()
        await called.wait()
        os.kill(caller.pid, signal.SIGSTOP)
        stopped_at = time.monotonic()
        await lost.wait()
        return time.monotonic() - stopped_at
    finally:
        await server.stop(None)


async def until(registry: WorkerRegistry, state: str, seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while registry.get("decode-0").state != state:
            await asyncio.sleep(0.05)
