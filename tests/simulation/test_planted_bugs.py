"""Each promise has a planted bug that the simulation must find: a checker that never fails proves
nothing. The same seeds pass without the bug (test_seeded_runs, test_scenarios).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

import decode_worker.receiving
import decode_worker.request
import decode_worker.scheduler
import decode_worker.step_plan
import decode_worker.worker
import kv_transfer.deadlines
import kv_transfer.receiver_protocol
import kv_transfer.sender_protocol
import prefill_worker.scheduler
import prefill_worker.step_plan
import router.dispatch
import router.generation
import router.prefix_index
import router.wire
import router.worker_registry
import router.worker_watch
import worker.context
import worker.step_loop
import worker.suspects
from kv_cache.page_pool import PagePool
from kv_cache.prefix_cache import PrefixCache
from kv_cache.radix_tree import RadixTree
from pagewire.protos.token_ids import pack_token_ids
from tests.simulation import test_scenarios as scenarios
from tests.simulation import test_stuck_workers as stuck_workers
from tests.simulation.seeded_run import run
from tests.support.fake_engine import FakePageStorage
from tests.support.memory_grpc import MemoryNetwork
from tests.support.planted_bugs import Plant, Right, instead_of, no_digest_check
from tests.support.rarely import rarely


@instead_of(kv_transfer.sender_protocol, "_called")
def sends_without_digests(right: Right, state: Any, chunk: int) -> Any:
    """A chunk is posted as soon as the receiver asks for it, with the digests that are there."""
    chunks = [
        each if each.digests else dataclasses.replace(each, digests=()) for each in state.chunks
    ]
    return right(dataclasses.replace(state, chunks=tuple(chunks)), chunk)


def missing_digests_are_not_missed(patch: pytest.MonkeyPatch) -> None:
    """The sender has one digest for a chunk, and the receiver looks at that page alone."""
    receiver = kv_transfer.receiver_protocol
    posted, digested = receiver._posted, receiver._digested

    def takes_any_number(state: Any, message: Any) -> Any:
        if called := receiver._find(state, message.chunk, receiver.Stage.CALLED):
            first = message.digests[:16] * called.ready.num_pages
            message = dataclasses.replace(message, digests=first)
        return posted(state, message)

    def looks_at_the_first(state: Any, chunk: int, digests: Any) -> Any:
        return digested(state, chunk, digests[:1] * len(digests))

    patch.setattr(receiver, "_posted", takes_any_number)
    patch.setattr(receiver, "_digested", looks_at_the_first)


def no_quarantine(patch: pytest.MonkeyPatch) -> None:
    """Pages of a failed transfer are free at once, though a posted receive may still land."""
    right = PrefixCache.abort
    patch.setattr(
        PrefixCache, "abort", lambda self, seq, *, quarantine: right(self, seq, quarantine=False)
    )


def lease_never_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "release_lease", lambda self, lease: None)


@instead_of(PrefixCache, "lease")
def lease_released_at_once(right: Right, self: PrefixCache, seq: Any, num_pages: int) -> Any:
    """The sender's pages may be evicted and overwritten before they are sent."""
    lease = right(self, seq, num_pages)
    self.release_lease(lease)
    return lease


def cancel_forgets_the_transfer(patch: pytest.MonkeyPatch) -> None:
    """The end of a request leaves its running prefill call alone."""
    patch.setattr(decode_worker.receiving.PrefillReceivers, "cancel", lambda self, request: None)


def cancel_forgets_running_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decode_worker.scheduler.Scheduler, "free_ended", lambda self: None)


def quarantine_never_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "release_quarantine", lambda self, pages: None)


def wait_without_deadline(patch: pytest.MonkeyPatch) -> None:
    """A transfer waits for ever."""
    deadlines = kv_transfer.deadlines.TransferDeadlines
    patch.setattr(deadlines, "seconds", lambda self, *anything: 1e9)


@instead_of(router.wire, "submit")
def resume_takes_output_for_prompt(right: Right, request: Any, *, choices: Any, **rest: Any) -> Any:
    """The new worker counts positions and penalties as if nothing had been emitted."""
    emitted = list(choices[0][1])
    prompt = request.packed_token_ids + pack_token_ids(emitted)
    forgetful = dataclasses.replace(request, packed_token_ids=prompt)
    return right(forgetful, choices=[(choice, []) for choice, _ in choices], **rest)


@instead_of(decode_worker.step_plan, "next_draw")
def resume_draws_one_position_early(
    right: Right, params: Any, *, output_token_ids: Any, **rest: Any
) -> Any:
    draw = right(params, output_token_ids=output_token_ids, **rest)
    return dataclasses.replace(draw, position=draw.position - bool(output_token_ids))


@instead_of(decode_worker.scheduler.Scheduler, "_wait_again")
def preempted_choice_loses_a_token(right: Right, self: Any, choice: Any) -> None:
    if len(choice.output) > 1:
        choice.output.pop(0)
    right(self, choice)


def cancelled_choices_give_pages_back_in_flight(patch: pytest.MonkeyPatch) -> None:
    _give_pages_back_in_flight(patch, is_stop=False)


def stopped_choices_give_pages_back_in_flight(patch: pytest.MonkeyPatch) -> None:
    _give_pages_back_in_flight(patch, is_stop=True)


def _give_pages_back_in_flight(patch: pytest.MonkeyPatch, *, is_stop: bool) -> None:
    """The step that was launched for a choice before its end was known still writes there."""
    scheduler = decode_worker.scheduler.Scheduler
    advance, free_ended = scheduler._advance, scheduler.free_ended
    stopped: set[Any] = set()

    def noted(self: Any, choice: Any, token: Any) -> Any:
        delta = advance(self, choice, token)
        if choice.is_ended:
            stopped.add(choice)
        return delta

    def wrong(self: Any) -> None:
        for choice in self._running:
            if choice.is_ended and (choice in stopped) is is_stop:
                choice.num_in_flight = 0
        free_ended(self)

    patch.setattr(scheduler, "_advance", noted)
    patch.setattr(scheduler, "free_ended", wrong)


def steps_in_flight_do_not_delay_preemption(patch: pytest.MonkeyPatch) -> None:
    """The token that a launched step draws for the victim comes when it waits again."""
    scheduler = decode_worker.scheduler.Scheduler
    right = scheduler._stop_running

    def wrong(self: Any, choice: Any) -> None:
        choice.num_in_flight = 0
        right(self, choice)

    patch.setattr(scheduler, "_num_pages_due", lambda self: 0)
    patch.setattr(scheduler, "_stop_running", wrong)


@instead_of(prefill_worker.step_plan, "next_draw")
def resume_counts_a_token_that_nobody_read(
    right: Right, params: Any, *, output_token_ids: Any, **rest: Any
) -> Any:
    """As if the step that a killed worker had launched last had been read, too."""
    draw = right(params, output_token_ids=output_token_ids, **rest)
    return dataclasses.replace(draw, position=draw.position + bool(output_token_ids))


@instead_of(prefill_worker.scheduler.Scheduler, "_hand_over")
def chunks_are_sent_when_they_are_launched(right: Right, self: Any, prompt: Any) -> Any:
    """A step that is killed, or fails, has not written the pages that are on their way."""
    num_computed = prompt.num_computed
    prompt.num_computed += prompt.num_launched
    ready = right(self, prompt)
    prompt.num_computed = num_computed
    return ready


def repeated_tokens_are_delivered(patch: pytest.MonkeyPatch) -> None:
    """The router does not compare a delta's first index with what it has."""
    right = router.generation.Choice.accept

    def wrong(self: Any, delta: Any) -> int:
        shifted = dataclasses.replace(delta, first_index=len(self.token_ids))
        return right(self, shifted)

    def amnesiac(self: Any, worker_id: str) -> Any:
        return [(choice, []) for choice, _ in begin(self, worker_id)]

    begin = router.generation.Generation.begin_attempt
    patch.setattr(router.generation.Choice, "accept", wrong)
    patch.setattr(router.generation.Generation, "begin_attempt", amnesiac)


def broken_session_forgets_its_requests(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(router.dispatch.Session, "fail", lambda self, reason: None)


def nobody_pings(patch: pytest.MonkeyPatch) -> None:
    """Connections of a host that is gone stay open."""
    patch.setattr(MemoryNetwork, "connected", lambda self, call: None)


def lateness_is_death(patch: pytest.MonkeyPatch) -> None:
    """A worker whose heartbeats are late counts as dead at once."""
    watch = router.worker_watch.WorkerWatch
    right = watch._next_heartbeat

    async def wrong(self: Any, call: Any) -> Any:
        self._config = dataclasses.replace(self._config, dead_after_s=2.0)
        return await right(self, call)

    patch.setattr(watch, "_next_heartbeat", wrong)


def silence_is_not_death(patch: pytest.MonkeyPatch) -> None:
    """A worker counts as alive as long as its stream does not break."""

    async def wrong(self: Any, call: Any) -> Any:
        return await call.read()

    patch.setattr(router.worker_watch.WorkerWatch, "_next_heartbeat", wrong)


def answer_is_progress(patch: pytest.MonkeyPatch) -> None:
    """A worker that is stuck counts as moving again as soon as it can be reached."""
    watch = router.worker_watch.WorkerWatch
    right = watch.run

    async def wrong(self: Any) -> Any:
        self._worker.stalled_s, self._worker._num_steps = 0.0, -1
        return await right(self)

    patch.setattr(watch, "run", wrong)


def referenced_pages_are_evicted(patch: pytest.MonkeyPatch) -> None:
    right = PagePool.reference

    def wrong(self: PagePool, page_ids: Any) -> None:
        right(self, page_ids)
        self.dereference(page_ids)

    patch.setattr(PagePool, "reference", wrong)
    patch.setattr(PagePool, "dereference", _dereference_if_referenced(PagePool.dereference))


def _dereference_if_referenced(right: Any) -> Any:
    def wrong(self: PagePool, page_ids: Any) -> None:
        right(self, [page_id for page_id in page_ids if self.num_references(page_id)])

    return wrong


@instead_of(RadixTree, "insert")
def uncomputed_pages_are_shared(
    right: Right, self: RadixTree, parent: Any, *, is_ready: bool, **page: Any
) -> Any:
    """Others read pages that are still being computed or received."""
    return right(self, parent, is_ready=True, **page)


def fork_copies_nothing(patch: pytest.MonkeyPatch) -> None:
    """The choices of a request do not get the partial last page of their prompt."""
    right = PrefixCache.fork
    patch.setattr(PrefixCache, "fork", lambda self, seq, n: (right(self, seq, n)[0], ()))


@instead_of(RadixTree, "match")
def pages_of_another_hash_match(
    right: Right, self: RadixTree, page_tokens: Any, salt: bytes
) -> Any:
    """The tree takes any child for the right one."""
    found = right(self, page_tokens, salt)
    return found[::-1] if len(found) > 2 else found


def imported_pages_are_shifted(patch: pytest.MonkeyPatch) -> None:
    """Sender and receiver disagree about the order of pages, and the digest with them."""
    no_digest_check(patch)
    right = FakePageStorage.import_pages
    patch.setattr(
        FakePageStorage,
        "import_pages",
        lambda self, page_ids, contents: right(self, page_ids[::-1], contents),
    )


@instead_of(decode_worker.scheduler.Scheduler, "receive_result")
def prefill_draws_for_one_choice(
    right: Right, self: Any, group: Any, tokens: Any, **rest: Any
) -> Any:
    """All choices begin with the token of the first."""
    return right(self, group, [tokens[0]] * len(tokens), **rest)


@instead_of(router.prefix_index.PrefixIndex, "apply")
def evictions_do_not_reach_the_index(right: Right, self: Any, worker_id: str, batch: Any) -> bool:
    return right(self, worker_id, dataclasses.replace(batch, removed=b""))


def load_is_never_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(router.dispatch.Placement, "release", lambda self, now: None)


def registry_does_not_stop(patch: pytest.MonkeyPatch) -> None:
    """A router that stopped still follows its workers."""

    async def wrong(self: Any) -> None:
        pass

    patch.setattr(router.worker_registry.WorkerRegistry, "stop", wrong)


def step_that_raises_ends_the_loop(patch: pytest.MonkeyPatch) -> None:
    """One pass that fails costs the worker, not only the requests of the pass."""

    def wrong(self: Any, plan: Any) -> Any:
        raise RuntimeError("planted")

    patch.setattr(decode_worker.scheduler.Scheduler, "fail_step", wrong)


@instead_of(PrefixCache, "_withdraw_pending")
def lost_prefix_wakes_nobody(right: Right, self: PrefixCache, seq: Any) -> None:
    """Who waits for a prefix whose transfer fails waits for ever."""
    settled = list(self._settled)
    right(self, seq)
    self._settled = settled


def dead_engine_goes_on(patch: pytest.MonkeyPatch) -> None:
    """A worker fails every request and takes the next."""

    async def wrong(self: Any, error: Exception) -> None:
        pass

    patch.setattr(worker.step_loop.StepLoop, "_judge", wrong)


def failed_passes_are_not_halved(patch: pytest.MonkeyPatch) -> None:
    """One request that makes passes fail takes those beside it along."""
    for plan in (decode_worker.step_plan.StepPlan, prefill_worker.step_plan.StepPlan):
        patch.setattr(plan, "halves", lambda self: ())


@instead_of(decode_worker.step_plan.StepPlan, "engine_step")
def seats_outlive_a_failed_step(
    right: Right, self: Any, eos_token_ids: Any, *, is_again: bool
) -> Any:
    """What follows a failed step goes on from tokens that nobody read."""
    return right(self, eos_token_ids, is_again=False)


def failed_passes_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    """One request costs worker after worker its engine."""
    patch.setattr(decode_worker.worker.DecodeWorker, "_given_up", lambda self, request: None)


def suspects_compute_with_others(patch: pytest.MonkeyPatch) -> None:
    """A request that costs a second worker its engine takes those in its pass along."""
    patch.setattr(worker.suspects.SuspectTurns, "next_pass", lambda self, ready: lambda each: True)


@instead_of(router.wire, "submit")
def next_worker_knows_no_suspects(
    right: Right, *request: Any, failed_passes: int, **rest: Any
) -> Any:
    """The router does not tell the next worker of passes that failed."""
    return right(*request, failed_passes=0, **rest)


def policy_raises(patch: pytest.MonkeyPatch) -> None:
    """A bug that one request meets is told in the log."""

    def wrong(*anything: Any, **options: Any) -> Any:
        raise RuntimeError("planted")

    patch.setattr(router.dispatch, "route", wrong)


# (bug, family of faults, what a violation says); found within so many seeds
SEEDED_BUGS: list[tuple[Plant, str, str]] = [
    (no_digest_check, "pages_go_wrong", "is wrong"),
    (missing_digests_are_not_missed, "pages_go_wrong", "is wrong"),
    (sends_without_digests, "healthy", "retries"),
    (lease_released_at_once, "healthy", "retries"),
    (resume_takes_output_for_prompt, "decode_dies", ""),
    (repeated_tokens_are_delivered, "decode_dies", ""),
    (broken_session_forgets_its_requests, "decode_dies", "DEADLINE_EXCEEDED"),
    (fork_copies_nothing, "healthy", "is wrong"),
    (pages_of_another_hash_match, "healthy", ""),
    (imported_pages_are_shifted, "healthy", "is wrong"),
    (evictions_do_not_reach_the_index, "healthy", "in its index"),
    (load_is_never_given_back, "healthy", "num_requests at"),
    (prefill_draws_for_one_choice, "healthy", "is wrong"),
    (registry_does_not_stop, "healthy", "left behind"),
    (step_that_raises_ends_the_loop, "passes_fail", "leaked"),
    (policy_raises, "healthy", "logged as an error"),
    (dead_engine_goes_on, "engines_break", "it ended"),
    (failed_passes_are_not_counted, "deadly", "it cost the engines"),
]
# Many seeds, or long ones, find these. The first four have their like in the state machines of
# schedulers and cache.
SLOW_SEEDED_BUGS: list[tuple[Plant, str, str]] = [
    (lease_never_released, "healthy", "leased"),
    (preempted_choice_loses_a_token, "healthy", ""),
    (referenced_pages_are_evicted, "healthy", ""),
    (uncomputed_pages_are_shared, "healthy", ""),
    (wait_without_deadline, "pages_go_wrong", "DEADLINE_EXCEEDED"),
    (resume_draws_one_position_early, "decode_dies", "is wrong"),
    (next_worker_knows_no_suspects, "deadly", ""),
    (cancel_forgets_running_pages, "healthy", "live"),
    (failed_passes_are_not_halved, "toxic", "in a toxic cluster"),
    (quarantine_never_ends, "pages_go_wrong", "quarantine"),
    (lost_prefix_wakes_nobody, "crowds", "starved"),
    (suspects_compute_with_others, "deadly", "it ended INTERNAL"),
]
MAX_SEEDS = 150


@pytest.mark.parametrize(
    ("plant", "family", "says"),
    [*SEEDED_BUGS, *rarely(*SLOW_SEEDED_BUGS)],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_seeded_runs_find(
    plant: Plant, family: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    for seed in range(MAX_SEEDS):
        if any(says in violation for violation in run(family, seed).violations):
            return
    pytest.fail(f"{MAX_SEEDS} seeds of {family} did not find it")


@instead_of(RadixTree, "match")
def prefix_in_flight_is_not_shared(
    right: Right, self: RadixTree, page_tokens: Any, salt: bytes
) -> Any:
    """Pages that are on their way are moved and computed again for the next request."""
    return [page for page in right(self, page_tokens, salt) if page.is_ready]


def decode_computes_everything(patch: pytest.MonkeyPatch) -> None:
    """The transfer silently never happens; all outputs stay right."""
    patch.setattr(decode_worker.scheduler, "prefills_locally", lambda **anything: True)


def stale_incarnation_is_served(patch: pytest.MonkeyPatch) -> None:
    class Anything(int):
        __eq__ = lambda self, other: True  # noqa: E731
        __ne__ = lambda self, other: False  # noqa: E731
        __hash__ = int.__hash__

    right = decode_worker.worker.DecodeWorker.open_session
    patch.setattr(
        decode_worker.worker.DecodeWorker,
        "open_session",
        lambda self, router_id, incarnation, version: right(
            self, router_id, Anything(incarnation), version
        ),
    )


@instead_of(worker.context.WorkerContext, "check_incarnation")
def stale_prefill_incarnation_is_served(right: Right, self: Any, incarnation: int) -> None:
    if not self.identity.worker_id.startswith("prefill"):
        right(self, incarnation)


def cancelled_request_is_decoded_on(patch: pytest.MonkeyPatch) -> None:
    """The router does not tell the worker that a client left."""
    patch.setattr(router.dispatch.Session, "remove", lambda self, stream: None)


@instead_of(router.generation.Generation, "take_outputs")
def reader_holds_up_the_session(right: Right, self: Any) -> Any:
    """The router hands tokens to a client one message at a time, however slow it is."""
    outputs = right(self)
    return [
        dataclasses.replace(
            each, token_ids=[token_id], first_index=each.first_index + offset, finish=None
        )
        for each in outputs
        for offset, token_id in enumerate(each.token_ids)
    ]


SCENARIO_BUGS: list[tuple[Plant, Callable[[], None]]] = [
    (
        prefix_in_flight_is_not_shared,
        scenarios.test_16_requests_with_one_new_prefix_move_and_compute_its_pages_once,
    ),
    (
        decode_computes_everything,
        scenarios.test_one_prefill_and_one_decode_worker_answer_as_the_oracle,
    ),
    (stale_incarnation_is_served, scenarios.test_a_message_for_another_incarnation_is_refused),
    (
        stale_prefill_incarnation_is_served,
        scenarios.test_a_message_for_another_incarnation_is_refused,
    ),
    (no_quarantine, scenarios.test_a_write_that_comes_late_hits_nobody),
    (
        cancelled_choices_give_pages_back_in_flight,
        lambda: scenarios.test_pages_of_a_request_that("is cancelled"),
    ),
    (
        stopped_choices_give_pages_back_in_flight,
        lambda: scenarios.test_pages_of_a_request_that("stops"),
    ),
    (
        cancel_forgets_the_transfer,
        lambda: scenarios.test_a_client_that_leaves_while_its_request("is computed"),
    ),
    (
        steps_in_flight_do_not_delay_preemption,
        scenarios.test_a_pool_that_fills_preempts_and_nobody_starves,
    ),
    (
        resume_counts_a_token_that_nobody_read,
        lambda: scenarios.test_a_decode_worker_killed_in_mid_stream_loses_and_changes_no_token(
            scenarios.GREEDY, 1, silently=False
        ),
    ),
    (
        chunks_are_sent_when_they_are_launched,
        lambda: scenarios.test_a_prefill_worker_killed_while_it("computes", False, False),
    ),
    (
        seats_outlive_a_failed_step,
        scenarios.test_a_step_that_fails_under_another_is_computed_again_and_so_is_the_other,
    ),
    (
        nobody_pings,
        lambda: scenarios.test_a_decode_worker_killed_in_mid_stream_loses_and_changes_no_token(
            scenarios.GREEDY, 1, silently=True
        ),
    ),
    (
        silence_is_not_death,
        scenarios.test_a_decode_worker_that_stays_silent_is_dead_though_its_connection_holds,
    ),
    (
        lateness_is_death,
        lambda: scenarios.test_a_worker_that_is_late_is_nobodys_death("block", 8.0),
    ),
    *(
        (
            answer_is_progress,
            lambda each=each: (
                stuck_workers.test_a_worker_whose_step_hangs_takes_nothing_until_it_ends(
                    "decode", 2, "well", each
                )
            ),
        )
        for each in ("never", "before it is dead")
    ),
    (
        cancelled_request_is_decoded_on,
        lambda: scenarios.test_a_client_that_leaves_while_its_request("is decoded"),
    ),
    (reader_holds_up_the_session, scenarios.test_a_slow_reader_does_not_stall_others),
]


@pytest.mark.parametrize(
    ("plant", "scenario"), SCENARIO_BUGS, ids=lambda each: getattr(each, "__name__", "")
)
def test_scenarios_find(
    plant: Plant, scenario: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        scenario()
