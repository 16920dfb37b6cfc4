"""The door of a router: every method of every service, on a server as its process makes one."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from credentials.secret import KEY_BYTES
from pagewire.protos import common_pb2, inference_pb2, inference_pb2_grpc
from pagewire.protos.token_ids import pack_token_ids
from pagewire.routers import token_metadata
from router import front
from router.config import RouterConfig
from router.front import make_server
from router.router import Router
from router.tenants.registry import Tenants
from tests.router.many_calls import asking, calling
from tests.router.resumed_requests import assert_refused, resuming
from tests.router.scripted_worker import ScriptedWorker, running_router, tokens
from tests.router.tenants.known import rules, tenants
from tests.support.virtual_time import run_virtual, wait_until

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
METHODS = [f"/{SERVICE.full_name}/{method.name}" for method in SERVICE.methods]
REFLECTION = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"
BAD = {
    "no token": (),
    "an empty header": (("authorization", ""),),
    "another scheme": (("authorization", "Basic YWNtZTphY21l"),),
    "no scheme": (("authorization", "acme"),),
    "a blank token": (("authorization", "Bearer "),),
    "two tokens in one": (("authorization", "Bearer acme globex"),),
    "two headers": (("authorization", "Bearer acme"), ("authorization", "Bearer globex")),
    "an unknown token": (("authorization", "Bearer acmf"),),
    "a hash for a token": (("authorization", "Bearer sha256:00"),),
    "a name in another header": (("tenant", "acme"), ("x-pagewire-tenant", "acme")),
    "a long one": (("authorization", "Bearer " + "x" * 5000),),
}


@asynccontextmanager
async def serving(known: Tenants) -> AsyncIterator[grpc.aio.Channel]:
    """A router without workers behind a real server, with all that its process registers."""
    config = RouterConfig(worker_wait_s=0.1)
    router = Router(
        config=config,
        model_dir=None,
        connect_channel=grpc.aio.insecure_channel,
        random_id=lambda: "0" * 32,
        tenants=known,
    )
    server = make_server(config, known)
    router.register(server)
    reflection.enable_server_reflection([SERVICE.full_name, reflection.SERVICE_NAME], server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)
    await router.stop(0.0)


async def answer_of(
    channel: grpc.aio.Channel,
    method: str,
    metadata: Sequence[tuple[str, str]],
    within_s: float = 10.0,
) -> tuple[grpc.StatusCode, str]:
    """Open a call and send nothing: whoever refuses it has not waited for a message."""
    call = channel.stream_stream(method)(metadata=metadata)
    try:
        async with asyncio.timeout(within_s):
            code = await call.code()
    except TimeoutError:
        call.cancel()
        return grpc.StatusCode.OK, "it waits for a request"
    return code, await call.details()


def test_no_method_is_open_without_a_token_of_a_tenant() -> None:
    async def main() -> None:
        assert len(METHODS) >= 6
        async with serving(tenants()) as channel:
            for method in (*METHODS, REFLECTION):
                for name, metadata in BAD.items():
                    code, told = await answer_of(channel, method, metadata)
                    assert code is grpc.StatusCode.UNAUTHENTICATED, (method, name, told)
                    assert "authorization: Bearer TOKEN" in told
                    assert "globex" not in told, "nobody is told who the tenants are"
            for method in (f"/{SERVICE.full_name}/Unknown", "/other.Service/Method"):
                for metadata in (*BAD.values(), token_metadata("acme")):
                    code, _ = await answer_of(channel, method, metadata)
                    assert code is grpc.StatusCode.UNIMPLEMENTED, method
            waiting = [
                answer_of(channel, method, token_metadata("acme"), within_s=0.5)
                for method in (*METHODS, REFLECTION)
            ]
            for code, told in await asyncio.gather(*waiting):
                assert code is not grpc.StatusCode.UNAUTHENTICATED, told

    asyncio.run(main())


def test_all_services_of_a_router_are_in_the_test_above_or_open_on_purpose() -> None:
    pool = descriptor_pool.Default()
    clients = set()
    for file in ("inference", "worker", "controller"):
        for service in pool.FindFileByName(
            f"pagewire/protos/{file}.proto"
        ).services_by_name.values():
            for method in service.methods:
                callers = method.GetOptions().Extensions[common_pb2.callers]
                if common_pb2.CALLER_CLIENT in callers:
                    clients.add(f"/{service.full_name}/{method.name}")

    assert clients == set(METHODS)


def test_health_is_open_and_so_is_everything_without_a_tenants_file() -> None:
    async def main() -> None:
        request = health_pb2.HealthCheckRequest()
        for known in (tenants(), Tenants()):
            async with serving(known) as channel:
                health = await health_pb2_grpc.HealthStub(channel).Check(request)
                assert health.status == health_pb2.HealthCheckResponse.SERVING
        async with serving(Tenants()) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            for metadata in BAD.values():
                answer = await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata)
                assert answer.tenant == ""

    asyncio.run(main())


def test_a_call_is_made_for_the_tenant_of_its_token() -> None:
    async def main() -> None:
        async with serving(tenants()) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            for metadata in (
                *[token_metadata(name) for name in ("acme", "globex")],
                (("authorization", "bearer  acme "),),
                (("tenant", "globex"), *token_metadata("acme")),
            ):
                answer = await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata)
                assert answer.tenant in dict(metadata)["authorization"]

    asyncio.run(main())


def test_one_tenant_cannot_hold_all_open_calls_of_a_method(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(front, "max_open_calls", lambda config: 18)

    async def main() -> None:
        async with serving(tenants()) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            held = [stub.GenerateMany(metadata=token_metadata("acme")) for _ in range(30)]
            other = stub.GenerateMany(metadata=token_metadata("globex"))
            async with asyncio.timeout(10):
                while sum(each.done() for each in held) < 14:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # in which no further one ends
            refused = [each for each in held if each.done()]
            assert len(refused) == 14
            assert "of this caller are open; what is left is for others" in (
                await refused[0].details()
            )
            assert not other.done()
            for each in (*held, other):
                each.cancel()

    asyncio.run(main())


def test_all_calls_of_a_stream_are_made_for_the_tenant_of_the_stream() -> None:
    async def main() -> None:
        known = tenants(rules("acme"), rules("globex"))
        async with running_router(ScriptedWorker("decode-0"), tenants=known) as tested:
            call = tested.stub.GenerateMany(metadata=token_metadata("acme"))
            for call_id in range(3):
                await call.write(inference_pb2.GenerateManyRequest(call_id=call_id, start=asking()))
            await call.done_writing()
            async for _ in call:
                pass
            requests = {each.name: each.counts.requests for each in known.told}
            assert requests == {"acme": 3, "globex": 0, "(cluster)": 0}

    run_virtual(main())


def test_a_token_that_is_withdrawn_starts_nothing_more_and_what_runs_goes_on() -> None:
    async def main() -> None:
        known = tenants()
        worker = ScriptedWorker("decode-0", token_s=0.1)
        async with running_router(worker, tenants=known) as tested:
            tested.stub = _WithToken(tested.stub, "acme")
            async with calling(tested) as caller:
                await caller.start(1, asking(max_tokens=10))
                await wait_until(lambda: worker.steps > 2)
                known.change([rules("globex")], 0.0)
                await caller.start(2, asking())
                await caller.read_until_ended(1, 2)
                assert caller.ends == {1: "OK", 2: "UNAUTHENTICATED"}
                assert caller.token_ids(1) == tokens(0, 10)
            refused = await tested.generate()
            assert refused.error is not None
            assert refused.error.code() is grpc.StatusCode.UNAUTHENTICATED

    run_virtual(main())


class _WithToken:
    """A stub whose calls bring a token."""

    def __init__(self, stub: Any, token: str) -> None:
        self._stub = stub
        self._token = token

    def __getattr__(self, method: str) -> Any:
        call = getattr(self._stub, method)
        return lambda *args, **options: call(
            *args, **{**options, "metadata": token_metadata(self._token)}
        )


def test_a_call_is_resumed_by_its_own_tenant_alone() -> None:
    async def main() -> None:
        known = tenants(rules("acme", cache="one"), rules("globex", cache="one"))
        worker = ScriptedWorker("decode-0")
        async with running_router(worker, tenants=known, resume_key=b"k" * KEY_BYTES) as tested:
            had = (await tested.generate(request=asking(), token="acme")).messages[:2]
            stub = tested.stub
            tested.stub = _WithToken(stub, "globex")
            told = await assert_refused(tested, resuming(asking(), had), "resume.token")
            assert "tenant" in told
            tested.stub = _WithToken(stub, "acme")
            assert (await tested.generate(request=resuming(asking(), had))).error is None

    run_virtual(main())


def test_pages_of_a_tenant_have_a_name_of_their_own_unless_it_shares() -> None:
    async def main() -> None:
        known = tenants(
            *(rules(name) for name in ("acme", "globex", "one")),
            *(rules(name, cache="one") for name in ("x", "y")),
        )
        worker = ScriptedWorker("decode-0")
        prompt = pack_token_ids(range(5, 60))
        async with running_router(worker, tenants=known) as tested:
            for name in ("acme", "globex", "one", "x", "y", "acme"):
                request = inference_pb2.GenerateRequest(
                    token_ids=prompt, sampling=common_pb2.SamplingParams(max_tokens=1)
                )
                assert (await tested.generate(request=request, token=name)).error is None
            acme, globex, one, x, y, again = (each.cache_salt for each in worker.submits)

        assert acme == again
        assert x == y
        assert len({acme, globex, one, x}) == 4

    run_virtual(main())
