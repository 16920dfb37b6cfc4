"""DecodeService: sessions of routers with a decode worker."""

import asyncio
import logging
from collections.abc import AsyncIterator, Container, Sequence
from typing import Protocol

import grpc

from decode_worker.errors import InvalidRequest, SlowRouter
from decode_worker.outbox import Outbox, RequestFailure
from decode_worker.request import Request
from decode_worker.wire import request_from_proto, session_response
from observability.logs import fields
from pagewire.protos import worker_pb2, worker_pb2_grpc
from pagewire.protos.gathering import scatter
from worker import server
from worker.errors import Draining, InternalError, WorkerError
from worker.identity import WorkerIdentity
from worker.wire import cut_reason, worker_from_proto

logger = logging.getLogger(__name__)

SERVICE = "pagewire.v1.DecodeService"
STATUS_CODES: dict[type[WorkerError], grpc.StatusCode] = {
    **server.STATUS_CODES,
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    SlowRouter: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
HELLO_S = 5.0  # from the opening of a session to its first message


class RequestSink(Protocol):
    """What sessions ask of the worker."""

    def open_session(self, router_id: str, incarnation: int, contract_version: int) -> Outbox:
        """Raise WorkerError, or return where the session's answers appear."""
        ...

    def submit(self, request: Request, outbox: Outbox) -> None:
        """Take a request; rejections go to the outbox."""
        ...

    def cancel(self, request_id: str, outbox: Outbox) -> None:
        """Forget a request and free its pages; a no-op when it has ended."""
        ...

    def cancel_choices(self, request_id: str, choices: Container[int], outbox: Outbox) -> None:
        """End some choices of a request; the request ends with its last choice."""
        ...

    def fail(self, request_id: str, error: WorkerError, outbox: Outbox) -> None:
        """End a request and tell its router why; a no-op when it has ended."""
        ...

    def close_session(self, outbox: Outbox) -> None:
        """Cancel all requests of an outbox."""
        ...

    def meet(self, prefill_workers: Sequence[WorkerIdentity]) -> None:
        """Connect to prefill workers that requests may need; must not wait."""
        ...


class DecodeServicer(worker_pb2_grpc.DecodeServiceServicer):
    """Reads requests into the worker and writes one message per step to each router."""

    def __init__(self, sink: RequestSink) -> None:
        self._sink = sink

    async def Session(
        self,
        request_iterator: AsyncIterator[worker_pb2.SessionRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[worker_pb2.SessionResponse]:
        requests = aiter(request_iterator)
        try:
            hello = await _read_hello(requests)
            outbox = self._sink.open_session(
                hello.router_id, hello.incarnation, hello.contract_version
            )
        except WorkerError as error:
            await context.abort(STATUS_CODES[type(error)], str(error))
        reading = asyncio.get_running_loop().create_task(self._read(requests, outbox))
        try:
            while (news := await outbox.take()) is not None:
                deltas, failures = news
                yield session_response(deltas, map(_failure_to_proto, failures))
        except WorkerError as error:
            await context.abort(STATUS_CODES[type(error)], str(error))
        finally:
            reading.cancel()
            self._sink.close_session(outbox)

    async def Meet(
        self, request: worker_pb2.MeetRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.MeetResponse:
        self._sink.meet([worker_from_proto(each) for each in request.prefill_workers])
        return worker_pb2.MeetResponse()

    async def _read(
        self, requests: AsyncIterator[worker_pb2.SessionRequest], outbox: Outbox
    ) -> None:
        try:
            async for first in requests:
                for message in scatter(first):
                    kind = message.WhichOneof("message")
                    if kind == "submit":
                        self._submit(message.submit, outbox)
                    elif kind == "cancel":
                        self._cancel(message.cancel, outbox)
        except grpc.RpcError as error:
            logger.info("session_broken", extra=fields(error=repr(error)))
        except Exception:
            logger.exception("session_crashed")
        finally:
            outbox.close()

    def _submit(self, message: worker_pb2.SubmitRequest, outbox: Outbox) -> None:
        error: WorkerError
        try:
            request = request_from_proto(message)
        except ValueError as invalid:
            error = InvalidRequest(str(invalid))
        else:
            try:
                self._sink.submit(request, outbox)
                return
            except Exception:
                # A bug in one request must not end the session, which other requests share.
                logger.exception("submit_crashed", extra=fields(request_id=message.request_id))
                self._sink.cancel(message.request_id, outbox)  # whatever of it has begun
                error = InternalError()
        outbox.fail(
            RequestFailure(request_id=message.request_id, attempt=message.attempt, error=error)
        )

    def _cancel(self, message: worker_pb2.CancelRequest, outbox: Outbox) -> None:
        try:
            if message.choices:
                self._sink.cancel_choices(message.request_id, message.choices, outbox)
            else:
                self._sink.cancel(message.request_id, outbox)
        except Exception:  # a bug, as in _submit
            logger.exception("cancel_crashed", extra=fields(request_id=message.request_id))
            self._sink.fail(message.request_id, InternalError(), outbox)  # unless it has ended


def register_decode_service(server: grpc.aio.Server, sink: RequestSink) -> None:
    """Add DecodeService to a server."""
    worker_pb2_grpc.add_DecodeServiceServicer_to_server(  # type: ignore[no-untyped-call]
        DecodeServicer(sink), server
    )


async def _read_hello(
    requests: AsyncIterator[worker_pb2.SessionRequest],
) -> worker_pb2.SessionHello:
    first = await server.first_message(requests, "hello", HELLO_S)
    if first is None:
        raise InvalidRequest("the first message of a session must be a hello")
    return first.hello


def _failure_to_proto(failure: RequestFailure) -> worker_pb2.RequestFailure:
    code, _ = STATUS_CODES[type(failure.error)].value
    return worker_pb2.RequestFailure(
        request_id=failure.request_id,
        attempt=failure.attempt,
        code=code,
        message=cut_reason(str(failure.error)),
        failed_passes=failure.failed_passes,
        leaving=isinstance(failure.error, Draining),
    )
