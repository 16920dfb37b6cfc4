"""When tokens of a stream gather, and when they go at once. In virtual time."""

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import grpc
import pytest

from pagewire.protos import worker_pb2
from pagewire.protos.token_ids import TOKEN_BYTES
from router.pacing import OWN_CALL_US, SHARED_CALL_US, TICK_S, Pace, Pacer
from tests.router.scripted_worker import (
    Answer,
    RouterUnderTest,
    ScriptedWorker,
    Session,
    delta,
    honest,
    running_router,
    tokens,
)
from tests.support.virtual_time import run_virtual


class NotedWorker(ScriptedWorker):
    """A worker that notes when it sends each token of a request's first choice."""

    def __init__(self, **fields: Any) -> None:
        super().__init__("decode-0", **fields)
        self.sent_at: dict[str, list[float]] = {}  # request id |-> time by index

        async def serve(session: Session, submit: worker_pb2.SubmitRequest) -> None:
            times = self.sent_at.setdefault(submit.request_id, [])
            right = session.send

            def send(*deltas: worker_pb2.TokenDelta) -> None:
                for each in deltas:
                    if each.request_id == submit.request_id and each.choice == 0:
                        now = asyncio.get_running_loop().time()
                        times.extend([now] * (len(each.token_ids) // TOKEN_BYTES))
                right(*deltas)

            noted = Session(self)
            noted.outbox, noted.cancelled, noted.send = session.outbox, session.cancelled, send  # type: ignore[method-assign]
            await honest(noted, submit)

        self.serve = serve

    def delays_s(self, answer: Answer) -> list[float]:
        """Return how long each token of a whole answer took to its client."""
        sent_at = self.sent_at[answer.messages[0].request_id]
        arrived_at = [
            at
            for message, at in zip(answer.messages, answer.times, strict=True)
            for _ in range(len(message.token_ids) // TOKEN_BYTES)
        ]
        return [at - sent for at, sent in zip(arrived_at, sent_at, strict=True)]


def with_streams(
    count: int,
    check: Callable[[NotedWorker, list[Answer]], None],
    *,
    token_s: float,
    max_tokens: int = 40,
    **config: Any,
) -> None:
    """Let so many equal streams run at once, and check what their clients got."""

    async def scenario() -> None:
        worker = NotedWorker(token_s=token_s)
        async with running_router(worker, **config) as tested:
            async with asyncio.TaskGroup() as group:
                calls = [
                    group.create_task(tested.generate(max_tokens=max_tokens)) for _ in range(count)
                ]
            answers = [call.result() for call in calls]
            for answer in answers:
                assert answer.error is None
                assert answer.token_ids() == tokens(0, max_tokens)
                assert answer.usage.completion_tokens == max_tokens
            assert tested.router.dispatcher._pacer.sending_us == 0
            check(worker, answers)

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("streams", "token_s", "config"),
    [
        (1, 0.001, {}),  # a lone one
        (32, 0.005, {}),  # few ones
        (256, 0.03, {}),  # many ones whose tokens come slower than the longest time to gather
        (64, 0.001, {"coalesce_ms": 0.0}),
    ],
)
def test_every_token_goes_at_once(streams: int, token_s: float, config: dict[str, Any]) -> None:
    def check(worker: NotedWorker, answers: list[Answer]) -> None:
        for answer in answers:
            assert all(len(each.token_ids) == TOKEN_BYTES for each in answer.messages)
            assert max(worker.delays_s(answer)) < 1e-6

    with_streams(streams, check, token_s=token_s, max_tokens=10, **config)


@pytest.mark.parametrize(("streams", "coalesce_ms"), [(64, 20.0), (300, 20.0), (300, 8.0)])
def test_tokens_of_many_streams_gather_but_not_for_long(streams: int, coalesce_ms: float) -> None:
    interval_s = min(streams * OWN_CALL_US * 1e-6, coalesce_ms / 1000)

    def check(worker: NotedWorker, answers: list[Answer]) -> None:
        for answer in answers:
            delays_s = worker.delays_s(answer)
            assert max(delays_s) < interval_s + 1e-6
            assert delays_s[0] < 1e-6, "the first token does not wait"
            assert delays_s[-1] < 1e-6, "nor does the last one"
            between = [later - earlier for earlier, later in pairwise(answer.times[:-1])]
            assert min(between) > interval_s - TICK_S - 1e-6
            assert len(answer.messages) <= 3 + 40 * 0.001 / (interval_s - TICK_S)

    with_streams(streams, check, token_s=0.001, coalesce_ms=coalesce_ms)


def test_streams_that_have_ended_hold_up_no_others() -> None:
    async def scenario() -> None:
        worker = NotedWorker(token_s=0.002)
        async with running_router(worker) as tested:
            long = asyncio.create_task(tested.generate(max_tokens=100))
            others = [asyncio.create_task(tested.generate(max_tokens=20)) for _ in range(200)]
            await asyncio.wait(others)
            answer = await long

            sizes = [len(message.token_ids) // TOKEN_BYTES for message in answer.messages]
            assert max(sizes[:10]) > 1
            assert sizes[-70:] == [1] * 70

    run_virtual(scenario())


def in_a_crowd(
    scenario: Callable[
        [RouterUnderTest, Session, worker_pb2.SubmitRequest], Coroutine[Any, Any, None]
    ],
    check: Callable[[Answer], None],
    **sampling: Any,
) -> None:
    """Serve one request as a scenario says, while the router has many streams."""

    async def serve(session: Session, submit: worker_pb2.SubmitRequest) -> None:
        if submit.sampling.seed == 1:
            await scenario(tested, session, submit)
        else:
            await honest(session, submit)

    async def main() -> None:
        nonlocal tested
        worker = ScriptedWorker("decode-0", serve=serve)
        async with running_router(worker, retry_delay_s=0.0) as tested:
            crowd = [asyncio.create_task(tested.generate(max_tokens=400)) for _ in range(255)]
            await asyncio.sleep(0.1)
            check(await tested.generate(seed=1, **sampling))
            for each in crowd:
                each.cancel()
            await asyncio.wait(crowd)
            await asyncio.sleep(0.1)

    tested: RouterUnderTest
    run_virtual(main())


def test_a_choice_that_ends_does_not_wait_for_the_others() -> None:
    async def scenario(_: Any, session: Session, submit: worker_pb2.SubmitRequest) -> None:
        session.send(delta(submit, 0, 0), delta(submit, 1, 0))
        await asyncio.sleep(0.002)
        session.send(delta(submit, 0, 1), delta(submit, 1, 1, finish_reason=1))
        await asyncio.sleep(0.1)
        session.send(delta(submit, 0, 2, finish_reason=1))

    def check(answer: Answer) -> None:
        [end] = [
            at
            for message, at in zip(answer.messages, answer.times, strict=True)
            if message.choice == 1 and message.finish_reason
        ]
        assert end - answer.times[0] == pytest.approx(0.002, abs=1e-6)
        assert (answer.token_ids(0), answer.token_ids(1)) == (tokens(0, 3), tokens(1, 2))

    in_a_crowd(scenario, check, n=2)


def test_a_failure_does_not_wait_and_comes_behind_all_tokens() -> None:
    failed_at = 0.0

    async def scenario(_: Any, session: Session, submit: worker_pb2.SubmitRequest) -> None:
        nonlocal failed_at
        session.send(delta(submit, 0, 0))
        await asyncio.sleep(0.002)
        session.send(delta(submit, 0, 1))
        await asyncio.sleep(0.002)
        session.fail(submit, grpc.StatusCode.INTERNAL)
        failed_at = asyncio.get_running_loop().time()

    def check(answer: Answer) -> None:
        assert answer.error is not None
        assert answer.error.code() is grpc.StatusCode.INTERNAL
        assert answer.token_ids() == tokens(0, 2)
        assert answer.times[-1] == pytest.approx(failed_at, abs=1e-6)

    in_a_crowd(scenario, check)


def test_tokens_that_gather_when_their_worker_gives_up_are_delivered_once() -> None:
    async def scenario(_: Any, session: Session, submit: worker_pb2.SubmitRequest) -> None:
        if submit.attempt == 0:
            session.send(delta(submit, 0, 0))
            await asyncio.sleep(0.002)
            session.send(delta(submit, 0, 1))
            session.fail(submit, grpc.StatusCode.UNAVAILABLE)
        else:
            [state] = submit.choices
            first = len(state.emitted_token_ids) // TOKEN_BYTES
            assert first == 2, "what gathers counts as delivered"
            session.send(delta(submit, 0, first, 8))

    def check(answer: Answer) -> None:
        assert answer.error is None
        assert answer.token_ids() == tokens(0, 10)
        assert answer.usage.stats.resumptions == 1

    in_a_crowd(scenario, check)


def test_streams_that_are_due_within_a_tick_share_a_timer() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        pacer, woken = Pacer(0.02), []
        for due_at in (0.0101, 0.0105, 0.0109, 0.0112):
            pacer.call_at(due_at, lambda due_at=due_at: woken.append((due_at, loop.time())))  # type: ignore[misc]

        assert len(pacer._ticks) == 2
        await asyncio.sleep(0.05)
        assert [due_at for due_at, _ in woken] == [0.0101, 0.0105, 0.0109, 0.0112]
        assert all(0 <= due_at - at < TICK_S for due_at, at in woken)
        assert not pacer._ticks

    run_virtual(scenario())


def test_calls_that_share_a_stream_cost_less_and_so_gather_for_less_long() -> None:
    pacer = Pacer(0.02)
    own, shared = Pace(message_us=OWN_CALL_US), Pace(message_us=SHARED_CALL_US, least_s=0.005)

    pacer.change(100 * SHARED_CALL_US)
    assert pacer.interval_s(own) == pytest.approx(0.002)
    assert pacer.interval_s(shared) == 0.005
    pacer.change(100 * OWN_CALL_US)
    assert pacer.interval_s(own) == pacer.interval_s(shared) == pytest.approx(0.01)
    pacer.change(2 * pacer.sending_us)
    assert pacer.interval_s(own) == 0.02
