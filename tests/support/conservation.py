"""What routers and workers must have given back once no call is left, by name."""

from typing import Any

from router.router import Router
from router.tenants.registry import Tenants
from worker.host import WorkerHost


def router_leaks(router: Router) -> list[str]:
    """Describe what a router still holds for calls."""
    dispatcher: Any = router.dispatcher
    held = {
        "places": router.admission.num_active,
        "streams": len(dispatcher._streams),
        "drivers": len(dispatcher._drivers),
        "admissions": len(router._servicer._reception._admitting),
        "running calls in its metrics": router.metrics._num_running,
        "waiting calls in its metrics": router.metrics._num_waiting,
        "microseconds of messages": dispatcher._pacer.sending_us,
        "ticks": len(dispatcher._pacer._ticks),
        "bytes off the loop": router.admission._off_loop._room.taken,
    }
    if dispatcher._turns is not None:
        held["turns"] = bool(dispatcher._turns._queue) + dispatcher._turns._is_taken
    for worker, session in dispatcher._sessions.items():
        name = worker.member.worker_id
        held[f"streams of {name}"] = len(session.streams)
        held[f"numbered choices of {name}"] = len(session._numbered)
        held[f"messages for {name}"] = len(session._outbox)
    for worker in router.registry._workers.values():
        for load in (
            "num_requests",
            "num_sequences",
            "num_waiting",
            "num_waiting_tokens",
            "num_awaited_pages",
            "queued_tokens",
        ):
            held[f"{load} at {worker.member.worker_id}"] = getattr(worker, load)
    return _told(held)


def tenant_leaks(tenants: Tenants) -> list[str]:
    """Describe the places and undecided charges that tenants still have."""
    held: dict[str, int] = {}
    for each in (tenants.own, *tenants.told):
        held[f"places of {each.name}"] = each.num_active
        held[f"answers of {each.name}"] = each.num_answers
        held[f"charged requests of {each.name}"] = len(each._requests._charges) - 1
        held[f"charged prompts of {each.name}"] = len(each._tokens._charges) - 1
    return _told(held)


def worker_leaks(worker: WorkerHost) -> list[str]:
    """Describe what a worker of either pool still holds for requests, apart from pages."""
    pool: Any = worker._pool
    scheduler = pool.scheduler
    queues = ["_waiting", "_parked", "_computing"]
    held = {"background tasks": len(worker._context.tasks._tasks)}
    if pool.name == "decode":
        queues += ["_receiving", "_joining", "_running"]
        peers = pool._peers
        num_meeting = len(peers._meeting)  # connected ahead, for no request
        num_users = sum(each.users._num_users for each in peers._peers.values())
        held["background tasks"] -= num_meeting
        held |= {
            "requests": len(pool._active),
            "requests of sessions": sum(len(each.requests) for each in pool._sessions.values()),
            "tokens in outboxes": sum(each._num_tokens for each in pool._sessions),
            "seats": scheduler._seats._num_seats - len(set(scheduler._seats._free)),
            "steps in flight": scheduler._num_in_flight,
            "masks": len(pool._masks._busy),
            "attempts": len(pool._receivers._running),
            "users of peers": num_users - num_meeting,
        }
    else:
        users = [each.users for each in pool._accepted._connections.values()]
        held |= {
            "attempts": len(pool._attempts),
            "users of connections": sum(each._num_users for each in users),
            "leases": len(worker.cache._leases),
        }
    return _told(held | {each: len(getattr(scheduler, each)) for each in queues})


def _told(held: dict[str, int]) -> list[str]:
    return [f"{name}: {number}" for name, number in held.items() if number]
