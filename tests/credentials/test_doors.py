"""Every method of every server in a cluster: who gets in, and who does not.

The methods come from the descriptors of the contract, the servers are those that actors start.
"""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import worker.process
from credentials.cluster import Callee
from credentials.gate import ANSWER_KEY, CALL_KEY
from credentials.party import Party, Role
from credentials.rules import WORKER_CALLERS
from credentials.secret import ClusterSecret, calling_key
from decode_worker import server as decode_server
from decode_worker.config import DecodeConfig
from decode_worker.worker import DecodeWorker
from pagewire.protos import inference_pb2, worker_pb2
from prefill_worker import server as prefill_server
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker
from tests.decode_worker.harness import MODEL, PAGE_SIZE
from tests.router.scripted_worker import running_router
from tests.support.cluster_keys import SECRET
from tests.support.fake_engine import FakeEngine
from tests.support.ipv6 import needs_ipv6
from tests.support.virtual_time import run_virtual
from worker.identity import ModelInfo
from worker.process import WorkerProcess
from worker.server import WORKER_SERVICE
from worker.settings import WorkerSettings

SETTINGS = WorkerSettings(
    worker_id="",
    model_dir=Path(),
    served_model_name="tiny",
    device="cpu",
    dtype="auto",
    page_size=PAGE_SIZE,
    num_pages=64,
    num_seats=8,
    gpu_memory_fraction=0.85,
    workers_per_gpu=1,
    cpu_pages_bytes=2**20,
    cpu_threads=1,
    host="127.0.0.1",
    log_level="warning",
    log_format="text",
)
SERVICES = {
    "prefill": (prefill_server.SERVICE, WORKER_SERVICE),
    "decode": (decode_server.SERVICE, WORKER_SERVICE),
}
OTHER_SECRET = ClusterSecret(b"o" * 32)
UNKNOWN = "/pagewire.v1.WorkerService/Unknown"


def methods_of(pool: Role) -> list[str]:
    """All methods of a pool's services."""
    return [m for m in WORKER_CALLERS if m.strip("/").partition("/")[0] in SERVICES[pool]]


def test_the_descriptors_name_methods_of_both_pools() -> None:
    assert (len(methods_of("prefill")), len(methods_of("decode"))) == (5, 5)
    of_file = worker_pb2.DESCRIPTOR.services_by_name.values()
    assert len(WORKER_CALLERS) == sum(len(service.methods) for service in of_file)
    assert all(WORKER_CALLERS.values()), "somebody may call each"


@asynccontextmanager
async def a_worker(
    pool: Role, monkeypatch: pytest.MonkeyPatch, host: str = "127.0.0.1"
) -> AsyncIterator[WorkerProcess]:
    """A worker's process as its actor starts it, around a fake engine."""
    engine = FakeEngine(MODEL, num_pages=64, page_size=PAGE_SIZE)
    model = ModelInfo(
        name="tiny", fingerprint="f", vocab_size=1000, max_context_tokens=64, eos_token_ids=(0,)
    )
    monkeypatch.setattr(worker.process, "_load", lambda *_: (engine, model))

    def make_pool(context: Any) -> Any:
        if pool == "prefill":
            return PrefillWorker(context)
        return DecodeWorker(
            context, connect_channel=grpc.aio.insecure_channel, random_id=lambda: bytes(16)
        )

    async def announce(identity: Any, is_leaving) -> None:
        pass

    process = WorkerProcess(
        replace(SETTINGS, worker_id=f"{pool}-0", host=host),
        PrefillConfig() if pool == "prefill" else DecodeConfig(),
        SECRET.keys_of(pool, f"{pool}-0"),
        announce=announce,
        report_loaded=lambda *_: None,
    )
    await process.start(make_pool)
    try:
        yield process
    finally:
        await process.stop(0.0)


async def outcome(channel: Any, method: str, header: bytes | None, *, sends: bool = False) -> str:
    """Open a call and return the name of its status; by default it sends no message at all."""
    metadata = () if header is None else ((CALL_KEY, header),)
    call = channel.stream_stream(method)(metadata=metadata, timeout=5.0)
    if sends:
        await call.write(b"")
    if ANSWER_KEY in await call.initial_metadata():
        call.cancel()
        return "let in"
    return (await call.code()).name


NUMBERS = itertools.count()


def prove(
    method: str, callee: Party, role: Role, *, secret: ClusterSecret = SECRET, name: str = "x-0"
) -> bytes:
    """Make the header of a call, also of those that no genuine process makes."""
    key = calling_key(secret.keys_of(callee.role, callee.name).accepting, role, name)
    caller = Party(role=role, name=name, incarnation=3)
    return Callee(callee, caller=caller, key=key, numbers=NUMBERS).prove(method)[0]


def forgeries(method: str, me: Party) -> dict[str, tuple[bytes | None, str]]:
    """What a stranger, or a member that may not, can send: name |-> (header, status)."""
    role: Role = "decode" if "PrefillService" in method else "router"
    other_role: Role = "router" if role == "decode" else "decode"
    header = prove(method, me, role)
    return {
        "nothing": (None, "UNAUTHENTICATED"),
        "an empty header": (b"", "UNAUTHENTICATED"),
        "another secret": (prove(method, me, role, secret=OTHER_SECRET), "UNAUTHENTICATED"),
        "another role": (prove(method, me, other_role), "PERMISSION_DENIED"),
        "another start": (
            prove(method, replace(me, incarnation=me.incarnation ^ 1), role),
            "FAILED_PRECONDITION",
        ),
        "another worker": (
            prove(method, replace(me, name=f"{me.role}-7"), role),
            "UNAUTHENTICATED",
        ),
        "another method": (prove(method + "x", me, role), "UNAUTHENTICATED"),
        "cut off": (header[:-1], "UNAUTHENTICATED"),
        "cut short": (header[:10], "UNAUTHENTICATED"),
        "garbled": (header[:30] + bytes([header[30] ^ 1]) + header[31:], "UNAUTHENTICATED"),
        "noise": (bytes(range(100)), "UNAUTHENTICATED"),
    }


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_no_method_of_a_worker_answers_anybody_but_its_callers(
    pool: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with a_worker(pool, monkeypatch) as process:
            assert process.identity
            me = process.identity.as_party(pool)
            async with grpc.aio.insecure_channel(process.identity.address) as channel:
                seen, expected = {}, {}
                for method in methods_of(pool):
                    for name, (header, status) in forgeries(method, me).items():
                        seen[method, name] = await outcome(channel, method, header)
                        expected[method, name] = status
                assert seen == expected
                for header in (None, prove(UNKNOWN, me, "router")):
                    assert await outcome(channel, UNKNOWN, header) == "UNIMPLEMENTED"
                for method in methods_of(pool):
                    [role] = WORKER_CALLERS[method]
                    header = prove(method, me, role)
                    assert await outcome(channel, method, header, sends=True) == "let in"
                    assert await outcome(channel, method, header) == "UNAUTHENTICATED", "a replay"

    asyncio.run(main())


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_only_health_answers_anybody(pool: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with a_worker(pool, monkeypatch) as process:
            assert process.identity
            address = process.identity.address
            async with grpc.aio.insecure_channel(address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                check = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5.0)
                reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
                assert await outcome(channel, reflection, None) == "UNIMPLEMENTED"
        assert check.status == health_pb2.HealthCheckResponse.SERVING

    asyncio.run(main())


@needs_ipv6
def test_a_worker_that_listens_on_ipv6_tells_an_address_to_connect_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with a_worker("decode", monkeypatch, host="::1") as process:
            assert process.identity
            address = process.identity.address
            assert re.fullmatch(r"\[::1\]:\d+", address)
            async with grpc.aio.insecure_channel(address) as channel:
                method = methods_of("decode")[0]
                header = prove(method, process.identity.as_party("decode"), "router")
                assert await outcome(channel, method, header, sends=True) == "let in"

    asyncio.run(main())


def test_a_router_serves_clients_and_nothing_of_the_workers() -> None:
    async def main() -> None:
        async with running_router() as tested:
            channel = tested.network.channel("router:1")
            for method in WORKER_CALLERS:
                assert await outcome(channel, method, None) == "UNIMPLEMENTED"
            [service] = inference_pb2.DESCRIPTOR.services_by_name.values()
            registered = {method.rpartition("/")[0] for method in tested.server._handlers}
            assert registered == {f"/{service.full_name}", "/grpc.health.v1.Health"}

    run_virtual(main())
