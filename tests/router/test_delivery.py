"""Clients that stop reading, over real sockets."""

import asyncio
import logging
from typing import Any

import grpc
import pytest

from pagewire.protos import common_pb2, inference_pb2, inference_pb2_grpc, worker_pb2
from pagewire.protos.token_ids import pack_token_ids
from router.config import RouterConfig
from tests.router.real_front import real_front
from tests.router.scripted_worker import ScriptedWorker, Session, delta
from tests.support.log_records import records_of

SLOW_S = 0.3
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65535)]
BULKY = common_pb2.TokenLogprobs(  # more than the connection holds
    top_token_ids=bytes(500_000), top_logprobs=[-1.0] * 125_000
)


async def bulky(session: Session, submit: worker_pb2.SubmitRequest) -> None:
    for first in range(submit.sampling.max_tokens):
        session.send(delta(submit, 0, first, logprobs=[BULKY]))
        await asyncio.sleep(0)


async def read_all(call: Any) -> list[inference_pb2.GenerateResponse]:
    return [message async for message in call]


def test_clients_that_read_again_too_late_hear_that_they_were_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        worker = ScriptedWorker("decode-0", serve=bulky)
        config = RouterConfig(slow_client_timeout_s=SLOW_S)
        async with (
            real_front(worker, config) as (router, address),
            grpc.aio.insecure_channel(address, options=SMALL_WINDOW) as channel,
        ):
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            request = inference_pb2.GenerateRequest(
                token_ids=pack_token_ids([5, 6]),
                sampling=common_pb2.SamplingParams(max_tokens=4, logprobs=1),
            )
            # Not even the first message fits.
            calls = [stub.Generate(request) for _ in range(2)]
            while not router.admission.num_active:
                await asyncio.sleep(0.01)
            while router.admission.num_active:
                await asyncio.sleep(0.01)

            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError, match="took nothing") as caught:
                    await read_all(call)
                assert caught.value.code() is grpc.StatusCode.CANCELLED
            answer = await read_all(stub.Generate(request))
            assert answer[-1].HasField("usage"), "the connection serves others"

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(scenario(), 20))
    assert not records_of(caplog)
