"""GET /cluster: the router's current view of the cluster, for the page and for programs."""

import asyncio
import json
import time
from dataclasses import asdict
from functools import partial
from typing import Any

from http_gateway.exchange import Exchange
from http_gateway.wire import RouterLink
from pagewire import ClusterStatus, WorkerStatus
from pagewire.protos.call_tasks import mark_seen

FRESH_S = 0.5  # the period of heartbeats; one query of the router serves all viewers
HEADERS = (
    ("content-type", "application/json"),
    ("cache-control", "no-store"),
    ("x-content-type-options", "nosniff"),
)


class ClusterView:
    """Shares one answer of the router among concurrent viewers with the same rights."""

    def __init__(self, link: RouterLink) -> None:
        self._link = link
        self._shown: dict[str, asyncio.Task[bytes]] = {}  # caller |-> what it is shown

    async def show(self, exchange: Exchange, _: dict[str, Any]) -> None:
        """Answer with the status; raises PagewireError if the router does not report it."""
        caller = self._link.key(exchange.authorization)
        asking = self._shown.get(caller)
        if asking is None:
            asking = asyncio.create_task(self._ask(exchange.authorization), name="ask-cluster")
            asking.add_done_callback(partial(self._keep, caller))
            self._shown[caller] = asking
        # Shielded: a viewer that leaves must not end the question of the others.
        shown = await asyncio.shield(asking)
        await exchange.answer(200, shown, HEADERS)

    async def _ask(self, authorization: str) -> bytes:
        status = await self._link.status(authorization)
        return json.dumps(cluster_json(status, time.time())).encode()

    def _keep(self, caller: str, asked: "asyncio.Task[bytes]") -> None:
        mark_seen(asked)
        asyncio.get_running_loop().call_later(FRESH_S, self._shown.pop, caller)


def cluster_json(status: ClusterStatus, time_s: float) -> dict[str, Any]:
    """Return the view: sums since each worker's start, from which readers compute rates.

    Args:
        status: The router's view.
        time_s: Its Unix time. A worker's numbers are `heartbeat_age_ms` older.
    """
    return {
        "time_s": time_s,
        "active_requests": status.active_requests,
        "finished_requests": status.finished_requests,
        "resumed_requests": status.resumed_requests,
        "index_pages": status.index_pages,
        "tenants": [asdict(each) for each in status.tenants],
        "hot_prefixes": [asdict(each) for each in status.hot_prefixes],
        "front_tls": status.front_tls and asdict(status.front_tls),
        "cluster_tls": status.cluster_tls and asdict(status.cluster_tls),
        "workers": [_worker_json(each) for each in status.workers],
    }


def _worker_json(worker: WorkerStatus) -> dict[str, Any]:
    values = asdict(worker)
    # Viewers of the page do not call workers, whose addresses these name.
    del values["address"], values["silence"]
    # As in the logs; as a number it exceeds JavaScript's range.
    return values | {"incarnation": f"{worker.incarnation:016x}"}
