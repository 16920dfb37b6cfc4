"""What strangers send to a server over real sockets."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

from pagewire import OverloadedError
from pagewire.failures import error_from
from pagewire.protos import inference_pb2
from protos import call_guard
from protos.call_guard import CallGuard
from protos.field_count import check_num_fields
from tests.support.log_records import records_of
from tests.support.waiting import until

GARBAGE = b"\xff\xff\xff"
INVALID, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED


async def unary(request: Any, context: Any) -> Any:
    return inference_pb2.TokenizeResponse(text=request.text)


async def ticking(request: Any, context: Any) -> AsyncIterator[Any]:
    while True:
        yield inference_pb2.TokenizeResponse(text=request.text)
        await asyncio.sleep(0.01)


async def writing(request: Any, context: Any) -> None:
    await context.write(inference_pb2.TokenizeResponse(text=request.text))


async def echoing(requests: Any, context: Any) -> AsyncIterator[Any]:
    async for request in requests:
        yield inference_pb2.TokenizeResponse(text=request.text)


async def forgiving(requests: Any, context: Any) -> AsyncIterator[Any]:
    """As a session whose reader takes any error of gRPC for the end of the connection."""
    try:
        async for request in requests:
            yield inference_pb2.TokenizeResponse(text=request.text)
    except grpc.RpcError:
        return


async def joining(requests: Any, context: Any) -> Any:
    return inference_pb2.TokenizeResponse(text="".join([each.text async for each in requests]))


async def aborting(request: Any, context: Any) -> Any:
    await context.abort(grpc.StatusCode.DATA_LOSS, "as planned")


HANDLERS = {
    "Unary": (grpc.unary_unary_rpc_method_handler, unary),
    "Ticking": (grpc.unary_stream_rpc_method_handler, ticking),
    "Writing": (grpc.unary_stream_rpc_method_handler, writing),
    "Echoing": (grpc.stream_stream_rpc_method_handler, echoing),
    "Forgiving": (grpc.stream_stream_rpc_method_handler, forgiving),
    "Joining": (grpc.stream_unary_rpc_method_handler, joining),
    "Aborting": (grpc.unary_unary_rpc_method_handler, aborting),
}


@asynccontextmanager
async def guarded(**limits: Any) -> AsyncIterator[grpc.aio.Channel]:
    limits.setdefault("max_calls", 1000)
    server = grpc.aio.server(interceptors=[CallGuard(**limits)])
    handlers = {
        name: make(
            function,
            request_deserializer=inference_pb2.TokenizeRequest.FromString,
            response_serializer=inference_pb2.TokenizeResponse.SerializeToString,
        )
        for name, (make, function) in HANDLERS.items()
    }
    # A name that the descriptors know, for the count of fields.
    handlers["Tokenize"] = handlers["Unary"]
    for service in ("test", "pagewire.v1.InferenceService"):
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30))


def open_call(channel: grpc.aio.Channel, method: str) -> Any:
    """Open a call that has not sent anything, whatever kind the method is."""
    return channel.stream_stream(f"/test/{method}")()


@pytest.fixture
def silences(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When each call began to wait for a message. Calls reach a busy server out of turn."""
    began: list[float] = []

    class Noted(call_guard._Silence):
        def __init__(self, since: float) -> None:
            super().__init__(since)
            began.append(since)

    monkeypatch.setattr(call_guard, "_Silence", Noted)
    return began


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    return await call.code(), await call.details()


async def retry_delay_s(call: Any) -> float | None:
    """Return when a refused caller may try again, as a client reads it; None: it is not told."""
    code, message = await status_of(call)
    failure = grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), await call.trailing_metadata(), message
    )
    error = error_from(failure, "the address", 1.0)
    assert isinstance(error, OverloadedError)
    return error.retry_after_s


def text(value: str) -> bytes:
    return inference_pb2.TokenizeRequest(text=value).SerializeToString()


async def answers(channel: grpc.aio.Channel, method: str, *requests: bytes) -> list[str]:
    """Make a whole call and return the texts of its responses."""
    call = open_call(channel, method)
    for each in requests:
        await call.write(each)
    await call.done_writing()
    responses = [inference_pb2.TokenizeResponse.FromString(each).text async for each in call]
    assert await call.code() is grpc.StatusCode.OK
    return responses


def test_methods_of_all_kinds_answer_as_without_a_guard() -> None:
    async def scenario() -> None:
        async with guarded() as channel:
            assert await answers(channel, "Unary", text("a")) == ["a"]
            assert await answers(channel, "Writing", text("a")) == ["a"]
            assert await answers(channel, "Echoing", text("a"), text("b")) == ["a", "b"]
            assert await answers(channel, "Joining", text("a"), text("b")) == ["ab"]
            assert await channel.unary_unary("/test/Unary")(text("c"))
            ticks = channel.unary_stream("/test/Ticking")(text("d"))
            assert [await ticks.read() for _ in range(3)]
            ticks.cancel()
            call = channel.unary_unary("/test/Aborting")(b"")
            assert await status_of(call) == (grpc.StatusCode.DATA_LOSS, "as planned")
            missing = channel.unary_unary("/test/Missing")(b"")
            assert await missing.code() is grpc.StatusCode.UNIMPLEMENTED

    run(scenario)


@pytest.mark.parametrize("method", [name for name in HANDLERS if name != "Aborting"])
@pytest.mark.parametrize(
    "request_", [GARBAGE, b"\x12\x02\xc3\x28"], ids=["no message", "bad UTF-8"]
)
def test_malformed_bytes_are_an_invalid_argument_and_no_error_in_the_log(
    method: str, request_: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with guarded() as channel:
            call = open_call(channel, method)
            await call.write(request_)

            code, details = await status_of(call)

            assert code is INVALID, details
            assert f"/test/{method}" in details

    with caplog.at_level(logging.WARNING):
        run(scenario)
    assert not records_of(caplog)


def test_a_stream_ends_at_a_malformed_message_after_what_came_before() -> None:
    async def scenario() -> None:
        async with guarded() as channel:
            for method in ("Echoing", "Forgiving"):
                call = open_call(channel, method)
                await call.write(text("a"))
                assert inference_pb2.TokenizeResponse.FromString(await call.read()).text == "a"
                await call.write(GARBAGE)

                assert await call.code() is INVALID

    run(scenario)


def test_a_call_without_a_request_ends_in_time() -> None:
    async def scenario() -> None:
        async with guarded(request_s=0.2) as channel:
            calls = [open_call(channel, method) for method in ("Unary", "Ticking", "Writing")]
            for call in calls:
                assert await status_of(call) == (
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                    "no request came within 0.2 s",
                )
            closed = open_call(channel, "Unary")
            await closed.done_writing()
            assert await status_of(closed) == (INVALID, "the call has no request")

    run(scenario)


def test_of_too_many_silent_calls_the_oldest_end_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch, silences: list[float]
) -> None:
    monkeypatch.setattr(call_guard, "YOUNG_S", 0.1)

    async def scenario() -> None:
        async with guarded(max_silent=3) as channel:
            calls = []
            for _ in range(5):
                calls.append(open_call(channel, "Ticking"))
                await until(lambda: len(silences) == len(calls))
            for oldest in calls[:2]:
                code, details = await status_of(oldest)
                assert code is EXHAUSTED, details
                assert await retry_delay_s(oldest) == 0.5
            late, *others = calls[2:]
            await late.write(text("at last"))
            assert await late.read()
            assert not any(each.done() for each in others), "three may wait"
            assert await answers(channel, "Unary", text("a")) == ["a"]
            late.cancel()

    run(scenario)


def test_a_burst_larger_than_the_limit_of_silent_calls_loses_none() -> None:
    async def scenario() -> None:
        async with guarded(max_silent=3) as channel:
            call = channel.unary_unary("/test/Unary")
            assert len(await asyncio.gather(*(call(text("x")) for _ in range(300)))) == 300

    run(scenario)


def test_a_method_with_too_many_open_calls_refuses_more_and_others_go_on() -> None:
    async def scenario() -> None:
        async with guarded(max_calls=2, retry_delay_s=1.25) as channel:
            ticks = [channel.unary_stream("/test/Ticking")(text("x")) for _ in range(2)]
            for each in ticks:
                await each.read()
            refused = channel.unary_stream("/test/Ticking")(text("x"))
            code, details = await status_of(refused)
            assert (code, "2 calls" in details) == (EXHAUSTED, True)
            assert await retry_delay_s(refused) == 1.25
            assert await answers(channel, "Unary", text("a")) == ["a"]
            ticks[0].cancel()
            async with asyncio.timeout(10):  # until there is room again
                while True:
                    again = channel.unary_stream("/test/Ticking")(text("x"))
                    with suppress(grpc.aio.AioRpcError):
                        assert await again.read()
                        break
            again.cancel()
            ticks[1].cancel()

    run(scenario)


def test_a_request_of_very_many_fields_is_refused_before_it_is_parsed() -> None:
    crowd = b"\x1a" + b"\xc0\x9a\x0c" + b"\x0a\x00" * 100_000  # messages of a chat

    async def scenario() -> None:
        async with guarded(max_fields=1000) as channel:
            call = channel.unary_unary("/pagewire.v1.InferenceService/Tokenize")
            code, details = await status_of(call(crowd))
            assert (code, "more than 1000 fields" in details) == (INVALID, True), details
            assert await call(text("x" * 100_000)), "one large field"

    run(scenario)


@pytest.mark.parametrize("method", ["Unary", "Joining", "Forgiving"])
def test_a_request_that_the_check_refuses_reaches_no_handler(method: str) -> None:
    def check(request: Any) -> None:
        if len(request.text) > 3:
            raise ValueError("text: found more than 3")

    async def scenario() -> None:
        async with guarded(check=check) as channel:
            call = open_call(channel, method)
            await call.write(text("xxxx"))
            await call.done_writing()
            code, details = await status_of(call)
            assert (code, "text: found more than 3" in details) == (INVALID, True), details
            assert await channel.unary_unary("/test/Unary")(text("xxx"))

    run(scenario)


@pytest.mark.parametrize("method", ["Unary", "Ticking", "Echoing"])
def test_a_large_request_is_for_services_of_the_contract_alone(method: str) -> None:
    large = text("x" * call_guard.STANDARD_BYTES)

    async def scenario() -> None:
        async with guarded() as channel:
            call = open_call(channel, method)  # as of health, or reflection
            await call.write(large)
            code, details = await status_of(call)
            assert (code, "allowed: at most 4096 bytes" in details) == (INVALID, True), details
            assert await channel.unary_unary("/test/Unary")(text("x" * 4000))
            assert await channel.unary_unary("/pagewire.v1.InferenceService/Unary")(large)

    run(scenario)


def test_calls_of_standard_services_keep_no_message_half_sent(
    monkeypatch: pytest.MonkeyPatch, silences: list[float]
) -> None:
    """A message that never ends takes memory, and anybody may call these."""
    monkeypatch.setattr(call_guard, "YOUNG_S", 0.0)
    monkeypatch.setattr(call_guard, "MAX_SILENT_STANDARD", 2)

    async def scenario() -> None:
        async with guarded(request_s=1.0) as channel:
            own = channel.stream_stream("/pagewire.v1.InferenceService/Echoing")()
            calls = []
            for method in ("Ticking", "Echoing", "Echoing", "Unary"):
                calls.append(open_call(channel, method))
                await until(lambda: len(silences) == len(calls))
            ends = [await status_of(each) for each in calls]
            assert [code for code, _ in ends] == [EXHAUSTED] * 2 + [
                grpc.StatusCode.DEADLINE_EXCEEDED
            ] * 2, ends
            await own.write(text("a"))
            assert await own.read(), "the contract's own streams may be silent"
            own.cancel()

    run(scenario)


def fields(message: Any) -> int:
    """Count as the limit does, but from the parsed message."""
    count = 0
    for field, value in message.ListFields():
        values = value if field.is_repeated else [value]
        if field.message_type:
            count += sum(1 + fields(each) for each in values)
        else:
            count += len(values)
    return count


def test_fields_are_counted_with_those_of_inner_messages() -> None:
    request = inference_pb2.GenerateRequest(model="m", sampling={"seed": 2**63, "stop": ["a", "b"]})
    request.chat.messages.add(role="user", content="x" * 500)
    request.chat.messages.add(role="assistant", content="")
    raw = request.SerializeToString()

    descriptor = inference_pb2.GenerateRequest.DESCRIPTOR
    check_num_fields(raw, descriptor, fields(request))
    with pytest.raises(ValueError, match=f"found more than {fields(request) - 1} fields"):
        check_num_fields(raw, descriptor, fields(request) - 1)
    ids = inference_pb2.GenerateRequest(sampling={"stop_token_ids": [1] * 100})
    with pytest.raises(ValueError, match="found more than 100 fields"):
        check_num_fields(ids.SerializeToString(), descriptor, 100)


@pytest.mark.parametrize(
    "raw",
    [b"\xff", b"\x0a", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", b"\x0a\x05a", b"\x0b"],
    ids=["cut number", "no length", "endless number", "cut field", "a group"],
)
def test_fields_of_what_is_no_message_are_not_counted(raw: bytes) -> None:
    with pytest.raises(ValueError, match="byte"):
        check_num_fields(raw, inference_pb2.GenerateRequest.DESCRIPTOR, 10)
