"""PrefillService: connections from decode workers, and a stream from each with all its attempts."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Protocol

import grpc

from credentials.gate import current_caller
from credentials.party import Party
from kv_transfer.errors import TransferError
from kv_transfer.wire import receiver_message_from_proto
from observability.logs import fields
from pagewire.protos import worker_pb2, worker_pb2_grpc
from pagewire.protos.gathering import Waiting, scatter
from prefill_worker.attempt import Attempt
from prefill_worker.errors import (
    ConnectionFailed,
    ConnectionUnknown,
    IncompatibleLayout,
    InvalidPrompt,
    TransportUnknown,
    WrongMessage,
    WrongReceiver,
)
from prefill_worker.wire import (
    PrefillEnd,
    PrefillMessage,
    PrefillStart,
    response_to_proto,
    start_from_proto,
)
from worker import server
from worker.errors import InternalError, WorkerError

logger = logging.getLogger(__name__)

SERVICE = "pagewire.v1.PrefillService"
STATUS_CODES: dict[type[WorkerError], grpc.StatusCode] = {
    **server.STATUS_CODES,
    InvalidPrompt: grpc.StatusCode.INVALID_ARGUMENT,
    WrongMessage: grpc.StatusCode.INVALID_ARGUMENT,
    WrongReceiver: grpc.StatusCode.PERMISSION_DENIED,
    IncompatibleLayout: grpc.StatusCode.FAILED_PRECONDITION,
    ConnectionUnknown: grpc.StatusCode.ABORTED,  # decode workers reconnect on this code
    ConnectionFailed: grpc.StatusCode.UNAVAILABLE,
    TransportUnknown: grpc.StatusCode.UNIMPLEMENTED,  # decode workers try their next transport
}
MOST_WAITING = 1024  # responses of a stream before its next requests wait

Tell = Callable[[PrefillMessage], None]


class PrefillSink(Protocol):
    """The worker, as calls see it."""

    async def connect(
        self,
        *,
        receiver: Party,
        sender_incarnation: int,
        connection_id: str,
        transport: str,
        offer: bytes,
        layout: str,
        contract_version: int,
    ) -> None:
        """Run this side's half of a connection's set-up, or raise WorkerError."""
        ...

    def open_attempt(self, start: PrefillStart, receiver: Party, tell: Tell) -> Attempt:
        """Begin to compute a prompt for a receiver, or raise WorkerError.

        `tell` takes the attempt's messages. The last one is a PrefillEnd, and comes after this
        has returned.
        """
        ...


class PrefillServicer(worker_pb2_grpc.PrefillServiceServicer):
    """Makes connections, and serves streams of attempts.

    Args:
        sink: The worker.
        grant_s: How long the first message of a stream may take.
    """

    def __init__(self, sink: PrefillSink, *, grant_s: float) -> None:
        self._sink = sink
        self._grant_s = grant_s

    async def Connect(
        self, request: worker_pb2.ConnectRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ConnectResponse:
        receiver = current_caller()
        try:
            if (request.receiver.worker_id, request.receiver.incarnation) != (
                receiver.name,
                receiver.incarnation,
            ):
                raise WrongReceiver(f"receiver is not {receiver}, which makes the call")
            await self._sink.connect(
                receiver=receiver,
                sender_incarnation=request.sender_incarnation,
                connection_id=request.connection_id,
                transport=request.transport,
                offer=request.offer,
                layout=request.layout,
                contract_version=request.receiver.contract_version,
            )
        except WorkerError as error:
            await context.abort(STATUS_CODES[type(error)], str(error))
        return worker_pb2.ConnectResponse()

    async def Prefill(
        self,
        request_iterator: AsyncIterator[worker_pb2.PrefillRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[worker_pb2.PrefillResponse]:
        requests = aiter(request_iterator)
        try:
            first = await server.first_message(requests, "start", self._grant_s)
            if first is None:
                raise WrongMessage("the first message of a stream must be a start")
            stream = _AttemptStream(self._sink, current_caller())
            reading = asyncio.get_running_loop().create_task(stream.read(first, requests))
            try:
                while (response := await stream.take()) is not None:
                    yield response
            finally:
                reading.cancel()
        except WorkerError as error:
            await context.abort(STATUS_CODES[type(error)], str(error))


class _AttemptStream:
    """The attempts of one stream: each ends for itself, and all with the stream."""

    def __init__(self, sink: PrefillSink, receiver: Party) -> None:
        self._sink = sink
        self._receiver = receiver
        self._attempts: dict[int, Attempt] = {}  # attempt id |-> one that has not ended
        self._last_id = 0  # of the newest start
        self._waiting: Waiting[worker_pb2.PrefillResponse] = Waiting()
        self._is_read = False  # nothing more comes from the receiver
        self._error: WorkerError | None = None  # why the stream ends

    async def read(
        self,
        first: worker_pb2.PrefillRequest,
        requests: AsyncIterator[worker_pb2.PrefillRequest],
    ) -> None:
        """Take the receiver's messages until they end; then no attempt goes on."""
        request: worker_pb2.PrefillRequest | None = first
        try:
            while request is not None:
                for each in scatter(request):
                    self._take(each)
                await self._waiting.wait_until_few(MOST_WAITING)
                request = await anext(requests, None)
        except WorkerError as error:
            self._error = error
        except grpc.RpcError as error:
            logger.info("prefill_stream_broken", extra=fields(error=repr(error)))
        except Exception:
            logger.exception("prefill_stream_crashed")
            self._error = InternalError()
        finally:
            self._is_read = True
            for attempt in list(self._attempts.values()):
                attempt.receiver_left()
            self._close_if_over()

    async def take(self) -> worker_pb2.PrefillResponse | None:
        """Return what waits for the receiver; None: all attempts have ended and no more begin.

        Raises:
            WorkerError: The receiver broke the contract.
        """
        response = await self._waiting.take()
        if response is None and self._error is not None:
            raise self._error
        return response

    def _take(self, request: worker_pb2.PrefillRequest) -> None:
        attempt_id = request.attempt_id
        kind = request.WhichOneof("message")
        if kind == "start":
            self._start(attempt_id, request.start)
        elif not 0 < attempt_id <= self._last_id:
            raise WrongMessage(
                f"attempt_id: found {attempt_id}; allowed: 1 to {self._last_id}, of attempts that "
                "have begun"
            )
        elif attempt := self._attempts.get(attempt_id):
            try:
                if kind == "leave":
                    attempt.receiver_left()
                else:
                    attempt.handle(receiver_message_from_proto(request.transfer))
            except TransferError as error:
                logger.info(
                    "prefill_attempt_broken",
                    extra=fields(request_id=attempt.prompt.request_id, error=repr(error)),
                )
                attempt.receiver_left()

    def _start(self, attempt_id: int, message: worker_pb2.PrefillStart) -> None:
        if attempt_id <= self._last_id:
            raise WrongMessage(
                f"attempt_id of a start: found {attempt_id}; allowed: more than {self._last_id}"
            )
        self._last_id = attempt_id
        error: WorkerError
        try:
            start = start_from_proto(message)
            tell = partial(self._tell, attempt_id)
            self._attempts[attempt_id] = self._sink.open_attempt(start, self._receiver, tell)
            return
        except (ValueError, TransferError) as invalid:
            error = InvalidPrompt(str(invalid))
        except WorkerError as refusal:
            error = refusal
        except Exception:
            # A bug in one attempt must not end the stream, which others share.
            logger.exception("start_crashed", extra=fields(request_id=message.request_id))
            error = InternalError()
        self._tell(attempt_id, PrefillEnd(code=status_number(error), message=str(error)))

    def _tell(self, attempt_id: int, message: PrefillMessage) -> None:
        self._waiting.add(response_to_proto(attempt_id, message))
        if isinstance(message, PrefillEnd):
            self._attempts.pop(attempt_id, None)
            self._close_if_over()

    def _close_if_over(self) -> None:
        if self._is_read and not self._attempts:
            self._waiting.close()


def status_number(error: WorkerError) -> int:
    """Return the google.rpc.Code number of an error."""
    number: int = STATUS_CODES[type(error)].value[0]
    return number


def register_prefill_service(server: grpc.aio.Server, sink: PrefillSink, *, grant_s: float) -> None:
    """Add PrefillService to a server; see PrefillServicer."""
    worker_pb2_grpc.add_PrefillServiceServicer_to_server(  # type: ignore[no-untyped-call]
        PrefillServicer(sink, grant_s=grant_s), server
    )
