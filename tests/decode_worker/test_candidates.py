from dataclasses import replace

from decode_worker.candidates import Candidates
from decode_worker.request import Choice, PrefillGroup, Request
from llm_engine.sampling import SamplingParams
from worker.identity import WorkerIdentity

FIRST, SECOND, MET = (
    WorkerIdentity(worker_id=name, incarnation=1, address="") for name in ("first", "second", "met")
)


def group_of(*candidates: WorkerIdentity) -> PrefillGroup:
    request = Request(
        request_id="r",
        attempt=0,
        prompt=(1, 2),
        params=SamplingParams(),
        emitted={0: ()},
        candidates=candidates,
        arrival=5,
    )
    request.choices = [Choice(request, 0, [])]
    return PrefillGroup(request.choices, request.prompt)


def all_asked(candidates: Candidates, group: PrefillGroup) -> list[WorkerIdentity]:
    """Let each prefill worker that is asked fail."""
    asked = []
    while (candidate := candidates.next_for(group)) is not None:
        asked.append(candidate)
        group.failed = (*group.failed, candidate)
    return asked


def test_candidates_are_asked_in_order_and_none_twice() -> None:
    assert all_asked(Candidates(), group_of(FIRST, SECOND)) == [FIRST, SECOND]
    assert all_asked(Candidates(), group_of()) == []


def test_an_attempt_at_another_start_of_a_candidate_does_not_count() -> None:
    group = group_of(FIRST, SECOND)
    group.failed = (replace(FIRST, incarnation=-1), SECOND)

    assert Candidates().next_for(group) == FIRST


def test_those_that_failed_others_are_asked_last_until_they_are_trusted_again() -> None:
    candidates = Candidates()
    candidates.distrust(FIRST)
    assert all_asked(candidates, group_of(FIRST, SECOND)) == [SECOND, FIRST]

    candidates.distrust(SECOND)
    assert all_asked(candidates, group_of(FIRST, SECOND)) == [FIRST, SECOND]

    candidates.trust(SECOND)
    assert all_asked(candidates, group_of(FIRST, SECOND)) == [SECOND, FIRST]


def test_prefill_workers_that_a_router_has_named_are_asked_after_the_candidates() -> None:
    candidates = Candidates()
    candidates.meet([MET, FIRST], num_arrivals=6)

    assert all_asked(candidates, group_of(FIRST, SECOND)) == [FIRST, SECOND, MET]


def test_a_candidate_is_not_asked_if_another_start_of_it_was_named_later() -> None:
    candidates = Candidates()
    restarted = replace(FIRST, incarnation=2)
    candidates.meet([restarted], num_arrivals=6)

    assert all_asked(candidates, group_of(FIRST, SECOND)) == [SECOND, restarted]


def test_a_candidate_of_a_request_that_came_later_is_asked_though_another_start_was_named() -> None:
    candidates = Candidates()
    restarted = replace(FIRST, incarnation=2)
    candidates.meet([restarted], num_arrivals=5)

    assert all_asked(candidates, group_of(FIRST, SECOND)) == [FIRST, SECOND, restarted]


def test_what_a_router_names_replaces_what_it_named_before() -> None:
    candidates = Candidates()
    candidates.meet([FIRST], num_arrivals=0)
    candidates.meet([MET], num_arrivals=0)

    assert all_asked(candidates, group_of()) == [MET]
