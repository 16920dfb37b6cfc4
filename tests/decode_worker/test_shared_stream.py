"""All attempts at a prefill worker share a stream: each ends for itself, or with the stream."""

import asyncio
import gc
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from decode_worker import prefill_client
from decode_worker.errors import ConnectionUnknown, PrefillFailed
from decode_worker.prefill_client import PrefillClient, PrefillStream
from decode_worker.remote_prefill import RemotePrefill
from decode_worker.request import Choice, Request
from decode_worker.wire import PrefillEnd, PrefillMessage, PrefillResult
from kv_transfer.driver import Driver
from kv_transfer.messages import ChunkGo, Granted, Ticket
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from pagewire.protos import worker_pb2
from pagewire.protos.token_ids import pack_token_ids
from prefill_worker.attempt import Attempt
from tests.decode_worker.harness import ScriptedRouter, WorkerCluster, prompt_of, run
from tests.support.log_records import logged
from tests.support.virtual_time import run_virtual, wait_until

TICKET = Ticket(transfer_id=bytes(16), attempt=0, sender_incarnation=1, receiver_incarnation=2)
WRITE_S = 5.0
ABORTED = grpc.StatusCode.ABORTED.value[0]


def streams_of(cluster: WorkerCluster) -> dict[str, list[Any]]:
    """Return where the streams of attempts will appear: address |-> its calls, in order."""
    found: dict[str, list[Any]] = defaultdict(list)

    def opened(call: Any) -> None:
        if call._method.endswith("/Prefill"):
            found[call._channel.address].append(call)

    cluster.grpc_network.on_open = opened
    return found


def test_one_stream_carries_all_attempts_at_a_prefill_worker() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        streams = streams_of(cluster)
        for begin in (0, 8):  # at once, and after a pause
            asked = [await router.submit(prompt_of(50, seed=begin + i)) for i in range(8)]
            await router.finish(*asked)
            assert all(each.stats.prefill_retries == 0 for each in asked)
        assert [len(calls) for calls in streams.values()] == [1]

    run(scenario)


def test_a_request_that_is_cancelled_disturbs_no_other_of_the_stream() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        streams = streams_of(cluster)
        asked = [await router.submit(prompt_of(200, seed=i)) for i in range(3)]
        await wait_until(lambda: cluster.prefills[0].held_pages > 0, what="the first prompt")
        await router.cancel(asked[1])
        await router.finish(asked[0], asked[2])
        assert all(each.stats.prefill_retries == 0 for each in (asked[0], asked[2]))
        assert [len(calls) for calls in streams.values()] == [1]

    run(scenario)


def test_only_an_attempt_that_is_given_up_is_left() -> None:
    """The last acknowledgement ends one that was done, so its worker need not hear more."""

    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        streams = streams_of(cluster)
        prefill = cluster.prefills[0]
        done = await router.submit(prompt_of(50, seed=1))
        await router.finish(done)
        [[call]] = streams.values()
        kinds: list[str | None] = []
        write = call.write

        async def keep(message: Any) -> None:
            kinds.extend(each.WhichOneof("message") for each in (message, *message.more))
            await write(message)

        call.write = keep
        await router.finish(await router.submit(prompt_of(50, seed=2)))
        await cluster.wait_free(timeout_s=5.0)
        assert not prefill.worker._pool._attempts  # type: ignore[attr-defined]
        assert set(kinds) == {"start", "transfer"}
        cancelled = await router.submit(prompt_of(200, seed=3))
        await wait_until(lambda: prefill.held_pages > 0, what="its pages")
        await router.cancel(cancelled)
        await cluster.wait_free(timeout_s=5.0)
        assert kinds[-1] == "leave"

    run(scenario)


def test_what_requests_and_attempts_took_is_free_without_the_collector() -> None:
    """Each collection of thousands of objects would stop the event loop, and with it the steps."""

    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        await router.finish(await router.submit(prompt_of(50, seed=1)))
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            asked = [await router.submit(prompt_of(50, seed=2 + i)) for i in range(4)]
            await router.finish(*asked)
            await cluster.wait_free(timeout_s=5.0)
            await asyncio.sleep(0.1)
            gc.collect()
            found = {type(each) for each in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert not found & {Driver, Receiver, RemotePrefill, Sender, Attempt, Request, Choice}

    run(scenario)


def test_a_stream_that_breaks_ends_its_attempts_and_the_next_one_opens_another() -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        streams = streams_of(cluster)
        first, other = cluster.prefills
        candidates = [first.identity, other.identity]
        asked = [
            await router.submit(prompt_of(150, seed=i), candidates=candidates) for i in range(4)
        ]
        await wait_until(lambda: first.held_pages > 0, what="the first prompt")
        [broken] = streams[first.identity.address]
        broken.break_off(None, silently=False)
        await router.finish(*asked)
        assert all(each.stats.prefill_retries == 1 for each in asked)
        assert len(streams[other.identity.address]) == 1
        await wait_until(lambda: not first.held_pages, what="the pages of the aborted attempts")

        await asyncio.sleep(2 * cluster.decode_config.distrust_s)
        again = await router.submit(prompt_of(60, seed=9), candidates=candidates)
        await router.finish(again)
        assert again.stats.prefill_retries == 0
        assert len(streams[first.identity.address]) == 2

    run(scenario, WorkerCluster(num_prefill=2))


def test_a_decode_worker_that_dies_leaves_no_page_of_its_attempts_behind() -> None:
    async def main() -> None:
        cluster = await WorkerCluster().start()
        router = await cluster.session()
        for seed in range(6):
            await router.submit(prompt_of(150, seed=seed))
        prefill = cluster.prefills[0]
        await wait_until(lambda: prefill.worker._scheduler.num_running > 1, what="their run")
        assert prefill.held_pages
        cluster.kill(cluster.decode)
        router.reading.cancel()
        await cluster.wait_free(timeout_s=5.0)
        assert not prefill.worker._pool._attempts  # type: ignore[attr-defined]
        await cluster.stop()

    run_virtual(main())


def test_a_stream_without_attempts_keeps_neither_worker_from_stopping() -> None:
    async def main() -> None:
        cluster = await WorkerCluster().start()
        streams = streams_of(cluster)
        router = await cluster.session()
        await router.finish(await router.submit(prompt_of(50)))
        await router.close()
        loop = asyncio.get_running_loop()
        [[call]] = streams.values()
        assert not call.done()
        for each in (cluster.prefills[0], cluster.decode):
            began_at = loop.time()
            await each.process.spawn(each.worker.stop(60.0))
            assert loop.time() - began_at < 1.0
        assert call.done()
        await cluster.stop()

    run_virtual(main())


# The decode worker's end of a stream.


class FakeCall:
    """A call whose worker says what a test wants."""

    def __init__(self) -> None:
        self.written: list[Any] = []
        self.can_write = asyncio.Event()
        self.can_write.set()
        self.responses: asyncio.Queue[Any] = asyncio.Queue()

    async def write(self, message: Any) -> None:
        await self.can_write.wait()
        self.written.append(message)

    def cancel(self) -> None:
        self.responses.put_nowait(asyncio.CancelledError())

    def say(self, *responses: worker_pb2.PrefillResponse) -> None:
        first, *more = responses
        first.more.extend(more)
        self.responses.put_nowait(first)

    def __aiter__(self) -> "FakeCall":
        return self

    async def __anext__(self) -> Any:
        response = await self.responses.get()
        if isinstance(response, BaseException):
            raise response
        return response


class Told:
    """An attempt that keeps what it is told."""

    def __init__(self, request_id: str = "") -> None:
        self.request_id = request_id
        self.messages: list[PrefillMessage] = []

    def take(self, message: PrefillMessage) -> None:
        self.messages.append(message)

    @property
    def error(self) -> PrefillFailed | None:
        end = self.messages[-1]
        assert isinstance(end, PrefillEnd)
        return end.error


def start() -> Any:
    return worker_pb2.PrefillRequest(start=worker_pb2.PrefillStart())


def granted(attempt_id: int) -> Any:
    ticket = worker_pb2.TransferTicket(
        transfer_id=bytes(16), sender_incarnation=1, receiver_incarnation=2
    )
    message = worker_pb2.TransferMessage(ticket=ticket, granted=worker_pb2.Granted())
    return worker_pb2.PrefillResponse(attempt_id=attempt_id, transfer=message)


def end(attempt_id: int, code: int = 0, message: str = "") -> Any:
    ended = worker_pb2.PrefillEnd(code=code, message=message)
    return worker_pb2.PrefillResponse(attempt_id=attempt_id, end=ended)


def result(attempt_id: int, token_ids: bytes) -> Any:
    drawn = worker_pb2.PrefillResult(token_ids=token_ids)
    return worker_pb2.PrefillResponse(attempt_id=attempt_id, result=drawn)


async def opened() -> tuple[FakeCall, PrefillStream]:
    call = FakeCall()
    return call, PrefillStream(call, write_s=WRITE_S)


def test_messages_of_a_moment_are_written_together_in_order() -> None:
    async def main() -> None:
        call, stream = await opened()
        lines = [stream.begin(start(), Told()) for _ in range(3)]
        lines[0].send(ChunkGo(TICKET, 0))
        lines[1].leave()
        await asyncio.sleep(0.1)
        [message] = call.written
        sent = [(each.attempt_id, each.WhichOneof("message")) for each in (message, *message.more)]
        assert sent == [(1, "start"), (2, "start"), (3, "start"), (1, "transfer"), (2, "leave")]
        await stream.close()

    run_virtual(main())


def test_each_attempt_gets_its_messages_and_its_end() -> None:
    async def main() -> None:
        call, stream = await opened()
        told = [Told() for _ in range(4)]
        lines = [stream.begin(start(), each) for each in told]
        call.say(
            granted(1),
            end(2, ABORTED, "no connection"),
            result(3, b"abc"),  # cut off
            result(1, pack_token_ids([7])),
            granted(3),
            end(1),
        )
        await asyncio.sleep(0.1)
        assert [type(each) for each in told[0].messages] == [Granted, PrefillResult, PrefillEnd]
        assert told[0].error is None
        assert isinstance(told[1].error, ConnectionUnknown)
        unreadable = told[2].messages[0]
        assert isinstance(unreadable, PrefillEnd)
        assert "cannot be read" in str(unreadable.error)
        assert told[3].messages == []
        assert not stream.is_over

        call.written.clear()
        for line in lines:  # only two have not ended at the prefill worker
            line.leave()
        await asyncio.sleep(0.1)
        [message] = call.written
        assert [each.attempt_id for each in (message, *message.more)] == [3, 4]
        call.say(granted(4), end(4), end(2))  # too late
        await asyncio.sleep(0.1)
        assert told[3].messages == []
        assert not stream.is_over
        await stream.close()

    run_virtual(main())


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        (lambda call: call.say(granted(3)), "attempt_id: found 3; allowed: 1 to 2"),
        (lambda call: call.say(granted(0)), "attempt_id: found 0; allowed: 1 to 2"),
        (lambda call: call.responses.put_nowait(StopAsyncIteration()), "ended the stream"),
        (lambda call: call.cancel(), "the channel was closed"),
        (
            lambda call: call.responses.put_nowait(
                grpc.aio.AioRpcError(
                    grpc.StatusCode.ABORTED, grpc.aio.Metadata(), grpc.aio.Metadata(), "gone"
                )
            ),
            "ABORTED: gone",
        ),
    ],
    ids=["an unknown id", "no id", "the end", "a closed channel", "a status"],
)
def test_the_end_of_a_stream_is_told_to_its_attempts_once(ending: Any, reason: str) -> None:
    async def main() -> None:
        call, stream = await opened()
        told = [Told(), Told()]
        lines = [stream.begin(start(), each) for each in told]
        ending(call)
        await asyncio.sleep(0.1)
        assert stream.is_over
        for each in told:
            assert type(each.error) is PrefillFailed
            assert reason in str(each.error)
            assert len(each.messages) == 1
        lines[0].send(ChunkGo(TICKET, 0))
        lines[0].leave()

    run_virtual(main())


def test_a_worker_that_reads_nothing_loses_the_stream_in_time() -> None:
    async def main() -> None:
        call, stream = await opened()
        call.can_write.clear()
        told = Told()
        stream.begin(start(), told)
        await asyncio.sleep(WRITE_S - 0.1)
        assert not stream.is_over
        await asyncio.sleep(0.2)
        assert stream.is_over
        assert "was not read within 5 s" in str(told.error)

    run_virtual(main())


def test_a_bug_in_one_attempt_ends_it_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    class Buggy(Told):
        def take(self, message: PrefillMessage) -> None:
            super().take(message)
            if isinstance(message, Granted):
                raise RuntimeError("planted")

    async def main() -> None:
        call, stream = await opened()
        buggy, other = Buggy("r-buggy"), Told("r-other")
        stream.begin(start(), buggy)
        stream.begin(start(), other)
        call.say(granted(1), granted(2))
        await asyncio.sleep(0.1)
        assert str(buggy.error) == "an internal error"
        assert [type(each) for each in other.messages] == [Granted]
        assert not stream.is_over
        await stream.close()

    run_virtual(main())
    assert logged("message_crashed", caplog) == [{"request_id": "r-buggy", "message": "Granted"}]


def test_a_client_opens_another_stream_only_after_the_end_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        calls: list[FakeCall] = []

        def open_prefill(channel: Any) -> FakeCall:
            calls.append(FakeCall())
            return calls[-1]

        async def close() -> None:
            pass

        monkeypatch.setattr(prefill_client, "open_prefill", open_prefill)
        client = PrefillClient(SimpleNamespace(close=close), write_s=WRITE_S)  # type: ignore[arg-type]
        first = client.stream()
        assert client.stream() is first
        calls[0].cancel()
        await asyncio.sleep(0.1)
        told = Told()
        second = client.stream()
        assert second is not first
        second.begin(start(), told)
        await client.close()
        assert told.error is not None
        assert len(calls) == 2

    run_virtual(main())
