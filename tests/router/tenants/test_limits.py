"""What one tenant may take, and what that leaves for others."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from google.rpc import error_details_pb2

from credentials.secret import KEY_BYTES
from observability.rare_line import LOG_PERIOD_S
from pagewire.protos import inference_pb2, worker_pb2
from pagewire.protos.token_ids import TOKEN_BYTES, pack_token_ids
from pagewire.routers import token_metadata
from protos.shares import may_take
from router import dispatch, off_loop
from router.call import MAX_LOGGED_REFUSALS
from router.policy import RouteDecision, route
from router.prefix_index import PrefixIndex
from router.tenants.tenant import TenantCounts
from tests.router.error_details import details
from tests.router.many_calls import Caller
from tests.router.many_calls import asking as asking_many
from tests.router.resumed_requests import asking, resuming
from tests.router.scripted_worker import (
    Answer,
    RouterUnderTest,
    ScriptedWorker,
    Session,
    delta,
    honest,
    running_router,
)
from tests.router.tenants.known import CLUSTER_TOKEN, rules, tenants
from tests.router.tokenizers_for_tests import byte_level
from tests.support.conservation import tenant_leaks
from tests.support.virtual_time import run_virtual, wait_until

T = TypeVar("T")
RESUME_KEY = b"k" * KEY_BYTES
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
CLUSTERS_FAULT = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED}


def delay_s(answer: Answer) -> float:
    """The time to come again that a refused call was told."""
    assert answer.error is not None, "it was served"
    assert answer.error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, answer.error
    delay = details(answer.error, error_details_pb2.RetryInfo).retry_delay
    return float(delay.seconds + delay.nanos / 1e9)


def counts_of(tested: RouterUnderTest, name: str) -> TenantCounts:
    [counts] = [each.counts for each in tested.router.tenants.told if each.name == name]
    return counts


def test_a_request_beyond_the_rate_passes_after_the_delay_and_not_before() -> None:
    async def main() -> None:
        known = tenants(rules("acme", requests_per_s=0.7, burst=3), rules("globex"))
        async with running_router(ScriptedWorker("decode-0"), tenants=known) as tested:
            for _ in range(3):
                assert (await tested.generate(token="acme", max_tokens=1)).error is None
            refused = await tested.generate(token="acme")
            again_s = delay_s(refused)
            assert 1.3 < again_s <= 1 / 0.7
            assert refused.error is not None
            told = "requests_per_s: found more requests of this tenant than it may begin; "
            assert f"{told}allowed: 0.7 each second, 3 at once" in (refused.error.details() or "")
            assert (await tested.generate(token="globex")).error is None, "others go on"

            await asyncio.sleep(again_s - 0.2)
            again_s = delay_s(await tested.generate(token="acme"))
            await asyncio.sleep(again_s)
            assert (await tested.generate(token="acme")).error is None
            assert counts_of(tested, "acme").requests == 4
            assert counts_of(tested, "acme").refused == 2

    run_virtual(main())


def test_workers_are_chosen_once_for_a_request_that_waits_for_no_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[RouteDecision] = []

    def counted(*args: Any, **options: Any) -> RouteDecision:
        chosen.append(route(*args, **options))
        return chosen[-1]

    monkeypatch.setattr(dispatch, "route", counted)

    async def main() -> None:
        known = tenants(rules("acme"))
        async with running_router(ScriptedWorker("decode-0"), tenants=known) as tested:
            assert (await tested.generate(token="acme", max_tokens=1)).error is None

    run_virtual(main())
    assert len(chosen) == 1


def test_prompts_and_answers_count_as_tokens_and_what_runs_goes_on() -> None:
    async def main() -> None:
        known = tenants(rules("acme", tokens_per_minute=60))
        async with running_router(ScriptedWorker("decode-0"), tenants=known) as tested:
            answer = await tested.generate(token="acme", prompt=range(5, 45), max_tokens=100)
            assert answer.error is None
            assert len(answer.token_ids()) == 100, "it goes on beyond the limit"
            counts = counts_of(tested, "acme")
            assert (counts.prompt_tokens, counts.generated_tokens) == (40, 100)

            refused = await tested.generate(token="acme")
            again_s = delay_s(refused)
            assert refused.error is not None
            told = "tokens_per_minute: found more tokens of this tenant than it may use; "
            assert f"{told}allowed: 60 each minute" in (refused.error.details() or "")
            assert again_s == pytest.approx(81, abs=3), "140 tokens at one a second, 60 saved"
            await asyncio.sleep(again_s)
            assert (await tested.generate(token="acme", max_tokens=1)).error is None

    run_virtual(main())


def test_what_a_caller_says_that_it_received_counts_as_part_of_the_prompt() -> None:
    """A worker computes it again, whatever it is: else one token of a call buys any number."""

    async def main() -> None:
        known = tenants(rules("acme", tokens_per_minute=60_000))
        worker = ScriptedWorker("decode-0")
        async with running_router(worker, tenants=known, resume_key=RESUME_KEY) as tested:
            request = asking(max_tokens=100, n=2)
            had = (await tested.generate(token="acme", request=request)).messages[:2]
            before = replace(counts_of(tested, "acme"))
            again = resuming(request, had)
            del again.resume.choices[:]
            for choice in range(2):
                again.resume.choices.add(choice=choice, token_ids=pack_token_ids(range(5, 104)))

            assert (await tested.generate(token="acme", request=again)).error is None

            counts = counts_of(tested, "acme")
            assert counts.prompt_tokens - before.prompt_tokens == 3 + 2 * 99
            assert counts.generated_tokens - before.generated_tokens == 2 * 1
            again.resume.choices[0].token_ids = pack_token_ids([4000])
            assert (await tested.generate(token="acme", request=again)).error is not None

    run_virtual(main())


def test_of_prompts_that_come_at_once_only_the_first_overdraws() -> None:
    async def main() -> None:
        known = tenants(rules("acme", tokens_per_minute=60))
        async with running_router(ScriptedWorker("decode-0"), tenants=known) as tested:
            calls = [
                tested.generate(token="acme", prompt=range(5, 105), max_tokens=1) for _ in range(10)
            ]
            answers = await asyncio.gather(*calls)

            assert sum(answer.error is None for answer in answers) == 1
            assert counts_of(tested, "acme").prompt_tokens == 100

    run_virtual(main())


def test_tokens_of_a_call_that_its_client_left_count() -> None:
    async def main() -> None:
        known = tenants(rules("acme"))
        worker = ScriptedWorker("decode-0", token_s=0.1)
        async with running_router(worker, tenants=known, window_bytes=1) as tested:
            # It takes one message, and so the router no more from what was generated.
            await tested.generate(token="acme", max_tokens=100, timeout_s=2.0, read_s=60)
            await wait_until(lambda: tested.router.admission.num_active == 0, timeout_s=5)
            assert 15 <= counts_of(tested, "acme").generated_tokens <= 20

    run_virtual(main())


def test_a_tenant_has_so_many_answers_at_a_time() -> None:
    async def main() -> None:
        known = tenants(rules("acme", max_active_requests=2), rules("globex"))
        worker = ScriptedWorker("decode-0", token_s=0.1)
        async with running_router(worker, tenants=known) as tested:
            running = [asyncio.create_task(tested.generate(token="acme")) for _ in range(2)]
            await asyncio.sleep(0.1)
            refused = await tested.generate(token="acme")
            assert delay_s(refused) > 0
            assert refused.error is not None
            told = "found 2 active answers of this tenant, and 1 more; allowed: 2"
            assert f"max_active_requests: {told}" in (refused.error.details() or "")
            assert (await tested.generate(token="globex")).error is None
            await asyncio.gather(*running)
            assert (await tested.generate(token="acme")).error is None

    run_virtual(main())


def test_texts_of_tokens_are_no_further_answer(tmp_path: Path) -> None:
    """Else an answer over HTTP would end at the first log probabilities of a new token."""
    byte_level().save(str(tmp_path / "tokenizer.json"))

    async def main() -> None:
        known = tenants(rules("acme", max_active_requests=1))
        worker = ScriptedWorker("decode-0", token_s=0.1)
        async with running_router(worker, tenants=known, model_dir=tmp_path) as tested:
            running = asyncio.create_task(tested.generate(token="acme"))
            await asyncio.sleep(0.1)
            request = inference_pb2.DetokenizeRequest(token_ids=pack_token_ids([5]))
            metadata = token_metadata("acme")
            assert (await tested.stub.Detokenize(request, metadata=metadata)).text
            assert delay_s(await tested.generate(token="acme")) > 0, "the answer still runs"
            assert (await running).error is None
            assert (await tested.generate(token="acme")).error is None

    run_virtual(main())


def test_each_choice_of_a_call_counts_as_an_answer() -> None:
    """Else a tenant could fill the workers with `n` times as much as its limit."""

    async def main() -> None:
        known = tenants(rules("acme", max_active_requests=4), rules("globex"))
        worker = ScriptedWorker("decode-0", token_s=0.1)
        async with running_router(worker, tenants=known) as tested:
            running = asyncio.create_task(tested.generate(token="acme", request=asking(n=3)))
            await asyncio.sleep(0.1)
            refused = await tested.generate(token="acme", request=asking(n=2))
            assert delay_s(refused) > 0
            assert (await tested.generate(token="acme", request=asking(n=1))).error is None
            assert (await tested.generate(token="globex", request=asking(n=5))).error is None
            assert (await running).error is None
            assert (await tested.generate(token="acme", request=asking(n=4))).error is None

            never = (await tested.generate(token="acme", request=asking(n=5))).error
            assert never is not None
            assert never.code() is grpc.StatusCode.INVALID_ARGUMENT
            told = "sampling.n: found 5; allowed: at most 4, this tenant's max_active_requests"
            assert told in (never.details() or "")

    run_virtual(main())


def test_calls_that_the_cluster_refuses_use_nothing_of_the_limits() -> None:
    async def main() -> None:
        known = tenants(rules("acme", requests_per_s=0.001, tokens_per_minute=10))
        full = {"pages": inference_pb2.PageCounts(total=10, live=10), "running": 1}
        worker = ScriptedWorker("decode-0", heartbeat=full)
        async with running_router(
            worker, tenants=known, max_expected_wait_s=3.0, max_backlog_s=60.0
        ) as tested:
            for _ in range(3):
                assert delay_s(await tested.generate(token="acme")) == 2.0, "the cluster's"
            counts = counts_of(tested, "acme")
            assert (counts.requests, counts.refused, counts.prompt_tokens) == (0, 3, 0)

    run_virtual(main())


async def refuse(session: Session, submit: worker_pb2.SubmitRequest) -> None:
    session.fail(submit, grpc.StatusCode.RESOURCE_EXHAUSTED)


async def hang(session: Session, submit: worker_pb2.SubmitRequest) -> None:
    """Compute for ever."""


def test_a_resumed_call_that_is_refused_uses_nothing_of_the_limits() -> None:
    async def main() -> None:
        known = tenants(rules("acme", requests_per_s=0.001, burst=2, tokens_per_minute=200))
        worker = ScriptedWorker("decode-0")
        async with running_router(
            worker, tenants=known, resume_key=RESUME_KEY, resume_wait_s=1.0
        ) as tested:
            request = asking(max_tokens=100)
            had = (await tested.generate(token="acme", request=request)).messages[:50]
            before = replace(counts_of(tested, "acme"))
            worker.serve = refuse
            for _ in range(3):
                again_s = delay_s(
                    await tested.generate(token="acme", request=resuming(request, had))
                )
                assert again_s == 0.5, "the cluster's"
            counts = counts_of(tested, "acme")
            assert (counts.requests, counts.prompt_tokens) == (
                before.requests,
                before.prompt_tokens,
            )
            assert counts.refused == 3

            worker.serve = honest
            answer = await tested.generate(token="acme", request=resuming(request, had))
            assert answer.error is None
            assert counts.requests == 2

    run_virtual(main())


def test_a_call_that_found_no_worker_uses_nothing_of_the_limits() -> None:
    async def main() -> None:
        known = tenants(rules("acme", requests_per_s=0.001, tokens_per_minute=10))
        worker = ScriptedWorker("decode-0")
        async with running_router(worker, tenants=known, worker_wait_s=2.0) as tested:
            worker.is_silent = True
            await wait_until(lambda: tested.state("decode-0") != "READY", timeout_s=30)
            for _ in range(3):
                answer = await tested.generate(token="acme")
                assert answer.error is not None
                assert answer.error.code() is UNAVAILABLE, answer.error
            assert counts_of(tested, "acme") == TenantCounts()

    run_virtual(main())


@pytest.mark.parametrize(
    ("code", "num_prompt_tokens"), [(UNAVAILABLE, 0), (grpc.StatusCode.ABORTED, 3)]
)
def test_a_prompt_whose_passes_fail_was_computed_and_counts(
    code: grpc.StatusCode, num_prompt_tokens: int
) -> None:
    async def fail(session: Session, submit: worker_pb2.SubmitRequest) -> None:
        session.fail(submit, code)

    async def main() -> None:
        known = tenants(rules("acme"))
        async with running_router(ScriptedWorker("decode-0", serve=fail), tenants=known) as tested:
            answer = await tested.generate(token="acme")
            assert answer.error is not None
            assert answer.error.code() is grpc.StatusCode.ABORTED, "given up"
            assert counts_of(tested, "acme").prompt_tokens == num_prompt_tokens

    run_virtual(main())


def test_a_caller_that_gives_up_before_its_turn_gets_its_tokens_back_but_has_begun() -> None:
    async def main() -> None:
        known = tenants(rules("acme", requests_per_s=0.001, burst=3, tokens_per_minute=60))
        async with running_router(
            ScriptedWorker("decode-0", serve=hang), tenants=known, max_running_sequences=1
        ) as tested:
            running = asyncio.create_task(tested.generate(token="acme", timeout_s=9.0))
            await asyncio.sleep(5.0)
            for _ in range(2):
                prompt = range(5, 105)
                waiting = await tested.generate(token="acme", prompt=prompt, timeout_s=1.0)
                assert waiting.error is not None
                assert waiting.error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await running
            await wait_until(lambda: tested.router.admission.num_active == 0)
            counts = counts_of(tested, "acme")
            assert (counts.requests, counts.prompt_tokens) == (3, 3), "of what ran"
            assert delay_s(await tested.generate(token="acme")) > 900

    run_virtual(main())


@pytest.mark.parametrize("seed", range(10))
def test_what_counts_is_what_workers_took_whatever_happens_to_calls(seed: int) -> None:
    """Served, refused, broken off, left and resumed, at once and in any order."""
    rng = random.Random(seed)
    taken: dict[str, int] = {}  # request_id |-> tokens to compute, of what was not refused
    calls: list[Answer] = []

    async def any_of(session: Session, submit: worker_pb2.SubmitRequest) -> None:
        what = rng.choice(["serve", "serve", "break off", "hang", "refuse", "refuse", "leave"])
        if what in {"refuse", "leave"}:
            code = grpc.StatusCode.RESOURCE_EXHAUSTED if what == "refuse" else UNAVAILABLE
            session.fail(submit, code)
            return
        packed = [submit.prompt_token_ids, *(each.emitted_token_ids for each in submit.choices)]
        taken.setdefault(submit.request_id, sum(map(len, packed)) // TOKEN_BYTES)
        if what == "serve":
            await honest(session, submit)
        if what == "break off":
            session.send(delta(submit, 0, len(packed[1]) // TOKEN_BYTES))
            session.fail(submit, UNAVAILABLE)

    async def call(tested: RouterUnderTest) -> None:
        request = asking(max_tokens=rng.randrange(2, 60))
        request.token_ids = pack_token_ids(range(5, 5 + rng.randrange(1, 200)))
        await asyncio.sleep(5 * rng.random())
        for _ in range(3):
            answer = await tested.generate(
                token="acme", request=request, timeout_s=rng.choice([0.015, 0.35, 1.25, 5.0])
            )
            calls.append(answer)
            if answer.error is None:
                return
            if answer.messages and not request.HasField("resume"):
                request = resuming(request, answer.messages)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        known = tenants(rules("acme", requests_per_s=1, burst=900, tokens_per_minute=90_000))
        worker = ScriptedWorker("decode-0", serve=any_of)
        async with running_router(
            worker,
            tenants=known,
            resume_key=RESUME_KEY,
            max_running_sequences=4,
            resume_wait_s=1.0,
            retry_delay_s=0.1,
        ) as tested:
            [tenant] = [each for each in known.told if each.name == "acme"]
            tenant._requests.take(400, loop.time())  # so that neither is ever full
            tenant._tokens.take(50_000, loop.time())
            began_at = loop.time()
            await asyncio.gather(*(call(tested) for _ in range(40)))
            await wait_until(lambda: tenant.num_active == 0)

            codes = Counter(each.error and each.error.code() for each in calls)
            assert {None, *CLUSTERS_FAULT, grpc.StatusCode.DEADLINE_EXCEEDED} >= set(codes), codes
            assert len(codes) > 2, codes
            refused = [
                each
                for each in calls
                if each.error and each.error.code() in CLUSTERS_FAULT and not each.messages
            ]
            counts, now = tenant.counts, loop.time()
            assert counts.requests == len(calls) - len(refused)
            assert counts.prompt_tokens == sum(taken.values())
            came = 500 + (now - began_at)
            assert tenant._requests.level(now) == pytest.approx(came - counts.requests)
            used = counts.prompt_tokens + counts.generated_tokens
            came = 40_000 + 1500 * (now - began_at)
            assert tenant._tokens.level(now) == pytest.approx(came - used)

    run_virtual(main())


def test_one_tenant_never_takes_the_last_places() -> None:
    async def main() -> None:
        worker = ScriptedWorker("decode-0", token_s=0.5)
        async with running_router(worker, tenants=tenants(), max_active_requests=18) as tested:
            flood = [asyncio.create_task(tested.generate(token="acme")) for _ in range(100)]
            await asyncio.sleep(0.2)
            assert tested.router.admission.num_active == 16, "8 of 9 places"
            assert (await tested.generate(token="globex", max_tokens=1)).error is None
            answers = await asyncio.gather(*flood)
            refused = [answer for answer in answers if answer.error]
            assert len(refused) == 84
            assert "the rest of the router's 18 places is for other tenants" in (
                refused[0].error.details() or ""  # type: ignore[union-attr]
            )

    run_virtual(main())


def test_places_are_divided_by_weight_among_those_that_want_them() -> None:
    rng = random.Random(0)
    weights = {"a": 1.0, "b": 1.0, "c": 2.0}
    taken = {"a": 0, "b": 0, "c": 0}
    for _ in range(10_000):
        for name, weight in weights.items():
            taken[name] += may_take(taken[name], sum(taken.values()), 1000, weight)
        leaves = rng.choices(list(taken), list(taken.values()))[0]
        taken[leaves] -= 1

    assert sum(taken.values()) > 960
    assert taken["a"] == pytest.approx(taken["b"], rel=0.05)
    assert taken["c"] == pytest.approx(2 * taken["a"], rel=0.05)


def test_a_flood_of_one_tenant_does_not_delay_another_beyond_its_share() -> None:
    """A worker with 4 places: the flood would have 40 s of work before the other's requests."""
    _flood(lambda tested: tested.generate(token="acme", timeout_s=600))


def test_a_flood_of_resumptions_takes_turns_like_any_other() -> None:
    """Its tenant needs one token of one call for it, and may say that it has received nothing."""
    again = _begun_elsewhere()
    again.resume.ClearField("choices")
    _flood(lambda tested: tested.generate(token="acme", request=again, timeout_s=600))


def test_a_stream_goes_on_before_new_requests_of_its_tenant_start() -> None:
    again = _begun_elsewhere()

    async def main() -> None:
        async with _four_places() as tested:
            flood = [asyncio.create_task(tested.generate(token="acme")) for _ in range(100)]
            await asyncio.sleep(3.0)
            at = asyncio.get_running_loop().time()
            answers = await asyncio.gather(
                *(tested.generate(token="acme", request=again) for _ in range(3))
            )
            assert all(answer.error is None for answer in answers)
            waits = [answer.times[0] - at for answer in answers]
            assert max(waits) < 3.0, waits
            assert sum(not each.done() for each in flood) > 70
            await asyncio.gather(*flood)

    run_virtual(main())


def _begun_elsewhere() -> inference_pb2.GenerateRequest:
    """A call of acme that can be resumed, with its first token."""
    request = asking()

    async def begin() -> inference_pb2.GenerateRequest:
        async with running_router(
            ScriptedWorker("decode-0"), tenants=tenants(), resume_key=RESUME_KEY
        ) as tested:
            had = (await tested.generate(token="acme", request=request)).messages
        return resuming(request, had[:1])

    return run_virtual(begin())


@asynccontextmanager
async def _four_places() -> AsyncIterator[RouterUnderTest]:
    """A router whose only worker takes a second for each request of ten tokens."""
    places = asyncio.Semaphore(4)  # a fair one: first come, first served

    async def serve(session: Session, submit: worker_pb2.SubmitRequest) -> None:
        async with places:
            await honest(session, submit)

    async with running_router(
        ScriptedWorker("decode-0", serve=serve, token_s=0.1),
        tenants=tenants(),
        max_running_sequences=4,
        resume_key=RESUME_KEY,
    ) as tested:
        yield tested


def _flood(call: Callable[[RouterUnderTest], Awaitable[Answer]]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with _four_places() as tested:
            flood = [asyncio.ensure_future(call(tested)) for _ in range(160)]
            await asyncio.sleep(3.0)
            waits = []
            for _ in range(5):
                started_at = loop.time()
                answer = await tested.generate(token="globex")
                assert answer.error is None
                waits.append(answer.times[0] - started_at)
            assert max(waits) < 3.0, waits
            answers = await asyncio.gather(*flood)
            assert all(answer.error is None for answer in answers)
            assert loop.time() < 50, "the worker was always busy: 165 requests of 1 s, 4 at a time"

    run_virtual(main())


def test_status_tells_operators_all_and_others_of_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PrefixIndex, "holders", lambda self, page_hash: ["decode-0"])

    async def main() -> None:
        known = tenants(rules("acme"), rules("globex"), rules("ops", operator=True))
        async with running_router(ScriptedWorker("decode-0"), tenants=known) as tested:
            for token in ("acme", "acme", "globex"):
                for last in (50, 60):
                    await tested.generate(token=token, prompt=[*range(10, 40), last])
            request = inference_pb2.GetClusterStatusRequest()

            async def status(token: str) -> inference_pb2.GetClusterStatusResponse:
                return await tested.stub.GetClusterStatus(request, metadata=token_metadata(token))

            acme, ops, own = [await status(each) for each in ("acme", "ops", CLUSTER_TOKEN)]
            assert acme.is_partial
            assert not acme.workers
            assert (acme.index_pages, acme.finished_requests) == (0, 0)
            assert [(each.name, each.requests) for each in acme.tenants] == [("acme", 4)]
            assert [(each.hits, list(each.workers)) for each in acme.hot_prefixes] == [(3, [])]
            assert not ops.is_partial
            assert ops == own
            assert [each.worker.worker_id for each in ops.workers] == ["decode-0"]
            assert [each.name for each in ops.tenants] == ["(cluster)", "acme", "globex", "ops"]
            assert [each.hits for each in ops.hot_prefixes] == [3, 1]
            assert [list(each.workers) for each in ops.hot_prefixes] == [["decode-0"]] * 2

    run_virtual(main())


def test_a_tokenized_prompt_counts_as_a_request_and_its_tokens_do_not(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))

    async def main() -> None:
        known = tenants(rules("acme", requests_per_s=0.1, burst=3, tokens_per_minute=1000))
        worker = ScriptedWorker("decode-0")
        async with running_router(worker, tenants=known, model_dir=tmp_path) as tested:

            async def tokenize() -> grpc.StatusCode:
                request = inference_pb2.TokenizeRequest(text="the fox")
                try:
                    await tested.stub.Tokenize(request, metadata=token_metadata("acme"))
                except grpc.aio.AioRpcError as error:
                    return error.code()
                return grpc.StatusCode.OK

            assert [await tokenize() for _ in range(4)] == [grpc.StatusCode.OK] * 3 + [
                grpc.StatusCode.RESOURCE_EXHAUSTED
            ]
            counts = counts_of(tested, "acme")
            assert (counts.requests, counts.refused, counts.prompt_tokens) == (3, 1, 0)
            assert 9 < delay_s(await tested.generate(token="acme")) <= 10
            assert not tenant_leaks(known)

    run_virtual(main())


def test_a_prompt_that_cannot_be_tokenized_now_uses_nothing_of_the_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(off_loop, "MAX_BYTES", 10)

    async def slow(function: Callable[[], T], /) -> T:
        await asyncio.sleep(1.0)
        return function()

    async def main() -> None:
        known = tenants(rules("acme", requests_per_s=0.1, burst=3), rules("globex"))
        worker = ScriptedWorker("decode-0")
        async with running_router(
            worker, tenants=known, model_dir=tmp_path, run_blocking=slow
        ) as tested:
            request = inference_pb2.TokenizeRequest(text="the fox " * 200)
            other = tested.stub.Tokenize(request, metadata=token_metadata("globex"))
            await asyncio.sleep(0.1)
            with pytest.raises(grpc.aio.AioRpcError, match="wait to be tokenized"):
                await tested.stub.Tokenize(request, metadata=token_metadata("acme"))
            assert counts_of(tested, "acme") == TenantCounts(refused=1)
            await other
            assert not tenant_leaks(known)

    run_virtual(main())


def test_refused_calls_of_one_tenant_are_logged_up_to_a_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="router.call")

    def lines(token: str) -> list[int]:
        return [
            record.fields["not_logged"]  # type: ignore[attr-defined]
            for record in caplog.records
            if record.message == "request_refused" and record.fields["tenant"] == token  # type: ignore[attr-defined]
        ]

    async def main() -> None:
        slow = {"requests_per_s": 0.001, "burst": 1}
        known = tenants(rules("acme", **slow), rules("globex", **slow))
        async with running_router(ScriptedWorker("decode-0"), tenants=known) as tested:
            for _ in range(101):
                await tested.generate(token="acme", max_tokens=1)
            for _ in range(2):
                await tested.generate(token="globex", max_tokens=1)
            assert lines("acme") == [0] * MAX_LOGGED_REFUSALS
            assert lines("globex") == [0], "others' lines are not hidden"

            await asyncio.sleep(LOG_PERIOD_S)
            await tested.generate(token="acme", max_tokens=1)
            assert lines("acme")[-1] == 100 - MAX_LOGGED_REFUSALS

    run_virtual(main())


@pytest.mark.parametrize("has_tenants", [True, False])
def test_a_stream_whose_calls_are_refused_in_a_row_is_read_more_slowly(has_tenants: bool) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        known = tenants(rules("acme", requests_per_s=0.001, burst=1), rules("globex"))
        worker = ScriptedWorker("decode-0", serve=honest if has_tenants else hang)
        async with running_router(
            worker,
            tenants=known if has_tenants else None,
            max_active_requests=100 if has_tenants else 1,
        ) as tested:
            call = tested.stub.GenerateMany(metadata=token_metadata("acme"))
            caller = Caller(call)
            began_at = loop.time()
            for call_id in range(16):
                await caller.start(call_id, asking_many(max_tokens=1))
            await caller.read_until_ended(*range(1, 16))
            assert loop.time() - began_at < 0.5, "a few refusals are nothing special"

            for call_id in range(16, 26):
                await caller.start(call_id, asking_many(max_tokens=1))
            reading = asyncio.create_task(caller.read_until_ended(*range(16, 26)))
            if has_tenants:
                other_at = loop.time()
                assert (await tested.generate(token="globex", max_tokens=1)).error is None
                assert loop.time() - other_at < 0.5, "others go on"
            await reading
            assert (loop.time() - began_at > 8) == has_tenants, (
                "many callers may share a stream of nobody's"
            )
            call.cancel()
            await wait_until(lambda: tested.router.admission.num_active == 0)

    run_virtual(main())
