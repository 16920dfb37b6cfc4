"""Requests that wait travel in one message, in order, but no large one."""

import asyncio
from collections import deque

import pytest

from pagewire.protos import inference_pb2, worker_pb2
from pagewire.protos.gathering import MAX_MORE, Waiting, gather
from pagewire.protos.grpc_options import LARGE_REQUEST_BYTES


def starting(num_bytes):
    start = inference_pb2.GenerateRequest(text="x" * num_bytes)
    return inference_pb2.GenerateManyRequest(call_id=num_bytes, start=start)


@pytest.mark.parametrize(
    ("sizes", "messages"),
    [
        ([7], [[7]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([30_000, 30_000, 30_000, 1], [[30_000, 30_000], [30_000, 1]]),
        ([65_000, 1000, 90_000, 2], [[65_000], [1000], [90_000], [2]]),
        ([5] * (MAX_MORE + 3), [[5] * (MAX_MORE + 1), [5] * 2]),
    ],
)
def test_messages_are_filled_in_order_and_stay_small(sizes, messages):
    waiting = deque(map(starting, sizes))

    gathered = [gather(waiting) for _ in messages]

    assert not waiting
    assert [[len(each.start.text) for each in (m, *m.more)] for m in gathered] == messages
    assert all(m.ByteSize() <= LARGE_REQUEST_BYTES for m in gathered if m.more)


def test_an_estimate_of_many_small_requests_is_never_too_low():
    sizes = [200] * MAX_MORE
    waiting = deque(
        worker_pb2.SessionRequest(cancel=worker_pb2.CancelRequest(request_id="x" * each))
        for each in sizes
    )

    while waiting:
        assert gather(waiting).ByteSize() <= LARGE_REQUEST_BYTES


def test_a_writer_takes_what_waits_and_learns_of_the_end():
    async def main():
        waiting = Waiting()
        taking = asyncio.create_task(waiting.take())
        await asyncio.sleep(0)
        for num_bytes in (1, 2, 3):
            waiting.add(starting(num_bytes))
        first = await taking
        assert [len(each.start.text) for each in (first, *first.more)] == [1, 2, 3]
        waiting.add(starting(4))
        waiting.close()
        assert len((await waiting.take()).start.text) == 4
        assert await waiting.take() is None

    asyncio.run(main())


def test_one_who_adds_can_wait_until_few_messages_wait():
    async def main():
        waiting = Waiting()
        for _ in range(MAX_MORE + 3):
            waiting.add(starting(1))
        few = asyncio.create_task(waiting.wait_until_few(1))
        await waiting.take()
        await asyncio.sleep(0)
        assert not few.done()
        await waiting.take()
        await few

    asyncio.run(main())
