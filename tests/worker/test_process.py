"""A worker in its process: a real engine behind real gRPC, and the end when that engine is lost."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from grammars.tokenizer_file import tokenizer_digest
from llm_engine.sampling import SamplingParams
from pagewire.protos import worker_pb2, worker_pb2_grpc
from pagewire.protos.token_ids import pack_token_ids
from protos.contract import CONTRACT_VERSION
from router.wire import get_info
from tests.cluster.in_process import start_worker
from tests.support.checkpoints import write_checkpoint
from tests.support.cluster_keys import credentials_of, proven
from tests.support.virtual_executor import AcceleratorError
from worker.process import _device_type
from worker.wire import sampling_to_proto


@pytest.mark.parametrize("hangs", [False, True])
def test_a_process_whose_engine_is_lost_says_so_to_its_callers_and_then_to_its_actor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    write_checkpoint(tmp_path)
    is_over = threading.Event()

    async def scenario() -> None:
        members: list[Any] = []
        process = await start_worker(tmp_path, "decode-0", members)
        [member] = members
        router = credentials_of("router", "router-0")
        async with grpc.aio.insecure_channel(member.address) as plain:
            channel = proven(plain, member, router)
            session = worker_pb2_grpc.DecodeServiceStub(channel).Session()
            hello = worker_pb2.SessionHello(
                router_id="r",
                incarnation=member.incarnation,
                contract_version=CONTRACT_VERSION,
            )
            await session.write(worker_pb2.SessionRequest(hello=hello))
            submit = worker_pb2.SubmitRequest(
                request_id="a",
                prompt_token_ids=pack_token_ids([5, 6, 7]),
                sampling=sampling_to_proto(SamplingParams(max_tokens=400, ignore_eos=True)),
                choices=[worker_pb2.ChoiceState(choice=0)],
            )
            await session.write(worker_pb2.SessionRequest(submit=submit))
            assert (await session.read()).deltas, "it decodes"

            def is_lost(*_: Any) -> Any:
                if hangs:
                    is_over.wait(60)
                raise AcceleratorError("injected: the device is gone")

            assert process._executor is not None
            monkeypatch.setattr(process._executor, "_max_call_s", 0.5)
            monkeypatch.setattr(process._executor.engine, "read", is_lost)
            async with asyncio.timeout(20):
                await process.wait_failed()
                failures = []
                while (message := await session.read()) is not grpc.aio.EOF:
                    failures += message.failures
            assert [each.code for each in failures] == [grpc.StatusCode.ABORTED.value[0]]
            info = worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest())
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await info
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        await process.stop(0.0)
        is_over.set()

    asyncio.run(scenario())


def test_a_process_tells_routers_the_type_of_its_device_and_its_tokenizer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")

    async def scenario() -> None:
        members: list[Any] = []
        process = await start_worker(tmp_path, "decode-0", members)
        [member] = members
        async with grpc.aio.insecure_channel(member.address) as plain:
            channel = proven(plain, member, credentials_of("router", "router-0"))
            info = await get_info(channel, 5.0)
        await process.stop(0.0)
        assert info.device == "cpu"
        assert info.tokenizer_digest == tokenizer_digest(tmp_path) != ""

    asyncio.run(scenario())


def test_the_type_of_a_gpu_is_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA L4")

    assert _device_type("cuda") == "NVIDIA L4"


def test_a_process_that_does_not_end_in_time_announces_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path)

    async def scenario() -> None:
        process = await start_worker(tmp_path, "decode-0", [])
        announcing = process._announcing
        assert announcing is not None
        with monkeypatch.context() as patch:
            patch.setattr(process._worker, "stop", hang)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await process.drain(0.0)
        await asyncio.wait({announcing}, timeout=1.0)
        assert announcing.cancelled()
        await process.stop(0.0)

    async def hang(grace_s: float) -> None:
        await asyncio.sleep(1000)

    asyncio.run(scenario())
