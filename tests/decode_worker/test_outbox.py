"""What a router that reads slowly gets, and when it is cut off."""

import asyncio

import pytest

from decode_worker.errors import InvalidRequest, SlowRouter
from decode_worker.outbox import Outbox, RequestFailure
from decode_worker.request import Request, TokenDelta
from decode_worker.wire import session_response
from llm_engine.drawing import FinishReason
from llm_engine.sampling import SampledToken, SamplingParams


def make_request(logprobs: int | None = None) -> Request:
    return Request(
        request_id="r",
        attempt=0,
        prompt=(1,),
        params=SamplingParams(logprobs=logprobs),
        emitted={0: (), 1: ()},
        first_stream=2**40,
    )


def delta(
    request: Request,
    index: int,
    *,
    choice: int = 0,
    finish: FinishReason | None = None,
    has_stats: bool = False,
) -> TokenDelta:
    return TokenDelta(
        request=request,
        choice=choice,
        tokens=(SampledToken(token_id=100 + index),),
        first_index=index,
        finish_reason=finish,
        is_last_of_request=finish is not None,
        has_stats=has_stats,
    )


def test_tokens_of_a_choice_are_merged_until_they_are_taken() -> None:
    async def main() -> None:
        outbox, request = Outbox(max_tokens=100), make_request()
        outbox.push(delta(request, 3, has_stats=True))
        outbox.push(delta(request, 0, choice=1))
        outbox.push(delta(request, 4, finish=FinishReason.LENGTH))
        taken = await outbox.take()
        assert taken is not None
        first, second = taken[0]
        assert [token.token_id for token in first.tokens] == [103, 104]
        assert (first.first_index, first.finish_reason) == (3, FinishReason.LENGTH)
        assert (second.choice, second.first_index) == (1, 0)
        assert (first.has_stats, second.has_stats) == (True, False)

        outbox.push(delta(request, 5))
        again = await outbox.take()
        assert again is not None
        assert [each.first_index for each in again[0]] == [5]

    asyncio.run(main())


@pytest.mark.parametrize("comes", ["tokens", "failures"])
def test_a_router_that_never_reads_is_cut_off(comes: str) -> None:
    async def main() -> None:
        outbox, request = Outbox(max_tokens=3), make_request()
        failure = RequestFailure(request_id="r", attempt=0, error=InvalidRequest("no"))

        def add(index: int) -> None:
            if comes == "tokens":
                outbox.push(delta(request, index))
            else:
                outbox.fail(failure)

        for index in range(3):
            add(index)
        assert await outbox.take() is not None
        for index in range(4):
            add(index)
        assert outbox.is_overrun
        # Whatever still comes takes no memory.
        outbox.push(delta(request, 5))
        outbox.fail(failure)
        assert not outbox._deltas
        assert not outbox._failures
        with pytest.raises(SlowRouter, match="more than 3 tokens"):
            await outbox.take()

    asyncio.run(main())


def test_what_was_discarded_is_not_told_and_does_not_count() -> None:
    async def main() -> None:
        outbox, gone, kept = Outbox(max_tokens=3), make_request(), make_request()
        outbox.push(delta(gone, 0))
        outbox.push(delta(gone, 1))
        outbox.discard(gone)
        for index in range(3):
            outbox.push(delta(kept, index))
        taken = await outbox.take()
        assert taken is not None
        assert [each.request for each in taken[0]] == [kept]

    asyncio.run(main())


def test_a_closed_outbox_ends_after_what_waits() -> None:
    async def main() -> None:
        outbox = Outbox(max_tokens=3)
        failure = RequestFailure(request_id="r", attempt=0, error=InvalidRequest("no"))
        outbox.fail(failure)
        outbox.close()
        assert await outbox.take() == ([], [failure])
        assert await outbox.take() is None

    asyncio.run(main())


def test_only_tokens_with_nothing_else_to_tell_are_in_columns() -> None:
    request, telling = make_request(), make_request(logprobs=0)
    merged = delta(request, 3)
    merged.tokens += (SampledToken(token_id=7),)
    plain = [delta(request, 5), delta(request, 6, choice=1)]
    others = [
        merged,
        delta(request, 4, finish=FinishReason.LENGTH),
        delta(request, 0, has_stats=True),
        delta(telling, 0),
    ]

    message = session_response([plain[0], *others, plain[1]], [])

    assert [*message.tokens.streams] == [2**40, 2**40 + 1]
    assert [*message.tokens.token_ids] == [105, 106]
    assert [*message.tokens.indices] == [5, 6]
    assert [each.first_index for each in message.deltas] == [3, 4, 0, 0]
    assert not session_response(others, []).HasField("tokens")
