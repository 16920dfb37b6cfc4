"""An InferenceService that answers as its script says, on a real port of this host."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from credentials.config import TlsSettings
from credentials.door import Door, front_door
from pagewire import AsyncClient
from pagewire.failures import STATUS_DETAILS_KEY
from pagewire.protos import common_pb2, inference_pb2, inference_pb2_grpc
from pagewire.protos.gathering import READS_MORE_KEY, READS_TOKENS_KEY
from pagewire.protos.token_ids import TOKEN_BYTES, pack_token_ids, unpack_token_ids
from router.front import MIN_PING_INTERVAL_MS

Script = Callable[[Any, Any], AsyncIterator[Any]]  # (request, context) -> responses
STOP = common_pb2.FINISH_REASON_STOP
# As a router's: by default gRPC ends the connection of a client that waits for ten seconds.
OPTIONS = (("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),)


class ScriptedService(inference_pb2_grpc.InferenceServiceServicer, health_pb2_grpc.HealthServicer):
    """Generate plays `script`, and so does each call of GenerateMany; usage ends it at the latest.

    `requests` keeps what came, `intervals_ms` the least times between messages that calls of
    GenerateMany asked for, `num_streams` counts its streams, `message_sizes` keeps how many starts
    and cancels came in each message: one, unless it `reads_more`, which it tells `headers_s` after
    a stream has begun. It `ends_streams` whose client starts no more calls, once these are over;
    `num_ended_streams` counts these and those whose client is gone. `cancelled`: a client was lost.
    Tokens with nothing else to tell, `num_in_columns` of them, go in columns if the client reads
    these.
    `num_statuses` counts the calls of GetClusterStatus that it answers: not while it `is_away`.
    Its health is that of a router that `has_worker`.
    `model` is what it serves, `cluster` what it knows of workers, `callers` who asked for the
    models, by the names in their certificates.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[Any] = []
        self.intervals_ms: list[int] = []
        self.num_streams = 0
        self.message_sizes: list[int] = []
        self.reads_more = True
        self.headers_s = 0.0
        self.ends_streams = True
        self.num_ended_streams = 0
        self.num_in_columns = 0
        self.callers: list[bytes] = []
        self.num_statuses = 0
        self.is_away = False
        self.has_worker = True
        self.cluster = one_worker
        self.cancelled = asyncio.Event()
        self.model = inference_pb2.Model(
            name="tiny",
            max_context_tokens=64,
            vocab_size=9,
            page_size=4,
            max_request_bytes=2**20,
            max_request_fields=1000,
        )

    async def Generate(self, request, context):  # noqa: N802
        self.requests.append(request)
        try:
            async for response in self.script(request, context):
                yield response
        except (asyncio.CancelledError, GeneratorExit):  # the latter while a message is written
            self.cancelled.set()
            raise

    async def GenerateMany(self, requests, context):  # noqa: N802
        self.num_streams += 1
        results = asyncio.Queue()
        calls = {}
        reader = asyncio.create_task(self._read(requests, context, calls, results))
        await asyncio.sleep(self.headers_s)
        await context.send_initial_metadata(((READS_MORE_KEY, "1"),) * self.reads_more)
        metadata = context.invocation_metadata() or ()
        reads_tokens = any(key == READS_TOKENS_KEY for key, _ in metadata)
        begun = set()
        try:
            while True:
                result = await results.get()
                if result is None:
                    return
                message = inference_pb2.GenerateManyResponse()
                if reads_tokens and result.call_id in begun and _is_one_token(result.response):
                    self.num_in_columns += 1
                    message.tokens.call_ids.append(result.call_id)
                    message.tokens.token_ids.extend(unpack_token_ids(result.response.token_ids))
                    message.tokens.indices.append(result.response.first_index)
                    message.tokens.texts.append(result.response.text)
                else:
                    message.results.append(result)
                begun.add(result.call_id)
                yield message
        finally:
            self.num_ended_streams += 1
            for each in (reader, *calls.values()):
                each.cancel()

    async def _read(self, requests, context, calls, results):
        async for message in requests:
            self.message_sizes.append(1 + len(message.more))
            for each in (message, *message.more):
                if each.HasField("start"):
                    self.intervals_ms.append(each.interval_ms)
                    calls[each.call_id] = asyncio.create_task(
                        self._play(each.call_id, each.start, context, results)
                    )
                else:
                    calls.pop(each.call_id).cancel()
        await asyncio.gather(*calls.values(), return_exceptions=True)
        if self.ends_streams:
            results.put_nowait(None)

    async def _play(self, call_id, request, context, results):
        def tell(**result):
            results.put_nowait(inference_pb2.CallResult(call_id=call_id, **result))

        each = inference_pb2.GenerateResponse()
        try:
            async for each in self.Generate(request, _CallContext(context)):
                tell(response=each)
        except _Aborted as aborted:
            tell(error_status=aborted.status)
        except Exception as crash:
            status = status_pb2.Status(code=grpc.StatusCode.UNKNOWN.value[0], message=str(crash))
            tell(error_status=status.SerializeToString())
        else:
            if not each.HasField("usage"):
                tell(response=inference_pb2.GenerateResponse(usage=inference_pb2.Usage()))

    async def Detokenize(self, request, context):  # noqa: N802
        self.requests.append(request)
        pieces = [chr(each) for each in unpack_token_ids(request.token_ids)]
        return inference_pb2.DetokenizeResponse(
            text="".join(pieces), pieces=pieces if request.with_pieces else ()
        )

    async def Tokenize(self, request, context):  # noqa: N802
        self.requests.append(request)
        text = request.text or "|".join(each.content for each in request.chat.messages)
        token_ids = pack_token_ids([ord(each) for each in text])
        return inference_pb2.TokenizeResponse(token_ids=token_ids, text=text)

    async def ListModels(self, request, context):  # noqa: N802
        self.callers += context.auth_context().get("x509_subject_alternative_name", [])
        return inference_pb2.ListModelsResponse(models=[self.model])

    async def Check(self, request, context):  # noqa: N802
        if self.is_away:
            await abort(context, grpc.StatusCode.UNAVAILABLE, "away")
        status = health_pb2.HealthCheckResponse
        return status(status=status.SERVING if self.has_worker else status.NOT_SERVING)

    async def GetClusterStatus(self, request, context):  # noqa: N802
        if self.is_away:
            await abort(context, grpc.StatusCode.UNAVAILABLE, "away")
        self.num_statuses += 1
        return self.cluster()


class _Aborted(Exception):
    def __init__(self, status):
        self.status = status


class _CallContext:
    """The context of one call of many."""

    def __init__(self, context):
        self.invocation_metadata = context.invocation_metadata

    async def abort(self, code, details, trailing_metadata):
        raise _Aborted(dict(trailing_metadata)[STATUS_DETAILS_KEY])


def response(text="", token_ids=(), *, choice=0, first_index=0, **fields):
    """One message of a stream."""
    return inference_pb2.GenerateResponse(
        request_id="r1",
        choice=choice,
        text=text,
        token_ids=pack_token_ids(token_ids),
        first_index=first_index,
        **fields,
    )


async def hello(request, context):
    """A script of one word."""
    yield response("Hello", [1], finish_reason=STOP, usage=usage())


async def two_words(request, context):
    """A script of two words."""
    yield response("Hello ", [1])
    yield response("there", [2], first_index=1, finish_reason=STOP, usage=usage())


async def two_deltas(request, context):
    """A script of two messages."""
    yield response("ab", [1])
    yield response(
        "c", [2], first_index=1, finish_reason=common_pb2.FINISH_REASON_LENGTH, usage=usage()
    )


async def tell(request, context):
    """A script that answers with what says for whom the call is made."""
    told = dict(context.invocation_metadata()).get("authorization", "nobody")
    stop = common_pb2.FINISH_REASON_STOP
    yield response(told, [1], finish_reason=stop, usage=usage())


async def answer(request, context):
    """A script that repeats the latest text."""
    last = request.chat.messages[-1].content if request.chat.messages else request.text
    yield response("echo ", [1])
    yield response(
        last, [2], first_index=1, finish_reason=common_pb2.FINISH_REASON_STOP, usage=usage()
    )


def waiting_for(event: threading.Event) -> Script:
    """Return a script whose second word comes after an event."""

    async def script(request, context):
        yield response("Hello ", [1])
        while not event.is_set():
            await asyncio.sleep(0.01)
        yield response("there", [2], first_index=1, finish_reason=STOP, usage=usage())

    return script


async def never_ends(request, context):
    """A script of one token, behind which nothing comes."""
    yield response("a", [1])
    await asyncio.sleep(60)


def one_worker():
    """A cluster that is small."""
    worker = inference_pb2.WorkerStatus(
        worker=common_pb2.WorkerRef(worker_id="decode-0", incarnation=7, address="h:1"),
        pool=common_pb2.POOL_DECODE,
        state=inference_pb2.WORKER_STATE_READY,
        heartbeat=inference_pb2.Heartbeat(
            pages=inference_pb2.PageCounts(total=10, free=4, live=6),
            totals=inference_pb2.WorkerTotals(cached_tokens=30, looked_up_tokens=40),
        ),
    )
    return inference_pb2.GetClusterStatusResponse(workers=[worker], active_requests=2)


def usage():
    """What the last message of a stream carries."""
    stats = common_pb2.RequestStats(
        decode_cached_tokens=32,
        prefill_computed_tokens=8,
        pages_moved=3,
        bytes_moved=3000,
        cached_tokens=32,
    )
    return inference_pb2.Usage(
        prompt_tokens=40, completion_tokens=2, stats=stats, ttft_ms=5, decode_workers=["decode-0"]
    )


async def abort(context, code, message, *details):
    """End a call with a rich status."""
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        status.details.add().Pack(detail)
    rich = rpc_status.to_status(status)
    await context.abort(rich.code, rich.details, rich.trailing_metadata)


def violation(field, description, reason="INVALID_REQUEST"):
    """The detail that names a wrong field."""
    entry = error_details_pb2.BadRequest.FieldViolation(
        field=field, description=description, reason=reason
    )
    return error_details_pb2.BadRequest(field_violations=[entry])


def retry_after(seconds):
    """The detail that asks for a pause."""
    delay = Duration()
    delay.FromMilliseconds(int(1000 * seconds))
    return error_details_pb2.RetryInfo(retry_delay=delay)


@asynccontextmanager
async def serving(
    script: Script, door: Door | None = None
) -> AsyncIterator[tuple[str, ScriptedService]]:
    """Serve on a free port of this loop, in clear or behind a door."""
    door = door or front_door(TlsSettings())
    service = ScriptedService(script)
    server = grpc.aio.server(options=OPTIONS)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    port = door.add_port(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", service
    finally:
        await server.stop(None)


@contextmanager
def serving_in_thread(
    script: Script, door: Door | None = None
) -> Iterator[tuple[str, ScriptedService]]:
    """Serve from a thread of its own, for callers without an event loop."""
    started: list[Any] = []
    is_up = threading.Event()

    async def run() -> None:
        stop = asyncio.Event()
        async with serving(script, door) as served:
            started.extend([served, asyncio.get_running_loop(), stop])
            is_up.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert is_up.wait(5)
    served, loop, stop = started
    try:
        yield served
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def run(script, work):
    """Run `await work(client, service)` against a server that plays `script`."""

    async def scenario():
        async with serving(script) as (address, service), AsyncClient(address) as client:
            return await work(client, service)

    return asyncio.run(scenario())


def _is_one_token(message):
    """Whether a message has one token, its text, and nothing else to tell."""
    told = {field.name for field, _ in message.ListFields()}
    may_tell = {"request_id", "text", "token_ids", "first_index", "begins_in_reasoning"}
    return len(message.token_ids) == TOKEN_BYTES and told <= may_tell
