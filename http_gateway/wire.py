"""The gateway's connection to a router: one stream for all generations, and single calls."""

import asyncio
import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from http_gateway.answers import Answers
from http_gateway.errors import HttpError
from observability.logs import fields
from pagewire import (
    AuthenticationError,
    ClusterStatus,
    ConnectionFailedError,
    Model,
    PagewireError,
    UnavailableError,
)
from pagewire.protos import inference_pb2, inference_pb2_grpc
from pagewire.protos.grpc_options import MAX_STREAM_AGE_S
from pagewire.protos.token_ids import unpack_token_ids
from pagewire.routers import Channel, Connector
from pagewire.wire import (
    detokenize_request,
    error_from,
    error_from_status,
    model_from,
    status_from,
)
from protos.field_count import LARGE_REQUEST_BYTES, has_more_fields

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0  # of what a router answers at once
TOKENIZE_TIMEOUT_S = 60.0  # a router that starts waits for a worker's model, 30 s by default
MAX_MS = 2**32 - 1
ENVELOPE_BYTES = 64  # of a GenerateManyRequest, around what it starts
ENVELOPE_FIELDS = 4
CALLER_FRESH_S = 2.0  # how long what the router said to a caller holds
MOST_CALLERS = 1024  # that are known at a time
MOST_IDLE_STREAMS = 64  # of callers that pause

INFERENCE_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name

FindRouter = Callable[[], Awaitable[str]]  # returns host:port


@dataclass(slots=True)
class _Call:
    """One running call of the stream."""

    number: int  # among those of its HTTP request
    answers: Answers


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """What the router says to a caller."""

    model: Model | None  # that it serves; None: it knows none yet
    tenant: str  # for whom the call is made; empty: the router tells no callers apart
    until: float  # loop time; then it is asked again


class RouterLink:
    """Talks to one router from one event loop; connects when it is first needed, and anew.

    Each call is made with the authorization of whoever asked for it, and each stream has that of
    one caller alone: the router judges them, and nothing here could say that they are others.
    `authorization` is a header's value, empty for none.

    Args:
        find_router: Says where the router is, each time before it is connected to.
        request_timeout_s: Of a generation.
        tick_s: See Answers.
        connector: Makes gRPC channels to an address.
    """

    def __init__(
        self,
        find_router: FindRouter,
        *,
        request_timeout_s: float,
        tick_s: float,
        connector: Connector,
    ) -> None:
        self._find_router = find_router
        self._timeout_s = request_timeout_s
        self._tick_s = tick_s
        self._connector = connector
        self._address = ""
        self._channel: Channel = None
        self._stub: Any = None
        # caller |-> the stream that its calls start on, last used last
        self._starting: OrderedDict[str, _Stream] = OrderedDict()
        self._streams: set[_Stream] = set()  # with those on which older calls still run
        self._connecting = asyncio.Lock()
        self._callers: OrderedDict[str, Caller] = OrderedDict()
        self._is_open = False  # the router tells no callers apart, as far as is known

    async def start(
        self,
        authorization: str,
        requests: Sequence[inference_pb2.GenerateRequest],
        interval_s: float,
    ) -> Answers:
        """Start one call or several, whose answers are read together.

        Args:
            authorization: Of the caller.
            requests: One for each call.
            interval_s: Least time between two messages of a call; what comes between travels
                together.

        Raises:
            HttpError: A request is longer than the router reads, or has more fields.
            PagewireError: The router does not answer.
        """
        await _check_size(requests, await self.model(authorization))
        stream = await self._open_stream(self.key(authorization))
        return stream.start(
            requests,
            timeout_ms=math.ceil(1000 * self._timeout_s),
            interval_ms=math.ceil(1000 * interval_s),
            tick_s=self._tick_s,
        )

    def key(self, authorization: str) -> str:
        """Return what tells callers apart: all are one where the router makes no difference."""
        return "" if self._is_open else authorization

    async def tenant(self, authorization: str) -> str:
        """Return for whom a call would be made; empty: the router tells no callers apart.

        Raises:
            PagewireError: It refuses the caller, or does not answer.
        """
        return (await self._caller(authorization)).tenant

    async def model(self, authorization: str) -> Model:
        """Return the served model.

        Raises:
            PagewireError: The router does not answer, knows none yet, or refuses the caller.
        """
        caller = await self._caller(authorization)
        if caller.model is None:
            raise UnavailableError("the cluster is still starting", code="UNAVAILABLE")
        return caller.model

    async def status(self, authorization: str) -> ClusterStatus:
        """Return what the router tells an operator of the cluster.

        Raises:
            PagewireError: The router does not answer, or the caller is none.
        """
        request = inference_pb2.GetClusterStatusRequest()
        response = await self._call("GetClusterStatus", request, authorization, CALL_TIMEOUT_S)
        if response.is_partial:
            message = "this is for operators of the cluster; the token's tenant is none"
            raise AuthenticationError(message, code="PERMISSION_DENIED")
        return status_from(response)

    async def is_serving(self) -> bool:
        """Return whether the router has a decode worker that takes requests; it tells everybody.

        Raises:
            PagewireError: The router does not answer.
        """
        await self._connect()
        stub = health_pb2_grpc.HealthStub(self._channel)
        request = health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE)
        try:
            response = await stub.Check(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as failure:
            raise error_from(failure, self._address, CALL_TIMEOUT_S) from failure
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def tokenize(
        self, authorization: str, request: inference_pb2.TokenizeRequest
    ) -> list[int]:
        """Return the token ids that a generation would take."""
        response = await self._call("Tokenize", request, authorization, TOKENIZE_TIMEOUT_S)
        return unpack_token_ids(response.token_ids)

    async def detokenize(
        self,
        authorization: str,
        token_ids: Sequence[int],
        model: str,
        *,
        with_pieces: bool = False,
    ) -> tuple[str, list[str]]:
        """Return the text of tokens, special ones included, and if asked for that of each."""
        request = detokenize_request(token_ids, model, False, with_pieces=with_pieces)
        response = await self._call("Detokenize", request, authorization, TOKENIZE_TIMEOUT_S)
        return response.text, list(response.pieces)

    async def aclose(self) -> None:
        """End the stream with all its calls, and the connection."""
        for stream in list(self._streams):
            await stream.aclose()
        if self._channel:
            await self._channel.close()

    async def _caller(self, authorization: str) -> Caller:
        loop = asyncio.get_running_loop()
        caller = self._callers.get(self.key(authorization))
        if caller is None or loop.time() >= caller.until:
            request = inference_pb2.ListModelsRequest()
            response = await self._call("ListModels", request, authorization, CALL_TIMEOUT_S)
            caller = Caller(
                model=model_from(response.models[0]) if response.models else None,
                tenant=response.tenant,
                until=loop.time() + CALLER_FRESH_S if response.models else 0.0,
            )
            self._is_open = not caller.tenant
            self._callers[self.key(authorization)] = caller
            self._callers.move_to_end(self.key(authorization))
            if len(self._callers) > MOST_CALLERS:
                self._callers.popitem(last=False)
        return caller

    async def _call(
        self, method: str, request: object, authorization: str, timeout_s: float
    ) -> Any:
        await self._connect()
        call = getattr(self._stub, method)
        try:
            return await call(request, timeout=timeout_s, metadata=_metadata(authorization))
        except grpc.aio.AioRpcError as failure:
            error = error_from(failure, self._address, timeout_s)
            raise await self._connector.explain(error, self._address) from failure

    async def _open_stream(self, key: str) -> "_Stream":
        stream = self._starting.get(key)
        if stream and asyncio.get_running_loop().time() >= stream.retires_at:
            stream.retire()
            del self._starting[key]
        await self._connect()
        stream = self._starting.get(key)
        if stream is None or stream.is_over:
            self._drop_unused()
            stream = self._starting[key] = _Stream(self._stub.GenerateMany, self._address, key)
            self._streams.add(stream)
        self._starting.move_to_end(key)
        return stream

    def _drop_unused(self) -> None:
        """Forget streams that are over, and end those of callers that have paused longest."""
        self._streams = {each for each in self._streams if not each.is_over}
        for key in [key for key, each in self._starting.items() if each.is_over]:
            del self._starting[key]
        idle = [key for key, each in self._starting.items() if each.is_idle]
        for key in idle[: max(0, len(idle) - MOST_IDLE_STREAMS + 1)]:
            self._starting.pop(key).retire()

    async def _connect(self) -> None:
        """Make a channel to where the router is now; that of a running stream stays."""
        if self._channel and any(not each.is_over for each in self._starting.values()):
            return
        async with self._connecting:
            address = await self._find_router()
            if address == self._address:
                return
            if self._channel:
                await self._channel.close()
            self._address = address
            self._channel = self._connector(address)
            self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]


def _metadata(authorization: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", authorization),) if authorization else ()


async def _check_size(requests: Sequence[inference_pb2.GenerateRequest], model: Model) -> None:
    """Refuse what would end the stream, and so all calls on it."""
    max_bytes, max_fields = model.max_request_bytes, model.max_request_fields - ENVELOPE_FIELDS
    for request in requests:
        if (size := request.ByteSize() + ENVELOPE_BYTES) > max_bytes:
            message = f"the request takes {size} bytes for the router; allowed: at most {max_bytes}"
            raise HttpError(413, message, code="request_too_large")
        if size > LARGE_REQUEST_BYTES:
            raw = request.SerializeToString()
            if await asyncio.to_thread(has_more_fields, raw, request.DESCRIPTOR, max_fields):
                message = (
                    f"the request has too many parts for the router; allowed: at most {max_fields}"
                )
                raise HttpError(413, message, code="request_too_large")


class _Stream:
    """One GenerateMany stream; when it breaks, its calls fail, and the next ones need another."""

    def __init__(self, method: Callable[..., Any], address: str, authorization: str) -> None:
        self.is_over = False
        self.retires_at = asyncio.get_running_loop().time() + MAX_STREAM_AGE_S
        self._is_retired = False
        self._address = address
        self._calls: dict[int, _Call] = {}  # call id |-> of those that run
        self._ids = itertools.count(1)
        self._outbox: asyncio.Queue[inference_pb2.GenerateManyRequest | None] = asyncio.Queue()
        call = method(self._requests(), metadata=_metadata(authorization))
        self._reader = asyncio.create_task(self._read(call), name="router")

    @property
    def is_idle(self) -> bool:
        """Whether no call runs on it."""
        return not self._calls

    def start(
        self,
        requests: Sequence[inference_pb2.GenerateRequest],
        *,
        timeout_ms: int,
        interval_ms: int,
        tick_s: float,
    ) -> Answers:
        call_ids = [next(self._ids) for _ in requests]
        cancel = partial(self._cancel, call_ids)
        answers = Answers(len(requests), cancel=cancel, tick_s=tick_s, timeout_s=timeout_ms / 1000)
        for number, (call_id, request) in enumerate(zip(call_ids, requests, strict=True)):
            self._calls[call_id] = _Call(number, answers)
            self._outbox.put_nowait(
                inference_pb2.GenerateManyRequest(
                    call_id=call_id,
                    start=request,
                    timeout_ms=min(timeout_ms, MAX_MS),
                    interval_ms=min(interval_ms, MAX_MS),
                )
            )
        return answers

    def retire(self) -> None:
        """Start no more calls; the stream ends with the last of those that run."""
        self._is_retired = True
        self._end_if_idle()

    async def aclose(self) -> None:
        self._reader.cancel()
        await asyncio.wait([self._reader])

    def _cancel(self, call_ids: Sequence[int]) -> None:
        for call_id in call_ids:
            if self._calls.pop(call_id, None) and not self.is_over:
                self._outbox.put_nowait(inference_pb2.GenerateManyRequest(call_id=call_id))
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._is_retired and not self._calls:
            self._outbox.put_nowait(None)

    async def _requests(self) -> AsyncIterator[inference_pb2.GenerateManyRequest]:
        while (request := await self._outbox.get()) is not None:
            yield request

    async def _read(self, stream: Any) -> None:
        error: PagewireError = ConnectionFailedError(
            f"the router at {self._address} ended the stream", code="UNAVAILABLE"
        )
        try:
            async for message in stream:
                for result in message.results:
                    self._take(result)
                self._end_if_idle()
        except grpc.aio.AioRpcError as failure:
            error = error_from(failure, self._address, 0.0)
        finally:
            self.is_over = True
            stream.cancel()
            self._outbox.put_nowait(None)  # gRPC's task that reads it would wait for ever
            if self._calls and not isinstance(error, AuthenticationError):
                log.warning(
                    "router_lost", extra=fields(num_calls=len(self._calls), reason=error.message)
                )
            for call in self._calls.values():
                call.answers.fail(call.number, error)

    def _take(self, result: inference_pb2.CallResult) -> None:
        call = self._calls.get(result.call_id)
        if call is None:  # it was cancelled meanwhile
            return
        if status := result.error_status:
            del self._calls[result.call_id]
            call.answers.fail(call.number, error_from_status(status))
            return
        response = result.response
        is_last = response.HasField("usage")
        if is_last:
            del self._calls[result.call_id]
        call.answers.add(call.number, response, is_last=is_last)
