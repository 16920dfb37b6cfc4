"""The router with scripted decode workers: R1 one terminal status, R2 contiguous tokens, R3 nothing
after the end, R4 load counters return to zero (checked by running_router), R5 one worker at a time,
R6 bounded retries, R7 dead workers leave the index."""

import asyncio
import json
import logging
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from grammars.tokenizer_file import tokenizer_digest
from kv_cache.page_hash import page_hashes
from observability.logs import ATTRIBUTE
from options.option import WrongOptions, told_value
from pagewire import SamplingDefaults
from pagewire.protos import common_pb2, inference_pb2, worker_pb2, worker_pb2_grpc
from pagewire.protos.gathering import gather
from pagewire.protos.token_ids import TOKEN_BYTES, pack_token_ids, unpack_token_ids
from pagewire.wire import model_from
from protos.contract import CONTRACT_VERSION
from router import wire
from router.config import RouterConfig
from router.generation import Generation
from router.health import INFERENCE_SERVICE
from tests.router.scripted_worker import (
    EOS,
    LENGTH,
    PAGE_SIZE,
    STOP,
    VOCAB_SIZE,
    RouterUnderTest,
    ScriptedWorker,
    Serve,
    Session,
    delta,
    honest,
    running_router,
    token_at,
    tokens,
)
from tests.router.tokenizers_for_tests import byte_level
from tests.support.rarely import rarely
from tests.support.virtual_time import run_virtual, seeded, wait_until

Submit = worker_pb2.SubmitRequest


def once(first: Serve, then: Serve = honest) -> Serve:
    """Behave differently for the first attempt of a request."""

    async def serve(session: Session, submit: Submit) -> None:
        await (first if submit.attempt == 0 else then)(session, submit)

    return serve


def test_tokens_usage_and_timings_of_an_undisturbed_request() -> None:
    async def main() -> None:
        async with running_router(ScriptedWorker("decode-0", token_s=0.1)) as tested:
            answer = await tested.generate(max_tokens=5)

            assert answer.error is None
            assert answer.token_ids() == tokens(0, 5)
            assert [m.finish_reason for m in answer.messages] == [0, 0, 0, 0, LENGTH]
            assert len({m.request_id for m in answer.messages}) == 1
            assert not any(m.HasField("usage") for m in answer.messages[:-1])
            usage = answer.usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (3, 5)
            assert usage.stats.pages_moved == 3
            assert list(usage.decode_workers) == ["decode-0"]
            assert usage.ttft_ms == pytest.approx(100, abs=5)
            assert usage.tpot_ms == pytest.approx(100, abs=5)
            assert usage.total_ms == pytest.approx(500, abs=5)

    run_virtual(main())


def test_what_a_request_leaves_unset_comes_from_the_options_then_from_the_model(
    tmp_path: Path,
) -> None:
    recommended = {"temperature": 0.6, "top_p": 0.8, "min_p": 0.1}
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    options = {"default_temperature": 0.25, "default_top_k": -1}

    async def main() -> None:
        worker = ScriptedWorker("decode-0")
        async with running_router(worker, model_dir=tmp_path, **options) as tested:
            for asked in ({}, {"temperature": 1.0, "top_k": 5}):
                request = inference_pb2.GenerateRequest(token_ids=pack_token_ids([5, 6]))
                request.sampling.MergeFrom(common_pb2.SamplingParams(**asked))
                await tested.generate(request=request)

            unset, given = [each.sampling for each in tested.workers["decode-0"].submits]
            assert (unset.temperature, unset.top_k) == (0.25, 0)
            assert (given.temperature, given.top_k) == (1.0, 5), "a request's own value wins"
            assert unset.top_p == given.top_p == pytest.approx(0.8)
            [model] = (await tested.stub.ListModels(inference_pb2.ListModelsRequest())).models
            assert model_from(model).sampling_defaults == SamplingDefaults(
                temperature=0.25, top_p=0.8, top_k=0, min_p=0.1, repetition_penalty=1.0
            )

    run_virtual(main())


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.1), ("temperature", True), ("top_p", 0.0), ("top_k", 1.5), ("min_p", "1")],
)
def test_a_default_that_no_request_may_have_is_refused(name: str, value: Any) -> None:
    with pytest.raises(
        WrongOptions, match=f"^default_{name}: found {told_value(value)}; allowed: "
    ):
        RouterConfig(**{f"default_{name}": value})


def test_the_worker_gets_a_complete_request() -> None:
    async def main() -> None:
        prefill = ScriptedWorker("prefill-0", pool="prefill")
        async with running_router(ScriptedWorker("decode-0"), prefill) as tested:
            request = inference_pb2.GenerateRequest(token_ids=pack_token_ids([5, 6]))
            request.sampling.n = 2
            await tested.generate(request=request, timeout_s=9.0)

            [submit] = tested.workers["decode-0"].submits
            assert unpack_token_ids(submit.prompt_token_ids) == [5, 6]
            assert submit.sampling.max_tokens == 510, "what the context holds"
            assert submit.sampling.temperature == 1.0
            for name in ("top_p", "top_k", "min_p", "seed", "min_tokens", "n", "seed"):
                assert submit.sampling.HasField(name), name
            assert [choice.choice for choice in submit.choices] == [0, 1]
            assert [each.worker_id for each in submit.prefill_candidates] == ["prefill-0"]
            assert submit.prefill_candidates[0].address == "prefill-0:1"
            assert 0 < submit.timeout_ms <= 9000

    run_virtual(main())


def test_a_killed_worker_costs_a_pause_but_no_token() -> None:
    async def main() -> None:
        workers = [ScriptedWorker("decode-0", token_s=0.1), ScriptedWorker("decode-1")]
        async with running_router(*workers) as tested:
            call = asyncio.create_task(tested.generate(max_tokens=30, n=2, seed=9))
            await wait_until(lambda: any(worker.steps == 5 for worker in workers))
            victim = next(worker for worker in workers if worker.submits)
            tested.network.kill(victim.address)
            answer = await call

            assert answer.error is None
            assert [answer.token_ids(choice) for choice in (0, 1)] == [tokens(0, 30), tokens(1, 30)]
            assert answer.usage.stats.resumptions == 1
            assert answer.usage.stats.pages_moved == 2 * 3, "what the dead worker cost counts too"
            assert len(set(answer.usage.decode_workers)) == 2
            other = next(worker for worker in workers if worker is not victim)
            [resumed] = other.submits
            assert resumed.attempt == 1
            assert resumed.sampling.seed == 9
            emitted = {
                choice.choice: unpack_token_ids(choice.emitted_token_ids)
                for choice in resumed.choices
            }
            assert emitted[0] == tokens(0, len(emitted[0]))
            assert len(emitted[0]) >= 4

    run_virtual(main())


def test_the_first_token_of_each_attempt_ends_the_wait_however_it_travels() -> None:
    async def serve(session: Session, submit: worker_pb2.SubmitRequest) -> None:
        worker = tested.router.registry.get("decode-0")
        assert (worker.num_waiting, worker.num_waiting_tokens) == (1, 3)
        session.send(delta(submit, 0, first=submit.attempt))
        await asyncio.sleep(0.01)
        assert (worker.num_waiting, worker.num_waiting_tokens) == (0, 0)
        if submit.attempt < 2:
            session.fail(submit, grpc.StatusCode.ABORTED)
        else:
            session.send(delta(submit, 0, first=3))

    async def main() -> None:
        nonlocal tested
        async with running_router(ScriptedWorker("decode-0", serve=serve)) as tested:
            answer = await tested.generate(max_tokens=4)
            assert answer.error is None
            assert answer.token_ids() == tokens(0, 4)
            assert answer.usage.stats.resumptions == 2

    tested: RouterUnderTest
    run_virtual(main())


def test_a_seed_is_drawn_at_admission_and_kept_over_resumptions() -> None:
    async def main() -> None:
        async def break_off(session: Session, submit: Submit) -> None:
            session.fail(submit, grpc.StatusCode.ABORTED)

        worker = ScriptedWorker("decode-0", serve=once(break_off))
        async with running_router(worker) as tested:
            await tested.generate()

            first, second = worker.submits
            assert first.sampling.seed == second.sampling.seed != 0

    run_virtual(main())


def test_a_worker_that_stays_silent_is_dead_and_the_stream_goes_on() -> None:
    async def main() -> None:
        async def stall(session: Session, submit: Submit) -> None:
            session.send(delta(submit, 0, 0, 3))
            session.worker.is_silent = True

        workers = [ScriptedWorker(f"decode-{i}", serve=once(stall)) for i in range(2)]
        async with running_router(*workers, dead_after_s=5.0) as tested:
            answer = await tested.generate(max_tokens=6)

            assert answer.error is None
            assert answer.token_ids() == tokens(0, 6)
            pause = max(b - a for a, b in zip(answer.times, answer.times[1:], strict=False))
            assert 4.4 < pause < 5.6

    run_virtual(main())


def test_the_status_tells_why_nothing_is_heard_from_a_worker_until_it_is_heard_again() -> None:
    async def main() -> None:
        worker = ScriptedWorker("decode-0")
        async with running_router(worker, dead_after_s=8.0) as tested:

            def told() -> tuple[str, str]:
                [status] = tested.router.cluster_status().workers
                return status.state, status.silence

            assert told() == ("ready", "")
            worker.is_silent = True
            await asyncio.sleep(5.0)
            state, silence = told()
            assert state == "ready"
            assert silence.startswith("no heartbeat for ")
            await asyncio.sleep(5.0)
            assert told() == ("connecting", "silent for 8.0 s"), "it is tried again"
            worker.is_silent = False
            await asyncio.sleep(2.0)
            assert told() == ("ready", "")

    run_virtual(main())


def test_what_a_broken_session_tells_is_one_printable_line_of_bounded_length() -> None:
    class Rude(ScriptedWorker):
        async def Session(self, requests: Any, context: Any) -> Any:  # noqa: N802
            await context.abort(grpc.StatusCode.INTERNAL, "\x1b[2J\n" + 1000 * "x")
            yield

    async def main() -> None:
        async with running_router(Rude("decode-0"), max_resumptions=0) as tested:
            answer = await tested.generate()
            [status] = tested.router.cluster_status().workers
            assert answer.error is not None
            for told in (status.silence, answer.error.details().rpartition("decode-0: ")[2]):
                assert told.startswith("the session broke: INTERNAL: \ufffd[2J xxx")
                assert len(told) < 1000

    run_virtual(main())


def test_a_worker_that_answers_no_ping_is_dead_long_before_its_silence_says_so() -> None:
    async def main() -> None:
        workers = [ScriptedWorker(f"decode-{i}", token_s=0.3) for i in range(2)]
        async with running_router(*workers) as tested:
            call = asyncio.create_task(tested.generate(max_tokens=10))
            await wait_until(lambda: any(worker.steps for worker in workers))
            victim = next(worker for worker in workers if worker.steps)
            tested.network.pause(victim.address)
            answer = await call

            assert answer.token_ids() == tokens(0, 10)
            pause = max(b - a for a, b in zip(answer.times, answer.times[1:], strict=False))
            assert pause < 4.0

    run_virtual(main())


@pytest.mark.parametrize(("how", "seconds"), [("pause", 2.0), ("block", 12.0)])
def test_a_worker_that_is_late_is_nobodys_death(how: str, seconds: float) -> None:
    """Its process may stand still for a moment, and its event loop be busy for longer."""

    async def main() -> None:
        worker = ScriptedWorker("decode-0", token_s=0.3)
        async with running_router(worker) as tested:
            call = asyncio.create_task(tested.generate(max_tokens=10))
            await asyncio.sleep(0.5)
            process = tested.network.process_at(worker.address)
            getattr(process, how)()
            await asyncio.sleep(seconds)
            assert tested.state("decode-0") == "READY"
            process.resume()
            answer = await call

            assert answer.token_ids() == tokens(0, 10)
            assert answer.usage.stats.resumptions == 0

    run_virtual(main())


def test_a_worker_that_beats_but_makes_no_step_is_stuck() -> None:
    async def main() -> None:
        async def hang(session: Session, submit: Submit) -> None:
            session.worker.heartbeat["running"] = 1

        workers = [ScriptedWorker(f"decode-{i}", serve=once(hang)) for i in range(2)]
        async with running_router(*workers, stuck_after_s=5.0) as tested:
            answer = await tested.generate()

            assert answer.token_ids() == tokens(0, 10)
            assert answer.usage.ttft_ms < 6500

    run_virtual(main())


def test_a_worker_whose_session_broke_is_reached_anew_though_a_heartbeat_comes_just_then() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with running_router(ScriptedWorker("decode-0")) as tested:
            registry = tested.router.registry
            worker = registry.get("decode-0")
            for num_turns in range(10):  # of the loop, after a heartbeat has arrived
                await wait_until(lambda: worker.state == "READY")
                beat_at = worker.heartbeat_at
                await wait_until(lambda beat_at=beat_at: worker.heartbeat_at > beat_at)  # type: ignore[misc]
                await asyncio.sleep(worker.heartbeat_at + 0.5 - loop.time())
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                registry.report_broken(worker, "its session broke")
                for _ in range(10):
                    await asyncio.sleep(0)
                    assert worker.state == "DEAD", num_turns

    run_virtual(main())


class CancelledCall:
    """Of any kind, cancelled by gRPC, as it does when a channel breaks in certain moments."""

    async def read(self) -> None:
        raise asyncio.CancelledError

    __anext__ = read

    def __await__(self) -> Any:
        return self.read().__await__()

    def __aiter__(self) -> Any:
        return self

    def cancel(self) -> None: ...

    async def aclose(self) -> None: ...


@pytest.mark.parametrize("method", ["get_info", "watch", "cache_batches"])
def test_a_worker_is_followed_on_though_grpc_cancels_a_call_to_it(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    right, num_calls = getattr(wire, method), 0

    def cancelled_at_first(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return CancelledCall() if num_calls == 1 else right(*args)

    async def main() -> None:
        monkeypatch.setattr(wire, method, cancelled_at_first)
        async with running_router(ScriptedWorker("decode-0")) as tested:
            await wait_until(lambda: num_calls == 2)
            assert (await tested.generate()).error is None

    run_virtual(main())


def test_repeated_tokens_are_dropped() -> None:
    async def main() -> None:
        async def repeat(session: Session, submit: Submit) -> None:
            session.send(delta(submit, 0, 0, 3), delta(submit, 0, 1, 2), delta(submit, 0, 0, 1))
            session.send(delta(submit, 0, 2, 3))
            session.send(delta(submit, 0, 4, 6), delta(submit, 0, 4, 6), delta(submit, 0, 0, 10))

        async with running_router(ScriptedWorker("decode-0", serve=repeat)) as tested:
            answer = await tested.generate()

            assert answer.error is None
            assert answer.token_ids() == tokens(0, 10)

    run_virtual(main())


def test_missing_tokens_are_never_skipped() -> None:
    async def main() -> None:
        async def skip(session: Session, submit: Submit) -> None:
            session.send(delta(submit, 0, 0, 3))
            session.send(delta(submit, 0, 4, 2))
            session.send(delta(submit, 0, 3, 3))  # too late: the attempt is over

        worker = ScriptedWorker("decode-0", serve=once(skip))
        async with running_router(worker) as tested:
            answer = await tested.generate()

            assert answer.error is None
            assert answer.token_ids() == tokens(0, 10)
            assert len(worker.cancels) == 1, "the worker frees the attempt that was given up"
            assert [each.attempt for each in worker.submits] == [0, 1]

    run_virtual(main())


@pytest.mark.parametrize(
    "wrong",
    [
        {"first": 0, "count": 2, "finish_reason": STOP},
        {"first": 1, "count": 0, "finish_reason": LENGTH},
        {"first": 3, "finish_reason": 77},
    ],
    ids=str,
)
def test_an_end_that_cannot_be_ends_the_attempt_alone(wrong: dict[str, Any]) -> None:
    async def main() -> None:
        async def send_it(session: Session, submit: Submit) -> None:
            session.send(delta(submit, 0, 0, 3))
            session.send(delta(submit, 0, **wrong))  # and nothing more

        async with running_router(ScriptedWorker("decode-0", serve=once(send_it))) as tested:
            answer = await tested.generate()

            assert answer.error is None
            assert answer.token_ids() == tokens(0, 10)
            assert answer.usage.total_ms < 5_000

    run_virtual(main())


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_choice_with_all_its_tokens_ends_though_the_worker_does_not_say_so(
    is_alone: bool,
) -> None:
    async def main() -> None:
        async def send_all(session: Session, submit: Submit) -> None:
            session.send(delta(submit, 0, 0, 9))
            last = delta(submit, 0, 9, finish_reason=0)
            if is_alone:
                session.send(last)  # in a column
            else:
                session.outbox.put_nowait(worker_pb2.SessionResponse(deltas=[last]))

        worker = ScriptedWorker("decode-0", serve=send_all)
        async with running_router(worker) as tested:
            answer = await tested.generate()

            assert answer.error is None
            assert answer.token_ids() == tokens(0, 10)
            assert answer.messages[-1].finish_reason == LENGTH
            await asyncio.sleep(0.1)
            assert len(worker.cancels) == 1

    run_virtual(main())


def test_costs_that_no_message_can_hold_fail_no_request() -> None:
    most = common_pb2.RequestStats(pages_moved=2**32 - 1, bytes_moved=2**64 - 1, preemptions=9)

    async def main() -> None:
        async def fail_it(session: Session, submit: Submit) -> None:
            session.send(delta(submit, 0, 0, 2, stats=most))
            session.fail(submit, grpc.StatusCode.ABORTED)

        worker = ScriptedWorker("decode-0", serve=once(fail_it))
        async with running_router(worker) as tested:
            answer = await tested.generate()

            assert answer.error is None
            assert answer.token_ids() == tokens(0, 10)
            stats = answer.usage.stats
            assert (stats.pages_moved, stats.preemptions) == (2**32 - 1, 9)

    run_virtual(main())


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, 2**31, 2**32 - 1])
@pytest.mark.parametrize("where", ["first", "alone", "among", "last"])
def test_a_token_that_the_model_does_not_have_ends_the_attempt_alone(
    where: str, token_id: int
) -> None:
    async def send_it(session: Session, submit: Submit) -> None:
        before, count = {"first": (0, 1), "alone": (3, 1), "among": (3, 3), "last": (9, 1)}[where]
        if before:
            session.send(delta(submit, 0, 0, before))
        wrong = [*tokens(0, before + count)[before:-1], token_id]
        session.send(delta(submit, 0, before, count, token_ids=pack_token_ids(wrong)))
        session.send(delta(submit, 0, before + count))  # too late: the attempt is over

    async def main() -> None:
        async def serve(session: Session, submit: Submit) -> None:
            is_wrong = submit.sampling.max_tokens == 10 and submit.attempt == 0
            await (send_it if is_wrong else honest)(session, submit)

        worker = ScriptedWorker("decode-0", serve=serve)
        async with running_router(worker) as tested:
            other = asyncio.create_task(tested.generate(max_tokens=30))
            await wait_until(lambda: bool(worker.submits))
            answer = await tested.generate()

            assert answer.error is None
            assert answer.token_ids() == tokens(0, 10)
            assert answer.usage.stats.resumptions == 1
            assert (await other).token_ids() == tokens(0, 30)
            assert other.result().usage.stats.resumptions == 0
            assert len(worker.cancels) == 1, "the worker frees the attempt that was given up"

    run_virtual(main())


def test_a_token_id_that_is_cut_off_ends_the_attempt_alone() -> None:
    async def main() -> None:
        async def cut_off(session: Session, submit: Submit) -> None:
            session.send(delta(submit, 0, 0, 3))
            wrong = delta(submit, 0, 3, token_ids=pack_token_ids([1])[:-1])
            session.outbox.put_nowait(worker_pb2.SessionResponse(deltas=[wrong]))

        async with running_router(ScriptedWorker("decode-0", serve=once(cut_off))) as tested:
            answer = await tested.generate()

            assert answer.error is None
            assert answer.token_ids() == tokens(0, 10)

    run_virtual(main())


@pytest.mark.parametrize(
    ("top", "values"),
    [
        (pack_token_ids([3, VOCAB_SIZE]), [-0.5, -1.0]),
        (pack_token_ids([3, 4]), [-0.5]),
        (pack_token_ids([3, 4])[:-1], [-0.5, -1.0]),
    ],
    ids=["of no model", "more than their log probabilities", "cut off"],
)
def test_wrong_tokens_among_the_most_probable_end_the_attempt_alone(
    top: bytes, values: list[float]
) -> None:
    async def main() -> None:
        async def send_it(session: Session, submit: Submit) -> None:
            fine = common_pb2.TokenLogprobs(
                top_token_ids=pack_token_ids([VOCAB_SIZE - 1]), top_logprobs=[-0.5]
            )
            session.send(delta(submit, 0, 0, 2, logprobs=[fine] * 2))
            wrong = common_pb2.TokenLogprobs(top_token_ids=top, top_logprobs=values)
            session.send(delta(submit, 0, 2, 2, logprobs=[fine, wrong]))

        async with running_router(ScriptedWorker("decode-0", serve=once(send_it))) as tested:
            answer = await tested.generate(logprobs=2)

            assert answer.error is None
            assert answer.token_ids() == tokens(0, 10)
            assert answer.usage.stats.resumptions == 1
            assert sum(len(each.logprobs) for each in answer.messages) == 2

    run_virtual(main())


@pytest.mark.parametrize(
    ("token_ids", "whose"), [([VOCAB_SIZE], "decode-0"), ([3, VOCAB_SIZE], "decode-0: choice 0")]
)
def test_a_client_whose_only_worker_sends_tokens_of_no_model_gets_a_clear_error(
    token_ids: list[int], whose: str
) -> None:
    async def main() -> None:
        async def send_it(session: Session, submit: Submit) -> None:
            session.send(delta(submit, 0, 0, token_ids=pack_token_ids(token_ids)))

        async with running_router(ScriptedWorker("decode-0", serve=send_it)) as tested:
            answer = await tested.generate()

            assert answer.error is not None
            told = f"{whose}: token_ids: found 400; allowed: 0 to 399"
            assert told in (answer.error.details() or "")

    run_virtual(main())


def test_late_messages_of_an_earlier_attempt_change_nothing() -> None:
    async def main() -> None:
        async def haunt(session: Session, submit: Submit) -> None:
            if submit.attempt == 0:
                session.send(delta(submit, 0, 0, 2))
                session.fail(submit, grpc.StatusCode.UNAVAILABLE)
                return
            lies = pack_token_ids([399, 399])
            session.send(delta(submit, 0, 2, token_ids=lies[:TOKEN_BYTES], attempt=0))
            session.send(delta(submit, 0, 2, token_ids=lies, attempt=0, finish_reason=STOP))
            stale = Submit(request_id=submit.request_id, attempt=0)
            session.fail(stale, grpc.StatusCode.INTERNAL)
            session.send(delta(submit, 0, 2, token_ids=lies, attempt=7))
            await honest(session, submit)

        worker = ScriptedWorker("decode-0", serve=haunt)
        async with running_router(worker) as tested:
            answer = await tested.generate()

            assert answer.error is None
            assert answer.token_ids() == tokens(0, 10)
            assert [each.attempt for each in worker.submits] == [0, 1]

    run_virtual(main())


def test_a_finished_choice_is_not_asked_for_again() -> None:
    async def main() -> None:
        async def finish_one(session: Session, submit: Submit) -> None:
            session.send(
                delta(submit, 1, 0, 2, finish_reason=STOP),
                delta(submit, 0, 0, 1),
                delta(submit, 2, 0, 4),
            )
            session.end()

        workers = [ScriptedWorker(f"decode-{i}", serve=once(finish_one)) for i in range(2)]
        async with running_router(*workers) as tested:
            answer = await tested.generate(n=3, max_tokens=6)

            resumed = next(each for w in workers for each in w.submits if each.attempt == 1)
            assert {c.choice: len(c.emitted_token_ids) // 4 for c in resumed.choices} == {
                0: 1,
                2: 4,
            }
            assert answer.error is None
            expected = [tokens(0, 6), tokens(1, 2), tokens(2, 6)]
            assert [answer.token_ids(choice) for choice in range(3)] == expected
            assert [m.HasField("usage") for m in answer.messages].count(True) == 1
            assert answer.usage.completion_tokens == 14

    run_virtual(main())


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.INTERNAL, grpc.StatusCode.INTERNAL),
        (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INVALID_ARGUMENT),
        (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.DEADLINE_EXCEEDED),
        (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN),
    ],
)
def test_an_error_of_the_request_itself_is_not_retried(
    code: grpc.StatusCode, expected: grpc.StatusCode
) -> None:
    async def main() -> None:
        async def refuse(session: Session, submit: Submit) -> None:
            session.send(delta(submit, 0, 0, 2))
            session.fail(submit, code, "because")

        worker = ScriptedWorker("decode-0", serve=refuse)
        async with running_router(worker) as tested:
            answer = await tested.generate()

            assert answer.error is not None
            assert answer.error.code() is expected
            assert answer.error.details() == "because"
            assert answer.token_ids() == tokens(0, 2), "what came before the error is delivered"
            assert len(worker.submits) == 1

    run_virtual(main())


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.FAILED_PRECONDITION,
    ],
)
def test_a_request_is_given_up_after_three_resumptions(code: grpc.StatusCode) -> None:
    async def main() -> None:
        async def refuse(session: Session, submit: Submit) -> None:
            session.fail(submit, code)

        workers = [ScriptedWorker(f"decode-{i}", serve=refuse) for i in range(2)]
        async with running_router(*workers) as tested:
            answer = await tested.generate()

            assert answer.error is not None
            assert answer.error.code() is grpc.StatusCode.ABORTED
            attempts = sorted(each.attempt for worker in workers for each in worker.submits)
            assert attempts == [0, 1, 2, 3]

    run_virtual(main())


async def _hand_over(session: Session, submit: Submit) -> None:
    session.fail(submit, grpc.StatusCode.UNAVAILABLE)


async def _hand_over_saying_so(session: Session, submit: Submit) -> None:
    session.fail(submit, grpc.StatusCode.UNAVAILABLE, is_leaving=True)


async def _fail_a_pass(session: Session, submit: Submit) -> None:
    session.fail(submit, grpc.StatusCode.ABORTED)


async def _fail_a_pass_saying_so(session: Session, submit: Submit) -> None:
    session.fail(submit, grpc.StatusCode.ABORTED, is_leaving=True)


async def _break_off(session: Session, submit: Submit) -> None:
    session.end()


@pytest.mark.parametrize(
    ("who_says_so", "end_it", "num_attempts"),
    [
        ("membership", _hand_over, 6),
        ("membership", _fail_a_pass, 4),
        ("membership", _break_off, 4),
        ("worker", _hand_over_saying_so, 6),
        ("worker", _fail_a_pass_saying_so, 4),
        ("heartbeats", _hand_over, 4),  # as one whose engine fails
    ],
)
def test_only_what_workers_hand_over_when_they_leave_counts_as_no_loss(
    who_says_so: str, end_it: Serve, num_attempts: int
) -> None:
    async def main() -> None:
        async def leave(session: Session, submit: Submit) -> None:
            if submit.attempt == 5:
                await honest(session, submit)
                return
            worker = session.worker
            session.send(delta(submit, 0, submit.attempt))
            worker.heartbeat["draining"] = True
            worker.is_leaving = who_says_so == "membership"
            await tested.announce()
            await wait_until(lambda: tested.state(worker.worker_id) == "DRAINING")
            await end_it(session, submit)

        workers = [ScriptedWorker(f"decode-{i}", serve=leave) for i in range(6)]
        tested: RouterUnderTest
        async with running_router(*workers) as tested:
            answer = await tested.generate()

            attempts = sorted(each.attempt for worker in workers for each in worker.submits)
            assert attempts == list(range(num_attempts))
            if num_attempts == 6:
                assert answer.token_ids() == tokens(0, 10)
                assert answer.usage.stats.resumptions == 5
            else:
                assert answer.error is not None
                assert answer.error.code() is grpc.StatusCode.ABORTED
                assert answer.token_ids() == tokens(0, 4)

    run_virtual(main())


def test_a_worker_that_says_it_leaves_and_stays_gets_nothing_more() -> None:
    async def main() -> None:
        async def leave(session: Session, submit: Submit) -> None:
            await _hand_over_saying_so(session, submit)
            session.end()  # the router connects anew, and its heartbeats tell of nothing

        workers = [ScriptedWorker(f"decode-{i}", serve=leave) for i in range(5)]
        async with running_router(*workers, worker_wait_s=10.0) as tested:
            first = await tested.generate()
            assert {tested.state(each.worker_id) for each in workers} == {"DRAINING"}
            second = await tested.generate()

            assert [len(worker.submits) for worker in workers] == [1] * 5
            for answer in (first, second):
                assert answer.error is not None
                assert answer.error.code() is grpc.StatusCode.UNAVAILABLE
                assert (answer.error.details() or "").startswith("no decode worker for 10 s")
            await tested.add(ScriptedWorker("decode-0", incarnation=2))
            assert (await tested.generate()).token_ids() == tokens(0, 10)

    run_virtual(main())


def test_a_router_whose_only_worker_says_it_leaves_is_soon_not_ready() -> None:
    async def main() -> None:
        worker = ScriptedWorker("decode-0")

        async def leave(session: Session, submit: Submit) -> None:
            worker.heartbeat["draining"] = True
            await _hand_over_saying_so(session, submit)

        worker.serve = leave
        async with running_router(worker, worker_wait_s=3.0) as tested:
            health = health_pb2_grpc.HealthStub(tested.network.channel("router:1"))
            asking = health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE)
            statuses = [(await health.Check(asking)).status]
            await tested.generate()
            statuses.append((await health.Check(asking)).status)

        status = health_pb2.HealthCheckResponse
        assert statuses == [status.SERVING, status.NOT_SERVING]

    run_virtual(main())


@pytest.mark.parametrize(
    ("name", "num_tokens", "devices", "num_running", "expected"),
    [
        ("the same type, though busier", 3, ("H100", "L4", "H100"), 10, "decode-2"),
        ("not if it has no room soon", 3, ("H100", "L4", "H100"), 50, "decode-1"),
        ("another type if there is no other", 3, ("H100", "L4", "L4"), 10, "decode-1"),
        ("not before the first token", 0, ("H100", "L4", "H100"), 10, "decode-1"),
        ("not if the type is unknown", 3, ("", "L4", ""), 10, "decode-1"),
    ],
)
@pytest.mark.parametrize("is_planned", [False, True])
def test_a_stream_goes_on_on_the_type_of_device_that_drew_its_tokens(
    name: str,
    num_tokens: int,
    devices: tuple[str, str, str],
    num_running: int,
    expected: str,
    is_planned: bool,
) -> None:
    async def main() -> None:
        async def end(session: Session, submit: Submit) -> None:
            for index in range(num_tokens):
                session.send(delta(submit, 0, index))
            await (_hand_over_saying_so if is_planned else _break_off)(session, submit)

        workers = [
            ScriptedWorker("decode-0", device=devices[0], serve=end),
            ScriptedWorker("decode-1", device=devices[1], heartbeat={"running": 1}),
            ScriptedWorker("decode-2", device=devices[2], heartbeat={"running": num_running}),
        ]
        async with running_router(*workers, max_running_sequences=20) as tested:
            answer = await tested.generate()

            assert list(answer.usage.decode_workers) == ["decode-0", expected], name
            assert answer.token_ids() == tokens(0, 10)

    run_virtual(main())


def test_a_stream_that_had_to_change_the_type_of_device_stays_on_the_new_one() -> None:
    async def main() -> None:
        async def one_token(session: Session, submit: Submit) -> None:
            session.send(delta(submit, 0, submit.attempt))
            if submit.attempt == 1:
                await have_come.wait()
            await _hand_over_saying_so(session, submit)

        have_come = asyncio.Event()
        workers = [
            ScriptedWorker("decode-0", device="H100", serve=one_token),
            ScriptedWorker("decode-1", device="L4", serve=one_token, heartbeat={"running": 1}),
        ]
        late = [
            ScriptedWorker("decode-2", device="H100", heartbeat={"running": 2}),
            ScriptedWorker("decode-3", device="L4", heartbeat={"running": 9}),
        ]
        tested: RouterUnderTest
        async with running_router(*workers) as tested:
            answering = asyncio.create_task(tested.generate())
            await wait_until(lambda: len(workers[1].submits) == 1)
            await tested.add(*late)
            have_come.set()
            answer = await answering

            assert list(answer.usage.decode_workers) == ["decode-0", "decode-1", "decode-3"]

    run_virtual(main())


def test_a_worker_that_has_restarted_as_planned_is_as_good_as_any_other() -> None:
    """In a restart of all workers it is the one that does not stop again."""

    async def main() -> None:
        async def stop(session: Session, submit: Submit) -> None:
            session.worker.is_leaving = True
            await tested.announce()
            await _hand_over(session, submit)

        async def restart(session: Session, submit: Submit) -> None:
            await stop(session, submit)
            await wait_until(lambda: bool(second.submits))
            await tested.add(ScriptedWorker("decode-0", incarnation=2))
            has_restarted.set()

        async def stop_later(session: Session, submit: Submit) -> None:
            await has_restarted.wait()
            await stop(session, submit)

        has_restarted = asyncio.Event()
        first = ScriptedWorker("decode-0", serve=restart)
        second = ScriptedWorker("decode-1", serve=stop_later, heartbeat={"running": 10})
        third = ScriptedWorker("decode-2", heartbeat={"running": 50})
        tested: RouterUnderTest
        async with running_router(first, second, third) as tested:
            answer = await tested.generate()

            assert list(answer.usage.decode_workers) == ["decode-0", "decode-1", "decode-0"]

    run_virtual(main())


def test_the_next_worker_learns_of_the_passes_that_failed() -> None:
    async def main() -> None:
        failed_passes = iter([1, 0])

        async def fail(session: Session, submit: Submit) -> None:
            if (count := next(failed_passes, None)) is None:
                await honest(session, submit)
            else:
                session.fail(submit, grpc.StatusCode.ABORTED, failed_passes=count)

        workers = [ScriptedWorker(f"decode-{i}", serve=fail) for i in range(2)]
        async with running_router(*workers) as tested:
            answer = await tested.generate()

            assert answer.token_ids() == tokens(0, 10)
            submits = {each.attempt: each for worker in workers for each in worker.submits}
            assert [submits[attempt].failed_passes for attempt in range(3)] == [0, 1, 0]

    run_virtual(main())


def test_a_worker_that_lost_a_request_and_is_back_is_not_asked_while_there_is_another() -> None:
    """It may only have started anew to fail again, and is the least loaded of all."""

    async def main() -> None:
        async def fail(session: Session, submit: Submit) -> None:
            session.fail(submit, grpc.StatusCode.ABORTED)

        async def fail_later(session: Session, submit: Submit) -> None:
            await wait_until(lambda: tested.state("decode-0") == "READY")
            await fail(session, submit)

        async def restart(session: Session, submit: Submit) -> None:
            await tested.add(ScriptedWorker("decode-0", incarnation=2, serve=fail))

        first = ScriptedWorker("decode-0", serve=restart)
        second = ScriptedWorker("decode-1", serve=fail_later, heartbeat={"running": 10})
        third = ScriptedWorker("decode-2", heartbeat={"running": 50})
        async with running_router(first, second, third) as tested:
            answer = await tested.generate()

            assert list(answer.usage.decode_workers) == ["decode-0", "decode-1", "decode-2"]

    run_virtual(main())


def test_a_full_worker_passes_the_request_on() -> None:
    async def main() -> None:
        async def full(session: Session, submit: Submit) -> None:
            session.fail(submit, grpc.StatusCode.RESOURCE_EXHAUSTED)

        workers = [ScriptedWorker(f"decode-{i}", serve=once(full)) for i in range(2)]
        async with running_router(*workers) as tested:
            answer = await tested.generate()

            assert answer.error is None
            assert [len(worker.submits) for worker in workers] == [1, 1]
            assert answer.usage.stats.resumptions == 0, "nothing had begun"
            assert tested.router.dispatcher.num_resumed == 0

    run_virtual(main())


def test_when_all_are_full_the_client_hears_so_at_once() -> None:
    async def main() -> None:
        async def full(session: Session, submit: Submit) -> None:
            session.fail(submit, grpc.StatusCode.RESOURCE_EXHAUSTED)

        workers = [ScriptedWorker(f"decode-{i}", serve=full) for i in range(2)]
        async with running_router(*workers) as tested:
            started = asyncio.get_running_loop().time()
            answer = await tested.generate()

            assert answer.error is not None
            assert answer.error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert asyncio.get_running_loop().time() - started < 0.1
            assert sum(len(worker.submits) for worker in workers) == 2

    run_virtual(main())


def test_full_workers_have_time_again_after_each_token() -> None:
    async def main() -> None:
        async def full_twice(session: Session, submit: Submit) -> None:
            if len(often_full.submits) <= 2:
                session.fail(submit, grpc.StatusCode.RESOURCE_EXHAUSTED)
            else:
                await honest(session, submit)

        often_full = ScriptedWorker("decode-0", serve=full_twice)
        other = ScriptedWorker("decode-1", token_s=1.0, heartbeat={"running": 10})
        async with running_router(often_full, other, resume_wait_s=2.0) as tested:
            call = asyncio.create_task(tested.generate())
            await wait_until(lambda: other.steps == 5)
            tested.network.kill(other.address)
            answer = await call

            assert answer.error is None
            assert answer.token_ids() == tokens(0, 10)
            assert len(often_full.submits) == 3

    run_virtual(main())


def test_without_a_worker_a_request_waits_a_while_and_then_fails() -> None:
    async def main() -> None:
        prefill = ScriptedWorker("prefill-0", pool="prefill")
        async with running_router(prefill, worker_wait_s=5.0) as tested:
            started = asyncio.get_running_loop().time()
            answer = await tested.generate()

            assert answer.error is not None
            assert answer.error.code() is grpc.StatusCode.UNAVAILABLE
            assert asyncio.get_running_loop().time() - started == pytest.approx(5.0, abs=0.1)

            call = asyncio.create_task(tested.generate())
            await asyncio.sleep(3.0)
            await tested.add(ScriptedWorker("decode-0"))
            assert (await call).token_ids() == tokens(0, 10), "a worker came in time"

    run_virtual(main())


def test_an_interrupted_request_without_a_token_waits_like_a_new_one() -> None:
    async def silent(session: Session, submit: worker_pb2.SubmitRequest) -> None:
        await asyncio.sleep(100)

    async def main() -> None:
        worker = ScriptedWorker("decode-0", serve=silent)
        async with running_router(worker, worker_wait_s=5.0, resume_wait_s=30.0) as tested:
            call = asyncio.create_task(tested.generate())
            await wait_until(lambda: len(worker.submits) == 1)
            killed_at = asyncio.get_running_loop().time()
            tested.network.kill(worker.address)
            answer = await call

            assert answer.error is not None
            assert answer.error.code() is grpc.StatusCode.UNAVAILABLE
            waited_s = asyncio.get_running_loop().time() - killed_at
            assert 5.0 <= waited_s < 9.0, "dead_after_s comes first"

    run_virtual(main())


def test_a_new_incarnation_of_the_only_worker_takes_over_its_requests() -> None:
    async def main() -> None:
        old = ScriptedWorker("decode-0", incarnation=1, token_s=0.1)
        async with running_router(old) as tested:
            call = asyncio.create_task(tested.generate(max_tokens=20))
            await wait_until(lambda: old.steps == 5)
            tested.network.kill(old.address)
            await asyncio.sleep(4.0)
            new = ScriptedWorker("decode-0", incarnation=2)
            await tested.add(new)
            answer = await call

            assert answer.token_ids() == tokens(0, 20)
            assert [each.attempt for each in new.submits] == [1]
            assert list(answer.usage.decode_workers) == ["decode-0", "decode-0"]

    run_virtual(main())


def test_a_replaced_worker_is_fenced_although_it_goes_on_sending() -> None:
    async def main() -> None:
        zombie = ScriptedWorker("decode-0", incarnation=1, token_s=0.1)
        other = ScriptedWorker("decode-0", incarnation=2)
        async with running_router(zombie) as tested:
            call = asyncio.create_task(tested.generate(max_tokens=20))
            await wait_until(lambda: zombie.steps == 5)
            await tested.add(other)
            answer = await call

            assert answer.token_ids() == tokens(0, 20)
            assert [each.attempt for each in other.submits] == [1]

    run_virtual(main())


def test_a_controller_that_knows_nobody_yet_costs_no_living_worker_its_streams() -> None:
    async def main() -> None:
        workers = [ScriptedWorker(f"decode-{i}", token_s=0.1) for i in range(2)]
        async with running_router(*workers) as tested:
            calls = [
                asyncio.create_task(tested.generate(max_tokens=40, seed=seed)) for seed in range(4)
            ]
            await wait_until(lambda: all(worker.steps >= 5 for worker in workers))
            for members in ([], [workers[0].member], [each.member for each in workers]):
                await tested.router.set_workers(members)
                await asyncio.sleep(0.5)
                assert (await tested.generate()).error is None

            for answer in await asyncio.gather(*calls):
                assert answer.token_ids() == tokens(0, 40)
                assert answer.usage.stats.resumptions == 0

    run_virtual(main())


def test_a_worker_that_is_neither_announced_nor_alive_leaves() -> None:
    async def main() -> None:
        gone, stays = ScriptedWorker("decode-0"), ScriptedWorker("decode-1")
        async with running_router(gone, stays, forget_dead_after_s=10.0) as tested:
            await tested.router.set_workers([stays.member])
            await asyncio.sleep(5.0)
            assert tested.state("decode-0") == "READY"
            tested.network.kill(gone.address)
            await asyncio.sleep(3.0)
            known = {
                each.member.worker_id: each.state for each in tested.router.registry.known_workers()
            }
            assert known == {"decode-0": "DEAD", "decode-1": "READY"}
            await asyncio.sleep(10.0)
            known = {
                each.member.worker_id: each.state for each in tested.router.registry.known_workers()
            }
            assert known == {"decode-1": "READY"}

    run_virtual(main())


def test_a_worker_that_has_drained_is_not_told_of_as_dead() -> None:
    async def main() -> None:
        leaves, stays = ScriptedWorker("decode-0"), ScriptedWorker("decode-1")
        async with running_router(leaves, stays) as tested:

            def known() -> dict[str, str]:
                workers = tested.router.registry.known_workers()
                return {each.member.worker_id: each.state for each in workers}

            await tested.router.set_workers(
                [replace(leaves.member, is_draining=True), stays.member]
            )
            assert known() == {"decode-0": "DRAINING", "decode-1": "READY"}
            tested.network.kill(leaves.address)  # its server stops before it says that it has left
            await asyncio.sleep(1.0)
            assert known() == {"decode-1": "READY"}
            await tested.router.set_workers([stays.member])
            assert known() == {"decode-1": "READY"}

    run_virtual(main())


@pytest.mark.parametrize("phase", ["before the first token", "while streaming"])
def test_a_client_that_leaves_cancels_at_the_worker_at_once(phase: str) -> None:
    async def main() -> None:
        worker = ScriptedWorker("decode-0", token_s=0.1)
        async with running_router(worker) as tested:
            request = inference_pb2.GenerateRequest(token_ids=pack_token_ids([5, 6]))
            call = tested.stub.Generate(request)
            if phase == "while streaming":
                for _ in range(3):
                    await call.read()
            else:
                await wait_until(lambda: bool(worker.submits))
            call.cancel()
            took = await wait_until(lambda: bool(worker.cancels))

            assert took < 0.05
            assert worker.cancels == [worker.submits[0].request_id]
            await asyncio.sleep(0.01)
            tested.check_idle()

    run_virtual(main())


def test_a_client_that_leaves_while_its_call_is_admitted_costs_no_worker_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        worker = ScriptedWorker("decode-0")
        async with running_router(worker) as tested:
            admission = tested.router.admission
            admit = admission.admit

            async def slow(asking: Any) -> Any:
                await asyncio.sleep(0.5)
                return await admit(asking)

            monkeypatch.setattr(admission, "admit_at_once", lambda asking: None)
            monkeypatch.setattr(admission, "admit", slow)
            request = inference_pb2.GenerateRequest(token_ids=pack_token_ids([5, 6]))
            call = tested.stub.Generate(request)
            await wait_until(lambda: admission.num_active == 1)
            call.cancel()
            await asyncio.sleep(1.0)

            assert not worker.submits
            tested.check_idle()

    run_virtual(main())


def test_a_deadline_ends_the_call_and_the_work() -> None:
    async def main() -> None:
        worker = ScriptedWorker("decode-0", token_s=0.1)
        async with running_router(worker, request_timeout_s=1.0) as tested:
            answer = await tested.generate(max_tokens=100, timeout_s=None)

            assert answer.error is not None
            assert answer.error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert 8 <= len(answer.token_ids()) <= 10
            await wait_until(lambda: bool(worker.cancels), timeout_s=0.1)

    run_virtual(main())


def test_a_slow_client_gets_merged_messages_and_holds_up_nobody() -> None:
    async def main() -> None:
        worker = ScriptedWorker("decode-0", token_s=0.01)
        async with running_router(worker, window_bytes=500) as tested:
            slow = asyncio.create_task(tested.generate(max_tokens=400, read_s=1.0))
            quick = await tested.generate(max_tokens=400)
            answer = await slow

            assert quick.usage.total_ms < 5000
            assert answer.token_ids() == tokens(0, 400)
            assert answer.usage.total_ms < 5000, "the worker was not held up either"
            assert len(answer.messages) < 40

    run_virtual(main())


def test_a_client_that_stops_reading_is_given_up() -> None:
    async def main() -> None:
        worker = ScriptedWorker("decode-0", token_s=0.2)
        config = {"window_bytes": 500, "slow_client_timeout_s": 10.0}
        async with running_router(worker, **config) as tested:
            request = inference_pb2.GenerateRequest(token_ids=pack_token_ids([5, 6]))
            call = tested.stub.Generate(request)
            await call.read()
            took = await wait_until(lambda: bool(worker.cancels))

            assert 10.0 < took < 20.0
            call.cancel()

    run_virtual(main())


def test_end_tokens_are_delivered_and_end_the_choice() -> None:
    async def main() -> None:
        async def end(session: Session, submit: Submit) -> None:
            ids = pack_token_ids([token_at(0, 0), EOS])
            session.send(delta(submit, 0, 0, token_ids=ids, finish_reason=STOP))
            session.send(delta(submit, 0, 2, 3))

        async with running_router(ScriptedWorker("decode-0", serve=end)) as tested:
            answer = await tested.generate()

            assert answer.token_ids() == [token_at(0, 0), EOS]
            assert answer.messages[-1].finish_reason == STOP
            assert answer.text() == "", "no tokenizer, no text"

    run_virtual(main())


def test_requests_go_where_their_prefix_is_and_events_of_the_dead_are_forgotten() -> None:
    async def main() -> None:
        prompt = list(range(1, 16 * PAGE_SIZE + 1))
        workers = [ScriptedWorker(f"decode-{i}") for i in range(3)]
        async with running_router(*workers, speculative_ttl_s=0.0) as tested:
            hashes = page_hashes(pack_token_ids(prompt), PAGE_SIZE, fingerprint="f")
            for worker in workers:
                stored = hashes if worker.worker_id == "decode-2" else hashes[:2]
                worker.cache_batches.append(
                    worker_pb2.SubscribeCacheEventsResponse(
                        incarnation=2, sequence=1, snapshot=True, stored=b"".join(stored)
                    )
                )
                await tested.add(
                    ScriptedWorker(
                        worker.worker_id, incarnation=2, cache_batches=worker.cache_batches
                    )
                )
            await asyncio.sleep(0.1)
            answer = await tested.generate(prompt=prompt)

            assert list(answer.usage.decode_workers) == ["decode-2"]
            assert tested.router.index.num_pages == 16
            tested.network.kill("decode-2:2", silently=True)
            await asyncio.sleep(3.6)
            assert tested.router.index.num_pages == 2

    run_virtual(main())


def test_a_gap_in_cache_events_asks_for_a_snapshot() -> None:
    async def main() -> None:
        worker = ScriptedWorker("decode-0")
        worker.cache_batches += [
            worker_pb2.SubscribeCacheEventsResponse(
                incarnation=1, sequence=5, snapshot=True, stored=b"a" * 16
            ),
            worker_pb2.SubscribeCacheEventsResponse(incarnation=1, sequence=7, stored=b"b" * 16),
        ]
        async with running_router(worker) as tested:
            await asyncio.sleep(1.0)

            assert len(worker.subscriptions) > 1
            assert {each.after_sequence for each in worker.subscriptions} == {0}
            assert len(worker.subscriptions) < 10, "with a pause in between"
            assert tested.router.index.num_pages <= 1

    run_virtual(main())


def test_a_draining_worker_finishes_but_gets_nothing_new() -> None:
    async def main() -> None:
        draining = ScriptedWorker("decode-0", token_s=0.2)
        async with running_router(draining) as tested:
            first = asyncio.create_task(tested.generate(max_tokens=20))
            await wait_until(lambda: draining.steps > 1)
            draining.heartbeat["draining"] = True
            await tested.add(ScriptedWorker("decode-1"))
            await wait_until(lambda: tested.state("decode-0") == "DRAINING")
            answers = await asyncio.gather(*(tested.generate() for _ in range(5)))

            assert {each.usage.decode_workers[0] for each in answers} == {"decode-1"}
            assert list((await first).usage.decode_workers) == ["decode-0"]

    run_virtual(main())


def test_a_member_that_is_to_drain_gets_nothing_from_that_moment_and_is_not_given_up() -> None:
    async def main() -> None:
        leaving, stays = ScriptedWorker("decode-0", token_s=0.2), ScriptedWorker("decode-1")
        async with running_router(leaving) as tested:
            first = asyncio.create_task(tested.generate(max_tokens=20))
            await wait_until(lambda: leaving.steps > 1)
            await tested.add(stays)

            members = [replace(leaving.member, is_draining=True), stays.member]
            await tested.router.set_workers(members)
            answers = await asyncio.gather(*(tested.generate() for _ in range(5)))

            assert tested.state("decode-0") == "DRAINING"
            assert len(leaving.submits) == 1, "before its heartbeats could say so"
            assert {each.usage.decode_workers[0] for each in answers} == {"decode-1"}
            await asyncio.sleep(2.0)
            assert tested.state("decode-0") == "DRAINING", "whatever its heartbeats say"
            finished = await first
            assert list(finished.usage.decode_workers) == ["decode-0"]
            assert finished.usage.stats.resumptions == 0

    run_virtual(main())


def test_a_worker_with_another_model_is_not_used_and_the_difference_is_named() -> None:
    async def main() -> None:
        async with running_router(ScriptedWorker("decode-0")) as tested:
            stranger = ScriptedWorker("decode-1", fingerprint="other")
            server = tested.network.server(stranger.address)
            tested.workers["decode-1"] = stranger
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(stranger, server)
            await server.start()
            await tested.announce()
            await asyncio.sleep(1.0)

            assert tested.state("decode-1") == "DEAD"
            assert tested.state("decode-0") == "READY"
            reason = "a model other than that of decode-0: fingerprint is 'other', not 'f'"
            assert tested.router.registry.misfits() == {"decode-1": reason}

    run_virtual(main())


def test_a_worker_with_another_tokenizer_than_the_routers_gets_no_request(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    own = tokenizer_digest(tmp_path)
    told = {"decode-0": "another", "decode-1": own, "decode-2": ""}  # an older release tells none
    workers = [ScriptedWorker(name, tokenizer_digest=digest) for name, digest in told.items()]

    async def main() -> None:
        async with running_router(model_dir=tmp_path) as tested:
            for worker in workers:
                await tested.serve(worker)
            await tested.router.set_workers([each.member for each in workers])
            await asyncio.sleep(1.0)
            reason = "another tokenizer.json than this router's"
            assert tested.router.registry.misfits() == {"decode-0": reason}
            states = {each.worker_id: each.state for each in tested.router.cluster_status().workers}
            assert states == {"decode-0": "dead", "decode-1": "ready", "decode-2": "ready"}

    run_virtual(main())


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"page_size": 0}, "page_size: found 0; allowed: 1 to 1048576"),
        ({"vocab_size": 0}, "vocab_size: found 0; allowed: 1 to 16777216"),
        ({"vocab_size": 2**32 - 1}, "vocab_size: found 4294967295; allowed: 1 to 16777216"),
        ({"max_context_tokens": 0}, "max_context_tokens: found 0; allowed: 2 to 2147483647"),
        ({"eos_token_ids": (2, 400)}, "eos_token_ids: found 400; allowed: 0 to 399"),
    ],
)
def test_a_worker_whose_model_cannot_be_gets_no_request(told: dict[str, Any], reason: str) -> None:
    async def main() -> None:
        async with running_router(worker_wait_s=2.0) as tested:
            broken = ScriptedWorker("decode-0", **told)
            await tested.serve(broken)
            await tested.router.set_workers([broken.member])
            await asyncio.sleep(1.0)
            assert tested.router.registry.misfits() == {"decode-0": reason}
            right = ScriptedWorker("decode-1")
            await tested.serve(right)
            await tested.router.set_workers([broken.member, right.member])
            assert (await tested.generate()).error is None

    run_virtual(main())


@pytest.mark.parametrize("version", [0, CONTRACT_VERSION + 1])
@pytest.mark.parametrize("source", ["worker", "controller"])
def test_a_worker_of_another_contract_version_gets_no_request_and_the_error_says_why(
    source: str, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    difference = f"contract version: found {version}; allowed: {CONTRACT_VERSION}"

    async def main() -> None:
        async with running_router(worker_wait_s=2.0) as tested:
            other = ScriptedWorker("decode-0")
            member = other.member
            if source == "worker":
                other.contract_version = version
            else:
                member = replace(member, contract_version=version)
            await tested.serve(other)
            await tested.router.set_workers([member])
            refused = await tested.generate()
            assert refused.error is not None
            assert refused.error.code() is grpc.StatusCode.UNAVAILABLE
            assert refused.error.details() == f"no worker for 2 s ({difference})"
            [status] = tested.router.cluster_status().workers
            assert (status.state, status.misfit) == ("dead", difference)

            # Another start of the right version serves; when it has gone, too, this is told again.
            right = ScriptedWorker("decode-1")
            await tested.serve(right)
            await tested.router.set_workers([member, right.member])
            assert (await tested.generate()).error is None
            tested.network.kill(right.address)
            refused = await tested.generate()
            assert refused.error is not None
            assert f"no decode worker for 2 s ({difference}); 0" in (refused.error.details() or "")
            assert other.submits == []
            assert other.subscriptions == []

    run_virtual(main())
    reasons = [
        vars(each)[ATTRIBUTE]["reason"]
        for each in caplog.records
        if each.msg == "worker_unreachable" and vars(each)[ATTRIBUTE]["worker_id"] == "decode-0"
    ]
    assert reasons == [difference], "once, not at each attempt"


def test_workers_may_differ_in_capacity_and_the_smallest_limits_requests() -> None:
    async def main() -> None:
        prefill = ScriptedWorker("prefill-0", pool="prefill", max_context_tokens=512)
        large = ScriptedWorker("decode-0", max_context_tokens=100)
        async with running_router(prefill, large) as tested:
            await tested.add(ScriptedWorker("decode-1", max_context_tokens=50, max_choices=2))
            assert {tested.state(name) for name in tested.workers} == {"READY"}
            too_long = await tested.generate(prompt=[5] * 60)
            assert too_long.error is not None
            assert too_long.error.code() is grpc.StatusCode.INVALID_ARGUMENT
            too_many = inference_pb2.GenerateRequest(token_ids=pack_token_ids([5] * 40))
            too_many.sampling.n = 3
            refused = await tested.generate(request=too_many)
            assert refused.error is not None
            assert refused.error.details() == "sampling.n: found 3; allowed: 1 to 2"
            await tested.generate(
                request=inference_pb2.GenerateRequest(token_ids=pack_token_ids([5] * 40))
            )
            [submit] = [each for w in tested.workers.values() for each in w.submits]
            assert submit.sampling.max_tokens == 10
            # A small worker that is away for a moment must not be sent what it can't hold.
            tested.network.kill(tested.workers["decode-1"].address)
            await asyncio.sleep(3.0)
            assert tested.router.registry.model is not None
            assert tested.router.registry.model.max_context_tokens == 50
            # One that has left limits nobody.
            del tested.workers["decode-1"]
            await tested.announce()
            model = tested.router.registry.model
            assert (model.max_context_tokens, model.max_choices) == (100, 64)

    run_virtual(main())


@pytest.mark.parametrize(
    "place", ["router.dispatch.wire.submit", "router.metrics.RouterMetrics.dispatched"]
)
def test_a_bug_while_a_request_is_sent_leaves_no_load_and_no_stream(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The load is checked by running_router."""

    def crash(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    async def main() -> None:
        async with running_router(ScriptedWorker("decode-0")) as tested:
            with monkeypatch.context() as patch:
                patch.setattr(place, crash)
                answer = await tested.generate()
            assert answer.error is not None
            assert answer.error.code() is grpc.StatusCode.INTERNAL
            tested.check_idle()

            assert (await tested.generate()).error is None

    run_virtual(main())


def test_columns_of_different_lengths_end_the_session_with_a_plain_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async def send_uneven(session: Session, submit: Submit) -> None:
            session.send(delta(submit, 0, 0, 3))
            uneven = worker_pb2.SessionResponse()
            uneven.tokens.streams.append(session.first_streams[submit.request_id, submit.attempt])
            uneven.tokens.token_ids.extend([token_at(0, 3), 7])
            uneven.tokens.indices.append(3)
            session.outbox.put_nowait(uneven)

        async with running_router(ScriptedWorker("decode-0", serve=once(send_uneven))) as tested:
            answer = await tested.generate()

            assert answer.error is None
            assert answer.token_ids() == tokens(0, 10)
            assert answer.usage.stats.resumptions == 1

    run_virtual(main())
    told = [str(vars(each)) for each in caplog.records]
    reason = (
        "the session broke: tokens: found 1, 2 and 1 streams, token_ids and indices; "
        "allowed: as many of each"
    )
    assert any(reason in each for each in told), told
    assert not any(each.exc_info for each in caplog.records)


def test_a_session_that_can_write_no_more_ends_and_its_requests_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_calls = 0

    def crash_once(waiting: deque[Any]) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise ZeroDivisionError("a bug")
        return gather(waiting)

    async def main() -> None:
        monkeypatch.setattr("pagewire.protos.gathering.gather", crash_once)
        worker = ScriptedWorker("decode-0", token_s=0.1)
        async with running_router(worker) as tested:
            running = asyncio.create_task(tested.generate(max_tokens=20))
            await wait_until(lambda: bool(worker.submits))
            answer = await tested.generate(max_tokens=5)

            for each in (answer, await running):
                assert each.error is None
                assert each.token_ids() == tokens(0, len(each.token_ids()))
                assert each.usage.stats.resumptions == 1

    run_virtual(main())


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_bug_while_tokens_are_taken_in_ends_that_request_only(
    monkeypatch: pytest.MonkeyPatch, is_resumed: bool
) -> None:
    right = Generation.accept

    def crash_for_two_choices(self: Generation, *delta: Any) -> bool:
        if len(self.choices) == 2 and self.attempt == is_resumed:
            raise ZeroDivisionError("a bug")
        return right(self, *delta)

    monkeypatch.setattr(Generation, "accept", crash_for_two_choices)

    check_that_two_choices_fail_alone(once(refuse_two if is_resumed else honest))


def test_a_bug_while_a_failure_is_taken_in_ends_that_request_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def crash(*_: object) -> bool:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Generation, "fail_attempt", crash)

    check_that_two_choices_fail_alone(refuse_two)


async def refuse_two(session: Session, submit: Submit) -> None:
    """Refuse a request for two choices, and serve others."""
    if len(submit.choices) == 2:
        session.fail(submit, grpc.StatusCode.UNAVAILABLE)
    else:
        await honest(session, submit)


def check_that_two_choices_fail_alone(serve: Serve) -> None:
    """Ask for two choices, with which the router has a bug, beside a request for one."""

    async def main() -> None:
        worker = ScriptedWorker("decode-0", token_s=0.1, serve=serve)
        async with running_router(worker) as tested:
            other = asyncio.create_task(tested.generate(max_tokens=20))
            await wait_until(lambda: bool(worker.submits))
            answer = await tested.generate(n=2)

            assert answer.error is not None
            assert answer.error.code() is grpc.StatusCode.INTERNAL
            assert "ZeroDivision" not in (answer.error.details() or "")
            assert (await other).usage.stats.resumptions == 0
            assert len(worker.cancels) == 1, "the worker frees it"

    run_virtual(main())


def test_membership_is_idempotent() -> None:
    async def main() -> None:
        worker = ScriptedWorker("decode-0", token_s=0.05)
        async with running_router(worker) as tested:
            call = asyncio.create_task(tested.generate(max_tokens=20))
            for _ in range(10):
                await asyncio.sleep(0.05)
                await tested.announce()

            assert (await call).usage.stats.resumptions == 0
            assert len(worker.submits) == 1

    run_virtual(main())


@pytest.mark.parametrize("comes_back", [False, True])
def test_what_is_kept_for_workers_that_left_stays_bounded_though_nobody_asks_for_them(
    comes_back: bool,
) -> None:
    """A dozen come one after the other, under new names or as new starts of the same."""

    def worker(number: int) -> ScriptedWorker:
        if comes_back:
            return ScriptedWorker("decode-0", incarnation=number + 1)
        return ScriptedWorker(f"decode-{number}")

    async def main() -> None:
        present = worker(0)
        async with running_router(present) as tested:
            router = tested.router
            for number in range(1, 12):
                answer = await tested.generate(max_tokens=2, prompt=range(5, 30))
                assert answer.error is None
                left, present = tested.workers.pop(present.worker_id), worker(number)
                await tested.add(present)
                tested.network.kill(left.address)
                await asyncio.sleep(30.0)

                assert len(router.registry._departed) <= 3
                assert list(router.registry._workers) == [present.worker_id]
                index, sessions = router.index, router.dispatcher._sessions
                for kept in (sessions, index._bits, index._positions, index._expiries):
                    assert len(kept) <= 1
                names = [each.get_name().partition("-")[0] for each in asyncio.all_tasks()]
                assert names.count("follow") == 1
                assert names.count("session") <= 1

    run_virtual(main())


def test_stopping_lets_running_requests_finish_within_the_grace() -> None:
    async def main() -> None:
        async with running_router(ScriptedWorker("decode-0", token_s=0.1)) as tested:
            short = asyncio.create_task(tested.generate(max_tokens=10))
            long = asyncio.create_task(tested.generate(max_tokens=400))
            await asyncio.sleep(0.3)
            stopping = asyncio.create_task(tested.router.stop(2.0))
            await asyncio.sleep(0.1)
            refused = await tested.generate()
            await stopping

            assert refused.error is not None
            assert refused.error.code() is grpc.StatusCode.UNAVAILABLE
            assert (await short).error is None
            error = (await long).error
            assert error is not None
            assert error.code() is grpc.StatusCode.UNAVAILABLE

    run_virtual(main())


@pytest.mark.parametrize("seed", [*range(20), *rarely(*range(20, 60))])
def test_whatever_workers_do_each_stream_is_right_or_ends_with_one_error(seed: int) -> None:
    rng = seeded(seed, "faults")

    async def unreliable(session: Session, submit: Submit) -> None:
        position = {c.choice: len(c.emitted_token_ids) // 4 for c in submit.choices}
        while position:
            await asyncio.sleep(rng.uniform(0.001, 0.05))
            if submit.request_id in session.cancelled:
                return
            choice = rng.choice(sorted(position))
            first = position[choice]
            count = rng.randrange(1, 4)
            fault = rng.random()
            if fault < 0.02:
                session.end()
                return
            if fault < 0.04:
                session.fail(submit, rng.choice([grpc.StatusCode.ABORTED] * 3))
                return
            if fault < 0.05:
                session.send(delta(submit, choice, first + 1))  # a gap
                return
            if fault < 0.06:
                session.send(delta(submit, choice, first, submit.sampling.max_tokens))  # too many
                return
            if fault < 0.15:
                first = max(0, first - rng.randrange(4))  # a repetition
            elif fault < 0.2:
                session.send(delta(submit, choice, first, attempt=submit.attempt + 1))
            elif fault < 0.21:
                session.worker.is_silent = True
                loop = asyncio.get_running_loop()
                loop.call_later(4.0, setattr, session.worker, "is_silent", False)
                return
            count = min(count, submit.sampling.max_tokens - first)
            session.send(delta(submit, choice, first, count))
            position[choice] = max(position[choice], first + count)
            if position[choice] >= submit.sampling.max_tokens:
                del position[choice]

    async def main() -> None:
        workers = [ScriptedWorker(f"decode-{i}", serve=unreliable) for i in range(3)]
        async with running_router(*workers, dead_after_s=2.0) as tested:
            shapes = [(rng.randrange(1, 30), rng.randrange(1, 4)) for _ in range(12)]
            answers = await asyncio.gather(
                *(tested.generate(max_tokens=count, n=n) for count, n in shapes)
            )

            for answer, (count, n) in zip(answers, shapes, strict=True):
                for choice in range(n):
                    received = answer.token_ids(choice)
                    assert received == tokens(choice, len(received))
                    assert answer.error or len(received) == count
                if answer.error:
                    assert answer.error.code() is grpc.StatusCode.ABORTED
            attempts = [each.attempt for worker in workers for each in worker.submits]
            assert max(attempts) <= 3

    run_virtual(main())
