from router.membership import WorkerMember
from router.worker_registry import Worker
from router.worker_report import WorkerHeartbeat


def heartbeat(**fields):
    defaults = {
        "incarnation": 1,
        "steps": 0,
        "num_running": 0,
        "num_waiting": 0,
        "queued_tokens": 0,
        "num_pages": 8,
        "num_used_pages": 0,
        "is_draining": False,
        "message": b"",
    }
    return WorkerHeartbeat(**(defaults | fields))


def worker():
    member = WorkerMember(worker_id="decode-0", incarnation=1, address="d:1", pool="decode")
    return Worker(member, channel=None)


def test_own_requests_that_ended_since_the_heartbeat_are_no_load():
    decode = worker()
    decode.num_requests = 3
    decode.take_heartbeat(heartbeat(num_running=2, num_waiting=1), now=1.0)

    decode.num_requests = 0

    assert decode.load.num_requests == 0


def test_requests_of_other_routers_are_load():
    decode = worker()
    decode.num_requests, decode.queued_tokens = 1, 100
    decode.take_heartbeat(heartbeat(num_running=5, queued_tokens=700), now=1.0)

    decode.num_requests = 2

    assert decode.load.num_requests == 2 + 4
    assert decode.load.queued_tokens == 700
