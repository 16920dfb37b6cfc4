"""The gateway's connection to the routers: generate calls that outlive it, and single calls."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from http_gateway.answers import Answers, CallReader
from http_gateway.found_routers import FindRouters, FoundRouters
from pagewire import AuthenticationError, ClusterStatus, Model, PagewireError, UnavailableError
from pagewire.calls import Metadata
from pagewire.protos import inference_pb2
from pagewire.protos.token_ids import pack_token_ids, unpack_token_ids
from pagewire.resumption import ResumableCall
from pagewire.routers import Connector, MakeStub
from pagewire.wire import model_from, status_from

CALL_TIMEOUT_S = 10.0  # of calls that a router answers at once
TOKENIZE_TIMEOUT_S = 60.0  # a router that starts waits for a worker's model, 30 s by default
CALLER_FRESH_S = 2.0  # how long a router's answer to a caller is valid
MOST_CALLERS = 1024  # that are known at a time
LOOK_PERIOD_S = 1.0  # between two looks whether a first router serves
NO_WORKER = "no decode worker takes requests"
ALLOWED = (
    "a tenants file, or front_tls.client_authority_file of the gateway, where other hosts "
    "can connect to it; or insecure, if whoever can connect may use the model"
)

INFERENCE_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """The router's answer to a caller."""

    model: Model | None  # the served model; None: it knows none yet
    tenant: str  # the tenant of the call; empty: the router does not distinguish callers
    until: float  # loop time; then it is asked again


class RouterOpen(UnavailableError):
    """The router serves whoever connects to it, and strangers can connect to the gateway."""


class NoWorker(UnavailableError):
    """No router has a decode worker that takes requests."""


class RouterLink:
    """Talks to the routers from one event loop; connects when first needed, and reconnects.

    Each call carries the authorization of its caller, and each stream serves one caller alone: the
    router checks it, and nothing here can act for another caller.
    `authorization` is a header's value, empty for none.

    Args:
        find_routers: Returns the routers' addresses; called before each connection.
        request_timeout_s: Limit of a generation.
        resume_s: How long a generation that has lost its router looks for another.
        tick_s: See Answers.
        connector: Makes gRPC channels to an address.
        needs_tenants: Whether to serve nobody through a router that does not distinguish callers.
    """

    def __init__(
        self,
        find_routers: FindRouters,
        *,
        request_timeout_s: float,
        resume_s: float,
        tick_s: float,
        connector: Connector,
        needs_tenants: bool = False,
    ) -> None:
        self._routers = FoundRouters(find_routers, connector)
        self._timeout_s = request_timeout_s
        self._resume_s = resume_s
        self._tick_s = tick_s
        self._needs_tenants = needs_tenants
        self._may_be_open = needs_tenants  # until a router has refused a caller without a token
        self._callers: OrderedDict[str, Caller] = OrderedDict()
        self._is_open = False  # as far as is known, the router does not distinguish callers

    async def start(
        self,
        authorization: str,
        requests: Sequence[inference_pb2.GenerateRequest],
        interval_s: float,
    ) -> Answers:
        """Start one call or several, whose answers are read together.

        Args:
            authorization: The caller's.
            requests: One for each call.
            interval_s: Shortest time between two messages of a call; output in between travels
                together.

        Raises:
            PagewireError: No router can be found.
        """
        await self._routers.locate()
        calls: list[ResumableCall] = []

        def cancel() -> None:
            for call in calls:
                call.cancel()

        answers = Answers(len(requests), cancel=cancel, tick_s=self._tick_s)
        try:
            for number, request in enumerate(requests):
                call = ResumableCall(
                    request,
                    routers=self._routers,
                    reader=CallReader(answers, number),
                    metadata=_metadata(self.key(authorization)),
                    timeout_s=self._timeout_s,
                    resume_s=self._resume_s,
                    interval_s=interval_s,
                )
                calls.append(call)
        except PagewireError:
            answers.close()
            raise
        return answers

    def key(self, authorization: str) -> str:
        """Return a key of the caller, the same for all if the router does not distinguish them."""
        return "" if self._is_open else authorization

    async def tenant(self, authorization: str) -> str:
        """Return the tenant of a call; empty: the router does not distinguish callers.

        Raises:
            PagewireError: The router refuses the caller, does not answer, or must distinguish
                callers and does not.
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
        """Return the router's view of the cluster, for operators.

        Raises:
            PagewireError: The router does not answer, or the caller is no operator.
        """
        request = inference_pb2.GetClusterStatusRequest()
        response = await self._call("GetClusterStatus", request, authorization, CALL_TIMEOUT_S)
        if response.is_partial:
            message = "this is for operators of the cluster; the token's tenant is not one"
            raise AuthenticationError(message, code="PERMISSION_DENIED")
        self._check_router(has_tenants=bool(response.tenants))
        return status_from(response)

    async def is_serving(self) -> bool:
        """Return whether a router has a decode worker that takes requests; anybody may ask.

        Raises:
            PagewireError: No router answers, or it must distinguish callers and does not.
        """
        request = health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE)
        await self._routers.locate()
        for _ in self._routers.addresses:
            response = await self._call(
                "Check", request, "", CALL_TIMEOUT_S, health_pb2_grpc.HealthStub
            )
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                if self._may_be_open:
                    with suppress(AuthenticationError):  # a router that does refuses this caller
                        await self._caller("")
                    self._may_be_open = False
                return True
            self._routers.pass_over(self._routers.address)
        return False

    async def wait_ready(self, waits: Callable[[PagewireError], None]) -> None:
        """Wait until a request would find a worker; the caller bounds the wait.

        Args:
            waits: Gets the error why it would not; called again for another kind of error.
        """
        told: type[PagewireError] | None = None
        while True:
            error: PagewireError = NoWorker(NO_WORKER, code="UNAVAILABLE")
            try:
                if await self.is_serving():
                    return
            except PagewireError as found:
                error = found
            if type(error) is not told:
                told = type(error)
                waits(error)
            await asyncio.sleep(LOOK_PERIOD_S)

    async def tokenize(
        self, authorization: str, request: inference_pb2.TokenizeRequest
    ) -> list[int]:
        """Return the token ids that a generation would take."""
        response = await self._call("Tokenize", request, authorization, TOKENIZE_TIMEOUT_S)
        return unpack_token_ids(response.token_ids)

    async def detokenize(self, authorization: str, request: inference_pb2.DetokenizeRequest) -> str:
        """Return the text of tokens, special ones included."""
        response = await self._call("Detokenize", request, authorization, TOKENIZE_TIMEOUT_S)
        return str(response.text)

    async def pieces(self, authorization: str, model: Model, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each of any number of tokens, special ones included."""
        most = model.max_context_tokens  # that a router takes at a time
        pieces: list[str] = []
        for begin in range(0, len(token_ids), most):
            request = inference_pb2.DetokenizeRequest(
                model=model.name,
                token_ids=pack_token_ids(token_ids[begin : begin + most]),
                with_pieces=True,
            )
            response = await self._call("Detokenize", request, authorization, TOKENIZE_TIMEOUT_S)
            pieces += response.pieces
        return pieces

    async def aclose(self) -> None:
        """End all calls, and the connections."""
        await self._routers.aclose()

    async def _caller(self, authorization: str) -> Caller:
        loop = asyncio.get_running_loop()
        caller = self._callers.get(self.key(authorization))
        if caller is None or loop.time() >= caller.until:
            request = inference_pb2.ListModelsRequest()
            response = await self._call("ListModels", request, authorization, CALL_TIMEOUT_S)
            self._check_router(has_tenants=bool(response.tenant))
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

    def _check_router(self, *, has_tenants: bool) -> None:
        """Refuse to let strangers use a router by way of this gateway."""
        if self._needs_tenants and not has_tenants:
            self._may_be_open = True
            found = f"the router at {self._routers.address} has none"
            message = f"router.tenants_file: {found}; allowed: {ALLOWED}"
            raise RouterOpen(message, code="UNAVAILABLE")

    async def _call(
        self,
        method: str,
        request: object,
        authorization: str,
        timeout_s: float,
        make_stub: MakeStub | None = None,
    ) -> Any:
        await self._routers.locate()
        metadata = _metadata(authorization)
        response = await self._routers.call(method, request, timeout_s, metadata, make_stub)
        self._routers.note_answer()
        return response


def _metadata(authorization: str) -> Metadata:
    return (("authorization", authorization),) if authorization else ()
