import asyncio
import gc
import json
import re
import struct
from contextlib import asynccontextmanager

import grpc
import pytest

import pagewire
from pagewire import AsyncClient, Client, Message, ToolCall
from pagewire.protos import common_pb2
from pagewire.protos.grpc_options import LARGE_REQUEST_BYTES
from tests.pagewire.scripted_service import (
    abort,
    never_ends,
    response,
    retry_after,
    run,
    serving,
    serving_in_thread,
    two_deltas,
    violation,
)

LARGE_PROMPT = "x" * LARGE_REQUEST_BYTES  # which does not share a stream


def failing(code, message, *details, after=()):
    async def script(request, context):
        for each in after:
            yield each
        await abort(context, code, message, *details)

    return script


def error_of(script, prompt="x", **options):
    async def work(client, service):
        await client.generate(prompt, **options)

    with pytest.raises(pagewire.PagewireError) as caught:
        run(script, work)
    return caught.value


def test_generate_returns_text_tokens_and_account():
    async def work(client, service):
        return await client.generate("prompt", max_tokens=2)

    completion = run(two_deltas, work)

    assert completion.text == "abc"
    assert completion.token_ids == (1, 2)
    assert completion.finish_reason == "length"
    assert completion.usage.pages_moved == 3
    assert completion.usage.cached_tokens == 32
    assert completion.usage.decode_workers == ("decode-0",)


def test_stream_yields_each_delta_and_collects_the_answer():
    async def work(client, service):
        async with client.stream("prompt") as stream:
            deltas = [delta async for delta in stream]
        return deltas, stream.completion

    deltas, completion = run(two_deltas, work)

    assert [(delta.text, delta.first_index) for delta in deltas] == [("ab", 0), ("c", 1)]
    assert deltas[0].usage is None
    assert deltas[1].usage == completion.usage
    assert completion.text == "abc"


def test_choices_are_kept_apart():
    async def script(request, context):
        for choice in (0, 1, 0, 1):
            yield response(f"<{choice}>", [choice], choice=choice)

    async def work(client, service):
        return await client.generate("prompt", n=2)

    completion = run(script, work)

    assert [choice.text for choice in completion.choices] == ["<0><0>", "<1><1>"]
    assert [choice.token_ids for choice in completion.choices] == [(0, 0), (1, 1)]


def test_logprobs_belong_to_their_tokens():
    async def script(request, context):
        entry = common_pb2.TokenLogprobs(
            logprob=-0.5, top_token_ids=struct.pack("<2I", 4, 5), top_logprobs=[-0.5, -1.5]
        )
        yield response("a", [4], logprobs=[entry])

    async def work(client, service):
        return await client.generate("prompt", logprobs=2)

    (entry,) = run(script, work).choices[0].logprobs

    assert (entry.token_id, entry.logprob) == (4, -0.5)
    assert entry.top == ((4, -0.5), (5, -1.5))


def test_only_given_options_are_sent():
    async def work(client, service):
        await client.generate([3, 2**32 - 1], model="m", temperature=0.0, stop=["x", "y"])
        return service.requests[0]

    request = run(two_deltas, work)

    assert request.model == "m"
    assert struct.unpack("<2I", request.token_ids) == (3, 2**32 - 1)
    assert request.sampling.HasField("temperature")
    assert list(request.sampling.stop) == ["x", "y"]
    assert not request.sampling.HasField("top_p")
    assert not request.sampling.HasField("seed")


def test_chat_takes_messages_and_mappings():
    async def work(client, service):
        await client.chat(
            [Message(role="system", content="be brief"), {"role": "user", "content": "hi"}]
        )
        return service.requests[0]

    messages = run(two_deltas, work).chat.messages

    assert [(each.role, each.content) for each in messages] == [
        ("system", "be brief"),
        ("user", "hi"),
    ]


def test_tokenize_list_models_and_status():
    async def work(client, service):
        return (
            await client.tokenize("ab"),
            await client.tokenize_chat([Message(role="user", content="cd")]),
            await client.list_models(),
            await client.status(),
        )

    tokens, chat_tokens, models, status = run(two_deltas, work)

    assert (tokens.token_ids, tokens.text) == ((97, 98), "ab")
    assert chat_tokens.token_ids == (99, 100)
    assert [(model.name, model.page_size) for model in models] == [("tiny", 4)]
    (worker,) = status.workers
    assert (worker.worker_id, worker.pool, worker.state) == ("decode-0", "decode", "ready")
    assert worker.pages.free == 4
    assert worker.hit_rate == 0.75


def test_invalid_request_names_each_field():
    detail = violation("sampling.top_p", "found 2, allowed (0, 1]", "OUT_OF_RANGE")
    error = error_of(failing(grpc.StatusCode.INVALID_ARGUMENT, "bad", detail))

    assert isinstance(error, pagewire.InvalidRequestError)
    assert [(each.field, each.description, each.reason) for each in error.violations] == [
        ("sampling.top_p", "found 2, allowed (0, 1]", "OUT_OF_RANGE")
    ]


def test_overload_says_when_to_try_again():
    error = error_of(failing(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after(3)))

    assert isinstance(error, pagewire.OverloadedError)
    assert error.retry_after_s == 3


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.NOT_FOUND, pagewire.NotFoundError),
        (grpc.StatusCode.UNAUTHENTICATED, pagewire.AuthenticationError),
        (grpc.StatusCode.ABORTED, pagewire.UnavailableError),
        (grpc.StatusCode.UNAVAILABLE, pagewire.UnavailableError),
        (grpc.StatusCode.CANCELLED, pagewire.CancelledError),
        (grpc.StatusCode.INTERNAL, pagewire.ServerError),
    ],
)
def test_each_status_has_its_exception(code, kind):
    error = error_of(failing(code, "words", retry_after(1)))

    assert type(error) is kind
    assert error.code == code.name
    assert error.message == "words"


def test_a_timeout_that_the_router_noticed_names_the_limit_and_what_the_router_says():
    error = error_of(failing(grpc.StatusCode.DEADLINE_EXCEEDED, "2 tokens so far", retry_after(1)))

    assert type(error) is pagewire.TimeoutError
    assert re.search(r"no complete answer within timeout_s = \d+: 2 tokens so far", error.message)


def test_nobody_at_the_address_is_a_failed_connection():
    async def scenario():
        async with serving(two_deltas) as (address, _):
            pass
        async with AsyncClient(address) as client:
            await client.generate("x")

    with pytest.raises(pagewire.ConnectionFailedError, match=r"127\.0\.0\.1"):
        asyncio.run(scenario())


@asynccontextmanager
async def other_grpc_server():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


@asynccontextmanager
async def http_server():
    async def refuse(reader, writer):
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("other_server", "more"),
    [
        (other_grpc_server, ", or one older than this client: it lacks the method"),
        (http_server, ""),
    ],
)
def test_what_answers_and_is_no_router_is_told_from_nobody(other_server, more):
    async def scenario():
        async with other_server() as port, AsyncClient(f"127.0.0.1:{port}") as client:
            with pytest.raises(pagewire.ConnectionFailedError) as caught:
                await client.status()
            told = f"something answers at {client.address}, but it is not a Pagewire router"
            assert caught.value.message == told + more

    asyncio.run(scenario())


def test_timeout_ends_the_call_and_the_work_behind_it():
    async def work(client, service):
        with pytest.raises(pagewire.TimeoutError, match=r"no complete answer within .* = 0\.2"):
            await client.generate("x", timeout_s=0.2)
        await asyncio.wait_for(service.cancelled.wait(), 5)

    run(never_ends, work)


def test_leaving_a_stream_cancels_it_at_the_server():
    async def work(client, service):
        async with client.stream("x") as stream:
            async for _ in stream:
                break
        await asyncio.wait_for(service.cancelled.wait(), 5)
        return stream.completion

    completion = run(never_ends, work)

    assert completion.text == "a"
    assert completion.finish_reason is None
    assert completion.usage is None


def test_a_stream_that_is_dropped_is_cancelled_when_it_is_collected():
    async def work(client, service):
        stream = client.stream("x")
        async for _ in stream:
            break
        del stream
        gc.collect()
        await asyncio.wait_for(service.cancelled.wait(), 5)

    run(never_ends, work)


def test_cancelling_the_caller_cancels_the_call():
    async def work(client, service):
        task = asyncio.create_task(client.generate("x"))
        while not service.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(service.cancelled.wait(), 5)

    run(never_ends, work)


def test_an_error_after_tokens_leaves_what_came_readable():
    script = failing(grpc.StatusCode.ABORTED, "lost", after=[response("ab", [1])])

    async def work(client, service):
        async with client.stream("x") as stream:
            with pytest.raises(pagewire.UnavailableError):
                async for _ in stream:
                    pass
        return stream.completion

    assert run(script, work).text == "ab"


def test_a_broken_answer_is_an_error_of_the_server():
    async def script(request, context):
        yield response("a", [1], choice=1)

    error = error_of(script)

    assert isinstance(error, pagewire.ServerError)


def test_details_that_cannot_be_read_do_not_hide_the_error():
    async def script(request, context):
        yield response("a", [1])
        await context.abort(
            grpc.StatusCode.ABORTED, "lost", (("grpc-status-details-bin", b"\xff\xff"),)
        )

    large = error_of(script, prompt=LARGE_PROMPT)

    assert isinstance(large, pagewire.UnavailableError)
    assert large.message == "lost"
    assert isinstance(error_of(script), pagewire.ServerError)


def test_a_request_beyond_the_limit_of_the_server_is_not_called_an_overload():
    async def work(client, service):  # gRPC's own limit is 4 MiB
        await client.generate("x" * (5 * 2**20))

    with pytest.raises(
        pagewire.InvalidRequestError, match=r"of 52\d+ bytes.* at most 4194304 bytes"
    ):
        run(two_deltas, work)


def test_sync_client_generates_and_streams():
    with serving_in_thread(two_deltas) as (address, _), Client(address) as client:
        assert client.generate("x").text == "abc"
        assert client.chat([Message(role="user", content="hi")]).text == "abc"
        assert client.tokenize("ab").token_ids == (97, 98)
        assert client.list_models()[0].name == "tiny"
        assert client.status().active_requests == 2
        with client.stream("x") as stream:
            assert [delta.text for delta in stream] == ["ab", "c"]
        assert stream.completion.text == "abc"


def test_sync_client_raises_the_same_errors():
    script = failing(grpc.StatusCode.NOT_FOUND, "no such model", retry_after(1))
    with (
        serving_in_thread(script) as (address, _),
        Client(address) as client,
        pytest.raises(pagewire.NotFoundError, match="no such model"),
    ):
        client.generate("x", model="nope")


def test_leaving_a_sync_stream_cancels_it_at_the_server():
    with serving_in_thread(never_ends) as (address, service), Client(address) as client:
        with client.stream("x") as stream:
            assert next(stream).text == "a"
        for _ in range(500):
            if service.cancelled.is_set():
                break
            client.status()
        assert service.cancelled.is_set()


def test_a_chat_carries_tools_and_all_fields_of_its_messages():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "x", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "9", "tool_call_id": "c"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "strict": False}}]

    async def work(client, service):
        await client.chat(messages, tools=tools)
        await client.tokenize_chat(messages, tools=tools)
        return [each.chat for each in service.requests]

    generated, tokenized = run(two_deltas, work)

    assert generated == tokenized
    user, assistant, tool = generated.messages
    assert (user.name, tool.tool_call_id, assistant.reasoning_content) == ("ann", "c", "hm")
    assert assistant.content == ""
    assert [(each.id, each.name, each.arguments) for each in assistant.tool_calls] == [
        ("c", "f", '{"a": 1}')
    ]
    assert generated.tools_json == json.dumps(tools)


def test_messages_with_tool_calls_may_be_values_too():
    message = Message(role="assistant", content="", tool_calls=(ToolCall(name="f", id="c"),))

    async def work(client, service):
        await client.chat([message])
        return service.requests[0].chat

    chat = run(two_deltas, work)

    assert chat.messages[0].tool_calls[0].name == "f"
    assert chat.tools_json == ""


def test_detokenize_returns_the_text():
    async def work(client, service):
        text = await client.detokenize([72, 105], skip_special_tokens=True)
        return text, service.requests[0].skip_special_tokens

    assert run(two_deltas, work) == ("Hi", True)
