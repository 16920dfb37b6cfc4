"""Bugs of our own, planted: each costs at most the request that meets it, and never a page."""

import asyncio
from typing import Any

import grpc
import pytest

from decode_worker.masks import TokenMasks
from decode_worker.outbox import Outbox
from decode_worker.receiving import PrefillReceivers
from decode_worker.remote_prefill import RemotePrefill
from decode_worker.request import Choice, Request, TokenDelta
from decode_worker.scheduler import Scheduler
from grammars.constraint import Constraint, ConstraintKind
from grammars.store import Grammars
from kv_transfer import receiver
from kv_transfer.driver import RunBlocking
from kv_transfer.messages import ChunkPosted
from kv_transfer.protocol import PagesDigested
from kv_transfer.receiver_protocol import ReceiveDone, ReceiverEvent, ReceiverState, step
from kv_transfer.sender import Sender
from llm_engine.sampling import SamplingParams
from prefill_worker.attempt import Attempt
from tests.decode_worker.harness import ScriptedRouter, WorkerCluster, prompt_of, run
from tests.support.log_records import logged
from tests.support.virtual_time import run_inline, run_virtual, wait_until
from worker.background import BackgroundTasks
from worker.errors import WorkerError
from worker.grammar_threads import GrammarThreads
from worker.wake import Wake

SOON_S = 5.0  # long before any deadline of a transfer


def raises(*_: Any, **__: Any) -> Any:
    raise RuntimeError("planted")


async def raises_later(*_: Any, **__: Any) -> Any:
    raise RuntimeError("planted")


def stops_and_raises(attempt: RemotePrefill, reason: str) -> None:
    assert attempt.receiver is not None
    attempt.receiver.driver.cancel(reason)
    raise RuntimeError("planted")


def raises_at_first_token(outbox: Outbox, delta: TokenDelta) -> None:
    if delta.first_index == 0:
        raise RuntimeError("planted")
    push(outbox, delta)


push = Outbox.push

# (what is broken, by what, whether a prefill pass fails first, how the request ends)
BUGS: dict[str, tuple[Any, str, Any, bool, str]] = {
    "making an attempt": (PrefillReceivers, "_make_attempt", raises, False, "INTERNAL"),
    "an attempt": (RemotePrefill, "run", raises_later, False, "OK"),
    "giving up an attempt": (RemotePrefill, "stop", stops_and_raises, True, "INTERNAL"),
    "closing an attempt": (RemotePrefill, "close", raises_later, False, "OK"),
    "taking the result": (Scheduler, "receive_result", raises, False, "INTERNAL"),
    "letting a group run": (Scheduler, "receive_done", raises, False, "INTERNAL"),
    "telling the first tokens": (Outbox, "push", raises_at_first_token, False, "INTERNAL"),
    "committing pages": (Scheduler, "receive_committed", raises, False, "OK"),
    "taking a request": (Scheduler, "submit", raises, False, "INTERNAL"),
    "granting at the prefill worker": (Sender, "grant", raises, False, "OK"),
    "sending at the prefill worker": (Sender, "run", raises_later, False, "OK"),
    "handing pages to the sender": (Attempt, "progressed", raises, False, "OK"),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_costs_at_most_the_request_that_meets_it_and_no_page(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, method, bug, fails_first, end = BUGS[name]

    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        other = await router.submit(prompt_of(20), max_tokens=40)
        await wait_until(lambda: len(other.tokens[0]) > 1, what="its run")
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, bug)
            cluster.prefills[0].executor.num_failing_passes = int(fails_first)
            stream = await router.submit(prompt_of(30, seed=1), max_tokens=3)
            async with asyncio.timeout(SOON_S):
                await stream.ended.wait()
        if end == "OK":
            stream.assert_equals_oracle()
        else:
            assert stream.failure.code == grpc.StatusCode[end].value[0]
        await router.finish(other)
        await cluster.wait_free(timeout_s=SOON_S)
        await router.finish(await router.submit(prompt_of(30, seed=1)))

    run(scenario, WorkerCluster(num_prefill=2))
    assert any("planted" in str(vars(record)) for record in caplog.records), "nothing was logged"


def raises_for_choices(scheduler: Scheduler, request: Request, choices: Any = None) -> None:
    if choices is not None:
        raise RuntimeError("planted")
    end(scheduler, request)


end = Scheduler.end


@pytest.mark.parametrize(
    ("owner", "method", "bug"),
    [
        (Scheduler, "end", raises_for_choices),
        (Outbox, "discard", raises),
        (PrefillReceivers, "cancel", raises),
    ],
    ids=["ending choices", "dropping tokens", "forgetting the request"],
)
def test_a_bug_in_a_cancellation_ends_its_request_alone(
    owner: type,
    method: str,
    bug: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(cluster: WorkerCluster, router: ScriptedRouter) -> None:
        other = await router.submit(prompt_of(20), max_tokens=40)
        stream = await router.submit(prompt_of(30, seed=1), n=2, max_tokens=40)
        await stream.has_tokens.wait()
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, bug)
            if bug is raises_for_choices:
                await router.cancel_choices(stream, 1)
                await stream.ended.wait()
                assert stream.failure.code == grpc.StatusCode.INTERNAL.value[0]
            else:
                await router.cancel(stream)
            await asyncio.sleep(0.05)
        await router.finish(other)
        await cluster.wait_free(timeout_s=SOON_S)
        await router.finish(await router.submit(prompt_of(30, seed=1)))
        assert logged("cancel_crashed", caplog) == [{"request_id": stream.request_id}]

    run(scenario)


@pytest.mark.parametrize("run_blocking", [run_inline, raises_later], ids=["of one", "of all"])
def test_a_bug_in_masks_ends_the_requests_whose_texts_it_lost(
    run_blocking: RunBlocking, caplog: pytest.LogCaptureFixture
) -> None:
    def request(request_id: str) -> Request:
        params = SamplingParams(constraint=Constraint(kind=ConstraintKind.REGEX, text="x+"))
        made = Request(request_id=request_id, attempt=0, prompt=(1,), params=params, emitted={})
        made.choices = [Choice(made, index, []) for index in range(2)]
        return made

    async def main() -> None:
        ended: list[Request] = []
        tasks = BackgroundTasks()

        def end(request: Request, _: WorkerError) -> None:
            ended.append(request)
            for choice in request.choices:
                choice.is_ended = True

        masks = TokenMasks(
            Grammars(raises, end_token_ids=()),
            threads=GrammarThreads(run_blocking, tasks),
            wake=Wake(),
            on_failure=end,
        )
        requests = [request("r0"), request("r1")]
        masks.follow([choice for each in requests for choice in each.choices])
        await tasks.wait()
        assert ended == requests

    run_virtual(main())
    assert logged("masks_crashed", caplog) == [{"request_id": "r0"}, {"request_id": "r1"}]


@pytest.mark.parametrize("is_prefill", [False, True])
def test_a_worker_ends_that_cannot_free_what_a_bug_left_behind(
    is_prefill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        running = await WorkerCluster().start()
        router = await running.session()
        worker = running.prefills[0] if is_prefill else running.decode
        with monkeypatch.context() as patch:
            if is_prefill:
                patch.setattr(Attempt, "_release_pages", raises_later)
            else:
                patch.setattr(Scheduler, "receive_done", raises)
                patch.setattr(Scheduler, "abandon", raises)
            await router.submit(prompt_of(30))
            async with asyncio.timeout(SOON_S):
                with pytest.raises(RuntimeError, match="planted"):
                    await worker.worker.wait_failed()
        router.call.cancel()

    run_virtual(main())


@pytest.mark.parametrize("event", [ChunkPosted, ReceiveDone, PagesDigested])
def test_a_worker_ends_that_cannot_know_which_pages_are_still_written(
    event: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(state: ReceiverState, met: ReceiverEvent) -> Any:
        if isinstance(met, event):
            raise RuntimeError("planted")
        return step(state, met)

    async def main() -> None:
        running = await WorkerCluster().start()
        router = await running.session()
        monkeypatch.setattr(receiver, "step", breaks)
        await router.submit(prompt_of(30))
        async with asyncio.timeout(SOON_S):
            with pytest.raises(RuntimeError, match="planted"):
                await running.decode.worker.wait_failed()
        router.call.cancel()

    run_virtual(main())
