"""The state machines under every interleaving, and planted bugs that the model must find."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer import receiver_protocol as receiving
from kv_transfer import sender_protocol as sending
from kv_transfer.deadlines import WaitKind
from kv_transfer.messages import ChunkAck, ChunkPosted
from kv_transfer.protocol import DigestPages, PagesDigested, Send
from tests.kv_transfer.model import GOOD, Rules, Violation, explore, settle, walk
from tests.support.rarely import rarely


@pytest.mark.parametrize(("faults", "least"), [(1, 40_000), *rarely((2, 100_000))])
def test_no_interleaving_breaks_an_invariant(faults: int, least: int) -> None:
    assert explore(Rules(), faults=faults) > least


@settings(max_examples=150, derandomize=True)
@given(st.lists(st.integers(0, 10_000), max_size=120))
def test_random_paths_with_many_faults_keep_the_invariants_and_end(choices: list[int]) -> None:
    rules = Rules(num_pages=4)

    world = settle(rules, walk(rules, choices, faults=8))

    for attempt in world.attempts:
        assert attempt.receiver.state.is_finished
        assert not attempt.posted_receives
        assert attempt.sender is None or attempt.sender.state.is_finished
        assert not attempt.posted_sends


def test_without_faults_every_page_is_committed() -> None:
    rules = Rules(num_pages=4)

    world = settle(rules, walk(rules, [], faults=0))

    assert world.commits == (1, 1, 1, 1)
    assert len(world.attempts) == 1


def find_violation(rules: Rules) -> str:
    for faults in (1, 2, 3):
        try:
            explore(rules, faults=faults)
        except Violation as violation:
            return str(violation)
    raise AssertionError("the planted bug was not found")


@pytest.mark.thorough  # like the next but one, it takes two faults
def test_model_finds_missing_quarantine() -> None:
    assert "T2" in find_violation(Rules(has_quarantine=False))


def test_model_finds_missing_digest_check() -> None:
    assert "T2" in find_violation(Rules(has_digest_check=False))


@pytest.mark.thorough
def test_model_finds_missing_ticket_fence() -> None:
    assert "lease" in find_violation(Rules(has_ticket_fence=False))


def commits_after_a_failure(state: Any, event: Any) -> Any:
    following, actions = receiving.step(state, event)
    if following.failure and not state.failure:
        received = [c for c in state.chunks if c.stage is receiving.Stage.RECEIVED]
        following = following._replace(chunks=(*received, *following.chunks))
    return following, actions


def commits_what_arrives_first(state: Any, event: Any) -> Any:
    following, actions = receiving.step(state, event)
    for each in following.chunks[1:]:
        if isinstance(event, receiving.ReceiveDone) and each.chunk == event.chunk:
            actions = (*actions, DigestPages(each.chunk, each.ready.first_page, 1))
    return following, actions


def acknowledges_before_the_commit(state: Any, event: Any) -> Any:
    following, actions = receiving.step(state, event)
    if isinstance(event, receiving.ReceiveDone) and not following.failure:
        actions = (*actions, Send(ChunkAck(state.ticket, event.chunk)))
    return following, actions


def frees_pages_of_a_posted_receive(state: Any, event: Any) -> Any:
    following, actions = receiving.step(state, event)
    if following.failure:
        following = following._replace(chunks=(), is_aborting=False)
    return following, actions


def frees_pages_of_a_posted_send(state: Any, event: Any) -> Any:
    following, actions = sending.step(state, event)
    if following.failure:
        following = following._replace(chunks=(), is_aborting=False)
    return following, actions


def releases_before_the_ack(state: Any, event: Any) -> Any:
    following, actions = sending.step(state, event)
    if isinstance(event, sending.SendDone) and following.chunks:
        done = following.chunks[0]
        actions = (*actions, sending.ReleasePages(done.first_page, done.num_pages))
    return following, actions


@pytest.mark.parametrize(
    ("bug", "invariant"),
    [
        (commits_after_a_failure, "T1"),
        (commits_what_arrives_first, "T2"),
        (acknowledges_before_the_commit, "lease"),
        (frees_pages_of_a_posted_receive, "T3"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_model_finds_a_receiver_that(bug: Callable[..., Any], invariant: str) -> None:
    assert invariant in find_violation(Rules(receiver_step=bug))


def posts_before_it_has_digests(state: Any, event: Any) -> Any:
    following, actions = sending.step(state, event)
    for each in following.chunks:
        if each.is_called and each.digests is None:
            sent = each._replace(stage=sending.Stage.SENDING)
            chunks = tuple(sent if c is each else c for c in following.chunks)
            following = following._replace(chunks=chunks)
            posted = Send(ChunkPosted(state.ticket, each.chunk, GOOD))
            actions = (*actions, sending.PostSend(each.chunk), posted)
    return following, actions


@pytest.mark.parametrize(
    ("bug", "invariant"),
    [
        (frees_pages_of_a_posted_send, "T3"),
        (releases_before_the_ack, "lease"),
        (posts_before_it_has_digests, "before its digests"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_model_finds_a_sender_that(bug: Callable[..., Any], invariant: str) -> None:
    assert invariant in find_violation(Rules(sender_step=bug))


def leaves_digests_out(state: Any, event: Any) -> Any:
    following, actions = sending.step(state, event)
    return following, tuple(
        Send(replace(each.message, digests=b""))
        if isinstance(each, Send) and isinstance(each.message, ChunkPosted)
        else each
        for each in actions
    )


def checks_only_the_digests_that_came(state: Any, event: Any) -> Any:
    if isinstance(event, ChunkPosted):
        event = replace(event, digests=GOOD)
    if isinstance(event, PagesDigested):
        event = replace(event, digests=(GOOD,))
    return receiving.step(state, event)


def test_a_sender_that_leaves_digests_out_has_nothing_committed() -> None:
    rules = Rules(sender_step=leaves_digests_out)

    explore(rules, faults=1)
    world = settle(rules, walk(rules, [], faults=0))

    assert world.commits == (0, 0)
    for attempt in world.attempts:
        assert attempt.receiver.state.is_finished
        assert not attempt.posted_receives


def test_model_finds_a_receiver_that_misses_no_digest() -> None:
    rules = Rules(sender_step=leaves_digests_out, receiver_step=checks_only_the_digests_that_came)

    assert "T2" in find_violation(rules)


@pytest.mark.parametrize("kind", list(WaitKind), ids=lambda kind: kind.value)
def test_model_finds_a_missing_deadline_for(kind: WaitKind) -> None:
    def forgetful(waiting_for: Callable[..., Any]) -> Callable[..., Any]:
        def waits(state: Any) -> Any:
            wait = waiting_for(state)
            return None if wait is not None and wait.kind is kind else wait

        return waits

    rules = Rules(
        receiver_wait=forgetful(receiving.waiting_for), sender_wait=forgetful(sending.waiting_for)
    )

    assert "T6" in find_violation(rules)
