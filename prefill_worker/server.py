"""PrefillService: connections from decode workers, and one call per attempt."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Protocol

import grpc

from credentials.gate import current_caller
from credentials.party import Party
from kv_transfer.errors import TransferError
from kv_transfer.wire import receiver_message_from_proto
from observability.logs import fields
from pagewire.protos import worker_pb2, worker_pb2_grpc
from prefill_worker.attempt import Attempt
from prefill_worker.errors import (
    ConnectionFailed,
    ConnectionUnknown,
    IncompatibleLayout,
    InvalidPrompt,
    TransportUnknown,
    WrongReceiver,
)
from prefill_worker.wire import PrefillStart, response_to_proto, start_from_proto
from worker import server
from worker.errors import WorkerError

logger = logging.getLogger(__name__)

SERVICE = "pagewire.v1.PrefillService"
STATUS_CODES: dict[type[WorkerError], grpc.StatusCode] = {
    **server.STATUS_CODES,
    InvalidPrompt: grpc.StatusCode.INVALID_ARGUMENT,
    WrongReceiver: grpc.StatusCode.PERMISSION_DENIED,
    IncompatibleLayout: grpc.StatusCode.FAILED_PRECONDITION,
    ConnectionUnknown: grpc.StatusCode.ABORTED,  # decode workers reconnect on this code
    ConnectionFailed: grpc.StatusCode.UNAVAILABLE,
    TransportUnknown: grpc.StatusCode.UNIMPLEMENTED,  # decode workers try their next transport
}


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

    async def open_attempt(self, start: PrefillStart, receiver: Party) -> Attempt:
        """Begin to compute a prompt for a receiver, or raise WorkerError."""
        ...


class PrefillServicer(worker_pb2_grpc.PrefillServiceServicer):
    """Passes starts and transfer messages to the worker, and attempts' messages back.

    Args:
        sink: The worker.
        grant_s: How long a receiver tries to send the first message of a call.
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
            start = await _read_start(requests, self._grant_s)
            attempt = await self._sink.open_attempt(start, receiver=current_caller())
        except WorkerError as error:
            await context.abort(STATUS_CODES[type(error)], str(error))
        reading = asyncio.get_running_loop().create_task(_read(requests, attempt))
        try:
            async for message in attempt.messages():
                yield response_to_proto(message)
        finally:
            reading.cancel()
            attempt.call_ended()


def status_number(error: WorkerError) -> int:
    """Return the google.rpc.Code number of an error."""
    number: int = STATUS_CODES[type(error)].value[0]
    return number


def register_prefill_service(server: grpc.aio.Server, sink: PrefillSink, *, grant_s: float) -> None:
    """Add PrefillService to a server; see PrefillServicer."""
    worker_pb2_grpc.add_PrefillServiceServicer_to_server(  # type: ignore[no-untyped-call]
        PrefillServicer(sink, grant_s=grant_s), server
    )


async def _read_start(
    requests: AsyncIterator[worker_pb2.PrefillRequest], timeout_s: float
) -> PrefillStart:
    first = await server.first_message(requests, "start", timeout_s)
    if first is None:
        raise InvalidPrompt("the first message of a call must be a start")
    try:
        return start_from_proto(first.start)
    except (ValueError, TransferError) as error:
        raise InvalidPrompt(str(error)) from None


async def _read(requests: AsyncIterator[worker_pb2.PrefillRequest], attempt: Attempt) -> None:
    """Pass the receiver's messages to the attempt until they end."""
    try:
        async for request in requests:
            await attempt.handle(receiver_message_from_proto(request.transfer))
    except (grpc.RpcError, TransferError) as error:
        logger.info("prefill_call_broken", extra=fields(error=repr(error)))
    except Exception:
        logger.exception("prefill_call_crashed")
    finally:
        attempt.call_ended()
