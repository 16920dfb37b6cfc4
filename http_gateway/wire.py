"""The gateway's connection to the routers: generate calls that outlive them, and single calls."""

import asyncio
from collections.abc import Sequence
from typing import Any

from http_gateway.answers import Answers, CallReader
from http_gateway.found_routers import FindRouters, FoundRouters
from pagewire import ClusterStatus, Model, PagewireError, UnavailableError
from pagewire.protos import inference_pb2
from pagewire.protos.token_ids import unpack_token_ids
from pagewire.resumption import ResumableCall
from pagewire.routers import ChannelFactory, open_channel
from pagewire.wire import detokenize_request, model_from, status_from

CALL_TIMEOUT_S = 10.0  # of what a router answers at once
TOKENIZE_TIMEOUT_S = 60.0  # a router that starts waits for a worker's model, 30 s by default
MODEL_FRESH_S = 2.0  # how long what the router said about its model holds


class RouterLink:
    """Talks to the routers from one event loop; connects when it is first needed, and anew.

    Args:
        find_routers: Says where the routers are, each time before one is connected to.
        request_timeout_s: Of a generation.
        resume_s: How long a generation that has lost its router looks for another.
        tick_s: See Answers.
        channel_factory: Makes a gRPC channel to an address.
    """

    def __init__(
        self,
        find_routers: FindRouters,
        *,
        request_timeout_s: float,
        resume_s: float,
        tick_s: float,
        channel_factory: ChannelFactory = open_channel,
    ) -> None:
        self._routers = FoundRouters(find_routers, channel_factory)
        self._timeout_s = request_timeout_s
        self._resume_s = resume_s
        self._tick_s = tick_s
        self._model: Model | None = None
        self._model_until = 0.0  # loop time

    async def start(
        self, requests: Sequence[inference_pb2.GenerateRequest], interval_s: float
    ) -> Answers:
        """Start one call or several, whose answers are read together.

        Args:
            requests: One for each call.
            interval_s: Least time between two messages of a call; what comes between travels
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
                    timeout_s=self._timeout_s,
                    resume_s=self._resume_s,
                    interval_s=interval_s,
                )
                calls.append(call)
        except PagewireError:
            answers.close()
            raise
        return answers

    async def model(self) -> Model:
        """Return the served model.

        Raises:
            PagewireError: The router does not answer, or knows none yet.
        """
        loop = asyncio.get_running_loop()
        if self._model is None or loop.time() >= self._model_until:
            request = inference_pb2.ListModelsRequest()
            response = await self._call("ListModels", request, CALL_TIMEOUT_S)
            if not response.models:
                raise UnavailableError("the cluster is still starting", code="UNAVAILABLE")
            self._model = model_from(response.models[0])
            self._model_until = loop.time() + MODEL_FRESH_S
        return self._model

    async def status(self) -> ClusterStatus:
        """Return what the router knows of the cluster.

        Raises:
            PagewireError: The router does not answer.
        """
        request = inference_pb2.GetClusterStatusRequest()
        return status_from(await self._call("GetClusterStatus", request, CALL_TIMEOUT_S))

    async def tokenize(self, request: inference_pb2.TokenizeRequest) -> list[int]:
        """Return the token ids that a generation would take."""
        response = await self._call("Tokenize", request, TOKENIZE_TIMEOUT_S)
        return unpack_token_ids(response.token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], model: str, *, with_pieces: bool = False
    ) -> tuple[str, list[str]]:
        """Return the text of tokens, special ones included, and if asked for that of each."""
        request = detokenize_request(token_ids, model, False, with_pieces=with_pieces)
        response = await self._call("Detokenize", request, TOKENIZE_TIMEOUT_S)
        return response.text, list(response.pieces)

    async def aclose(self) -> None:
        """End all calls, and the connections."""
        await self._routers.aclose()

    async def _call(self, method: str, request: object, timeout_s: float) -> Any:
        await self._routers.locate()
        return await self._routers.call(method, request, timeout_s)
