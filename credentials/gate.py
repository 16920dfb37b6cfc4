"""The server's side: a gate that identifies the caller of every call, or refuses it."""

import inspect
import logging
from collections.abc import Awaitable, Callable, Container, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

import grpc

from credentials.cluster import ClusterCredentials, ProvenCall
from credentials.errors import CredentialsError, NotAllowed, NotProven, WrongIncarnation
from credentials.party import Party, Role
from credentials.replay import ReplayGuard
from credentials.rules import WORKER_CALLERS, is_open
from observability.rare_line import RareLine

logger = logging.getLogger(__name__)

CALL_KEY = "pagewire-call-bin"  # metadata: of the caller
ANSWER_KEY = "pagewire-answer-bin"  # of the callee
INCARNATION_KEY = "pagewire-incarnation"  # of the callee, for a caller that means another start
STATUS_CODES: dict[type[CredentialsError], grpc.StatusCode] = {
    NotProven: grpc.StatusCode.UNAUTHENTICATED,
    WrongIncarnation: grpc.StatusCode.FAILED_PRECONDITION,
    NotAllowed: grpc.StatusCode.PERMISSION_DENIED,
}

_caller: ContextVar[Party] = ContextVar("caller")


def current_caller() -> Party:
    """Return the caller of the current call.

    Raises:
        LookupError: Outside a call that a ServerGate admitted.
    """
    return _caller.get()


class ServerGate(grpc.aio.ServerInterceptor):  # type: ignore[misc] # gRPC has no types
    """Admits only proven callers that the contract allows, and answers with a proof.

    Only methods of HEALTH_SERVICE need no proof. Handlers read `current_caller`.

    Args:
        credentials: The credentials of the serving process.
        callers: "/package.Service/Method" |-> roles that may call it; other methods are refused.
    """

    def __init__(
        self,
        credentials: ClusterCredentials,
        callers: Mapping[str, Container[Role]] = WORKER_CALLERS,
    ) -> None:
        self._credentials = credentials
        self._callers = callers
        self._seen = ReplayGuard()
        self._refusals = RareLine(logger, logging.WARNING, "call_refused")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        if is_open(details.method):
            return await continuation(details)
        try:
            call = self._admit(details.method, dict(details.invocation_metadata).get(CALL_KEY))
        except CredentialsError as error:
            return self._refusing(details.method, error)
        _caller.set(call.caller)
        handler = await continuation(details)
        return handler and _answering(handler, call.answer)

    def _admit(self, method: str, header: bytes | None) -> ProvenCall:
        call = self._credentials.check(method, header)
        if not self._seen.is_new(call.caller, call.number):
            raise NotProven("the call was made before")
        if call.caller.role not in self._callers.get(method, ()):
            raise NotAllowed(f"a {call.caller.role} may not call {method}")
        return call

    def _refusing(self, method: str, error: CredentialsError) -> grpc.RpcMethodHandler:
        async def refuse(requests: Any, context: grpc.aio.ServicerContext) -> None:
            if not isinstance(error, WrongIncarnation):  # the genuine caller logs that one
                self._refusals.write(method=method, peer=context.peer(), reason=str(error))
            # A stranger need not learn how far its forgery came.
            is_stranger = isinstance(error, NotProven)
            text = "the call does not prove that it comes from this cluster"
            told: tuple[tuple[str, str], ...] = ()
            if isinstance(error, WrongIncarnation):
                told = ((INCARNATION_KEY, str(error.incarnation)),)
            await context.abort(
                STATUS_CODES[type(error)], text if is_stranger else str(error), told
            )

        # A stream handler, because a unary one would first wait for the request.
        return grpc.stream_stream_rpc_method_handler(refuse)


def _answering(handler: grpc.RpcMethodHandler, answer: bytes) -> grpc.RpcMethodHandler:
    """Return a handler that first sends the callee's proof."""
    metadata = ((ANSWER_KEY, answer),)
    codec = handler.request_deserializer, handler.response_serializer
    if handler.response_streaming:
        stream = handler.stream_stream if handler.request_streaming else handler.unary_stream

        async def answer_stream(request: Any, context: grpc.aio.ServicerContext) -> None:
            await context.send_initial_metadata(metadata)
            if not inspect.isasyncgenfunction(stream):
                await stream(request, context)
                return
            async with aclosing(stream(request, context)) as responses:
                async for response in responses:
                    await context.write(response)

        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(answer_stream, *codec)
        return grpc.unary_stream_rpc_method_handler(answer_stream, *codec)
    single = handler.stream_unary if handler.request_streaming else handler.unary_unary

    async def answer_once(request: Any, context: grpc.aio.ServicerContext) -> Any:
        await context.send_initial_metadata(metadata)
        return await single(request, context)

    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(answer_once, *codec)
    return grpc.unary_unary_rpc_method_handler(answer_once, *codec)
