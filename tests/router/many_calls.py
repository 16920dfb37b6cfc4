"""A caller's end of GenerateMany."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import status_pb2

from pagewire.protos import common_pb2, inference_pb2
from pagewire.protos.gathering import READS_TOKENS_KEY
from pagewire.protos.token_ids import pack_token_ids, unpack_token_ids
from tests.router.scripted_worker import RouterUnderTest
from tests.support.virtual_time import wait_until


def asking(max_tokens: int = 5, **fields: Any) -> inference_pb2.GenerateRequest:
    fields.setdefault("token_ids", pack_token_ids([5, 6, 7]))
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens)
    return inference_pb2.GenerateRequest(sampling=sampling, **fields)


@dataclass
class Caller:
    """The caller's end of a stream: what came of each call, and how many messages carried it."""

    call: Any
    responses: dict[int, list[inference_pb2.GenerateResponse]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)  # call id |-> code, OK for a success
    num_messages: int = 0
    num_in_columns: int = 0  # tokens

    async def start(
        self,
        call_id: int,
        request: inference_pb2.GenerateRequest,
        ms: int = 0,
        *,
        interval_ms: int = 0,
    ) -> None:
        await self.call.write(
            inference_pb2.GenerateManyRequest(
                call_id=call_id, start=request, timeout_ms=ms, interval_ms=interval_ms
            )
        )

    async def cancel(self, call_id: int) -> None:
        await self.call.write(inference_pb2.GenerateManyRequest(call_id=call_id))

    async def read(self) -> bool:
        message = await self.call.read()
        if message is grpc.aio.EOF:
            return False
        self.num_messages += 1
        columns = message.tokens
        in_columns = {*columns.call_ids}
        assert len(in_columns) == len(columns.call_ids), "each call at most once"
        assert in_columns.isdisjoint(each.call_id for each in message.results)
        for call_id, token_id, index, text in zip(
            columns.call_ids, columns.token_ids, columns.indices, columns.texts, strict=True
        ):
            assert self.responses[call_id], "the first message of a call has more to tell"
            assert call_id not in self.ends, "nothing follows the end of a call"
            self.num_in_columns += 1
            packed = pack_token_ids([token_id])
            self.responses[call_id].append(
                inference_pb2.GenerateResponse(first_index=index, token_ids=packed, text=text)
            )
        for result in message.results:
            assert result.call_id not in self.ends, "nothing follows the end of a call"
            if result.error_status:
                status = status_pb2.Status.FromString(result.error_status)
                self.ends[result.call_id] = grpc_code(status)
                continue
            self.responses.setdefault(result.call_id, []).append(result.response)
            if result.response.HasField("usage"):
                self.ends[result.call_id] = "OK"
        return True

    async def read_until_ended(self, *call_ids: int) -> None:
        while not set(call_ids) <= self.ends.keys():
            assert await self.read(), "the stream ended before its calls"

    def token_ids(self, call_id: int) -> list[int]:
        token_ids: list[int] = []
        for response in self.responses[call_id]:
            assert response.first_index == len(token_ids), "a gap or a repetition"
            token_ids += unpack_token_ids(response.token_ids)
        return token_ids


def grpc_code(status: status_pb2.Status) -> str:
    return next(each.name for each in grpc.StatusCode if each.value[0] == status.code)


@asynccontextmanager
async def calling(tested: RouterUnderTest, *, reads_tokens: bool = True) -> AsyncIterator[Caller]:
    call = tested.stub.GenerateMany(metadata=((READS_TOKENS_KEY, "1"),) * reads_tokens)
    try:
        yield Caller(call)
    finally:
        call.cancel()
        await wait_until(lambda: tested.router.admission.num_active == 0, timeout_s=5)
