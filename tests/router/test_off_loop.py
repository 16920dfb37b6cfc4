"""Prompts that are large are tokenized beside the event loop, in bounded number."""

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest

from pagewire.protos import inference_pb2
from pagewire.protos.token_ids import pack_token_ids
from router import off_loop
from router.errors import Overloaded
from router.off_loop import MAX_RUNNING, OffLoop
from router.tenants.tenant import NO_TENANT
from tests.router.scripted_worker import ScriptedWorker, running_router
from tests.router.slow_threads import LARGE, Threads
from tests.support.virtual_time import run_virtual

T = TypeVar("T")
Tokenize = inference_pb2.TokenizeRequest
Detokenize = inference_pb2.DetokenizeRequest
Generate = inference_pb2.GenerateRequest


def chat(content: str) -> inference_pb2.ChatPrompt:
    return inference_pb2.ChatPrompt(messages=[{"role": "user", "content": content}])


def test_only_large_prompts_take_the_way_through_a_thread(model_dir: Path) -> None:
    async def main() -> None:
        threads = Threads()
        worker = ScriptedWorker("decode-0", max_context_tokens=20_000)
        async with running_router(worker, model_dir=model_dir, run_blocking=threads) as tested:
            for small in (
                Generate(text="the fox"),
                Generate(chat=chat("the fox")),
                Generate(token_ids=pack_token_ids([5] * 1000)),
            ):
                small.sampling.max_tokens = 1
                assert (await tested.generate(request=small)).error is None
            assert threads.num_started == 0
            large = (
                Generate(text=LARGE),
                Generate(chat=chat(LARGE)),
                Generate(token_ids=pack_token_ids([5] * 10_000)),
            )
            for request in large:
                request.sampling.max_tokens = 1
                assert (await tested.generate(request=request)).error is None
            assert threads.num_started == len(large) + 1, "a chat is also read there"

    run_virtual(main())


def test_few_prompts_are_tokenized_at_once_while_streams_go_on(model_dir: Path) -> None:
    async def main() -> None:
        threads = Threads()
        worker = ScriptedWorker("decode-0", token_s=0.05)
        async with running_router(worker, model_dir=model_dir, run_blocking=threads) as tested:
            streaming = asyncio.create_task(tested.generate(max_tokens=60))
            tokenized = await asyncio.gather(
                *(tested.stub.Tokenize(Tokenize(text=LARGE)) for _ in range(2 * MAX_RUNNING))
            )
            assert len({bytes(each.token_ids) for each in tokenized}) == 1
            assert threads.most_running == MAX_RUNNING
            times = (await streaming).times
            assert max(b - a for a, b in itertools.pairwise(times)) < 0.06

    run_virtual(main())


@pytest.mark.parametrize(
    ("method", "large"),
    [
        ("Tokenize", Tokenize(text=LARGE)),
        ("Detokenize", Detokenize(token_ids=pack_token_ids([5] * 1001))),
        ("Detokenize", Detokenize(token_ids=pack_token_ids([5] * 41), with_pieces=True)),
    ],
)
def test_tokenize_and_detokenize_take_a_place_among_the_active_requests(
    method: str, large: Any, model_dir: Path
) -> None:
    async def main() -> None:
        threads = Threads()
        options = {"model_dir": model_dir, "run_blocking": threads, "max_active_requests": 1}
        worker = ScriptedWorker("decode-0", max_context_tokens=2000)
        async with running_router(worker, **options) as tested:
            first = getattr(tested.stub, method)(large)
            await asyncio.sleep(0.1)
            assert threads.num_running == 1
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await tested.stub.Tokenize(Tokenize(text="the fox"))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            refused = await tested.generate()
            assert refused.error is not None
            assert refused.error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

            first.cancel()
            await asyncio.sleep(0.1)
            assert (await tested.stub.Tokenize(Tokenize(text="the fox"))).token_ids

    run_virtual(main())


def test_a_crash_of_tokenize_is_an_internal_error(model_dir: Path) -> None:
    async def broken(function: Callable[[], T], /) -> T:
        raise ZeroDivisionError

    async def main() -> None:
        worker = ScriptedWorker("decode-0")
        async with running_router(worker, model_dir=model_dir, run_blocking=broken) as tested:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await tested.stub.Tokenize(Tokenize(text=LARGE))
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            assert "ZeroDivision" not in (caught.value.details() or "")

    run_virtual(main())


def test_callers_that_leave_free_their_places_in_the_queue() -> None:
    async def main() -> None:
        threads = Threads()
        pool = OffLoop(threads, retry_delay_s=0.5)
        running = [
            asyncio.create_task(pool.run(lambda: 1, 10, NO_TENANT)) for _ in range(MAX_RUNNING)
        ]
        waiting = [asyncio.create_task(pool.run(lambda: 2, 10, NO_TENANT)) for _ in range(100)]
        await asyncio.sleep(0.1)
        for task in (*running, *waiting[:-1]):
            task.cancel()

        assert await waiting[-1] == 2
        assert asyncio.get_running_loop().time() == pytest.approx(2.0), "what ran kept its place"
        assert threads.num_started == MAX_RUNNING + 1, "what waited was never begun"
        assert pool._room.taken == 0

    run_virtual(main())


def test_prompts_beyond_the_memory_for_waiting_ones_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(off_loop, "MAX_BYTES", 100)

    async def main() -> None:
        pool = OffLoop(Threads(), retry_delay_s=0.5)
        large = asyncio.create_task(pool.run(lambda: "large", 1000, NO_TENANT))
        await asyncio.sleep(0.1)
        with pytest.raises(Overloaded):
            await pool.run(lambda: "small", 1, NO_TENANT)
        assert await large == "large", "alone, any size is taken"
        assert await pool.run(lambda: "small", 1, NO_TENANT) == "small"

    run_virtual(main())


def test_a_chat_of_many_small_messages_takes_the_room_of_its_memory(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(off_loop, "MAX_BYTES", 1 << 20)
    message = {"role": "assistant", "tool_calls": [{}] * 4}
    many = Generate(chat=inference_pb2.ChatPrompt(messages=[message] * 2000))
    assert many.ByteSize() < 1 << 16, "small on the wire"

    async def main() -> None:
        worker = ScriptedWorker("decode-0")
        async with running_router(worker, model_dir=model_dir, run_blocking=Threads()) as tested:
            answers = await asyncio.gather(*(tested.generate(request=many) for _ in range(3)))
        codes = sorted(each.error.code().name for each in answers)
        assert codes == ["INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"]

    run_virtual(main())
