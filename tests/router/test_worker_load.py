import pytest

from router.expected_wait import PRIOR_HOLDING_S, DecodeQueue
from router.membership import WorkerMember
from router.placement import Placement
from router.worker import LATE_HEARTBEAT_S, STALE_HEARTBEAT_S, Worker
from router.worker_report import WorkerHeartbeat


def heartbeat(**fields):
    defaults = {
        "incarnation": 1,
        "steps": 0,
        "num_running": 0,
        "num_waiting": 0,
        "queued_tokens": 0,
        "num_computed_tokens": 0,
        "num_pages": 8,
        "num_used_pages": 0,
        "is_draining": False,
        "is_stepping": False,
        "message": b"",
    }
    return WorkerHeartbeat(**(defaults | fields))


def place(worker, *, prompt_len=40, num_pages=10, num_sequences=1):
    return Placement(
        worker,
        [],
        computing=worker,
        num_computed_tokens=prompt_len,
        prompt_len=prompt_len,
        num_pages=num_pages,
        num_sequences=num_sequences,
    )


def worker():
    member = WorkerMember(worker_id="decode-0", incarnation=1, address="d:1", pool="decode")
    return Worker(member, channel=None)


@pytest.mark.parametrize(("gap_s", "late_s"), [(0.5, LATE_HEARTBEAT_S), (4.0, 6.0)])
def test_a_worker_whose_heartbeats_stay_away_is_told_as_silent(gap_s, late_s):
    decode = worker()
    decode.state, decode.lost_because = "CONNECTING", "connection refused"
    assert decode.silence(0.0) == "connection refused"

    decode.state = "READY"
    for number in range(3):
        decode.take_heartbeat(heartbeat(), now=number * gap_s)

    assert decode.silence(2 * gap_s + late_s) == ""
    assert decode.silence(2 * gap_s + late_s + 0.2) == f"no heartbeat for {late_s + 0.2:.1f} s"


def test_own_requests_that_ended_since_the_heartbeat_are_no_load():
    decode = worker()
    decode.num_requests = 3
    decode.take_heartbeat(heartbeat(num_running=2, num_waiting=1), now=1.0)

    decode.num_requests = 0

    assert decode.load(1.0).num_requests == 0


def test_requests_of_other_routers_are_load():
    decode = worker()
    decode.num_requests, decode.queued_tokens = 1, 100
    decode.take_heartbeat(heartbeat(num_running=5, queued_tokens=700), now=1.0)

    decode.num_requests = 2

    assert decode.load(1.0).num_requests == 2 + 4
    assert decode.load(1.0).queued_tokens == 700


def test_before_any_heartbeat_and_after_an_old_one_nothing_is_in_the_way():
    decode = worker()
    assert decode.load(1.0).queue == DecodeQueue()

    decode.take_heartbeat(heartbeat(num_running=3, num_used_pages=8), now=1.0)
    place(decode)

    assert decode.load(1.0 + STALE_HEARTBEAT_S).queue.num_holding == 3
    assert decode.load(1.1 + STALE_HEARTBEAT_S).queue == DecodeQueue()


def test_requests_that_were_placed_since_the_heartbeat_come_first():
    decode = worker()
    decode.take_heartbeat(heartbeat(num_running=2, num_used_pages=3), now=1.0)
    placements = [place(decode, num_pages=10), place(decode, num_pages=20, num_sequences=4)]

    queue = decode.load(1.0).queue

    assert (queue.num_pages, queue.num_free_pages) == (8, 5)
    assert (queue.num_waiting, queue.num_awaited_pages) == (2, 30)
    assert queue.num_sequences == 2 + 5, "those of another router, and these"
    for placement in placements:
        placement.prefilled(2.0)
    assert decode.load(2.0).queue.num_waiting == 0
    assert decode.load(2.0).queue.num_awaited_pages == 0
    for placement in placements:
        placement.release(3.0)
        placement.release(4.0)  # no effect
    assert decode.load(2.0).queue.num_sequences == 2
    assert (decode.num_requests, decode.queued_tokens, decode.num_waiting_tokens) == (0, 0, 0)


@pytest.mark.parametrize(
    ("queued_tokens", "num_waiting"),
    [(400, 10), (100, 2.5), (0, 0), (1000, 10)],
    ids=["all wait", "a quarter waits", "all hold their pages", "others wait, too"],
)
def test_what_a_worker_counts_as_queued_holds_no_pages_yet(queued_tokens, num_waiting):
    decode = worker()
    for _ in range(10):
        place(decode)

    beat = heartbeat(num_running=3, num_waiting=10, queued_tokens=queued_tokens)
    decode.take_heartbeat(beat, now=1.0)

    queue = decode.load(1.0).queue
    assert queue.num_waiting == pytest.approx(num_waiting)
    assert queue.num_awaited_pages == pytest.approx(10 * num_waiting)
    assert queue.num_holding == pytest.approx(3 + 10 - num_waiting)


def test_a_request_holds_its_pages_from_its_first_token_to_its_end():
    decode = worker()
    placement = place(decode)
    decode.take_heartbeat(heartbeat(), now=1.0)

    assert decode.load(1.0).queue.holding_s == PRIOR_HOLDING_S
    placement.prefilled(1.0)
    placement.prefilled(50.0)  # later tokens change nothing
    decode.take_heartbeat(heartbeat(), now=101.0)
    assert decode.load(101.0).queue.holding_s == pytest.approx(PRIOR_HOLDING_S + 100 / 8)
    placement.release(101.0)
    assert decode.holding.mean_s(1000.0) == pytest.approx((100 + 8 * PRIOR_HOLDING_S) / 9)


def test_a_request_that_never_started_tells_nothing_of_how_long_they_take():
    decode = worker()
    place(decode).release(100.0)

    assert decode.holding.mean_s(100.0) == PRIOR_HOLDING_S
    assert (decode.num_waiting, decode.num_awaited_pages) == (0, 0)


def test_queued_tokens_take_as_long_as_observed():
    prefill = worker()
    for index in range(4):
        beat = heartbeat(num_computed_tokens=1000 * index, queued_tokens=8000 - 1000 * index)
        prefill.take_heartbeat(beat, now=float(index))

    assert prefill.load(4.0).prefill_wait_s == pytest.approx(5.0)
