"""GET /cluster: the router's current view of the cluster, for the page and for programs."""

import asyncio
import json
import time
from dataclasses import asdict
from typing import Any

from http_gateway.exchange import Exchange
from http_gateway.wire import RouterLink
from pagewire import ClusterStatus, WorkerStatus

FRESH_S = 0.5  # the period of heartbeats; one query of the router serves all viewers
HEADERS = (
    ("content-type", "application/json"),
    ("cache-control", "no-store"),
    ("x-content-type-options", "nosniff"),
)


class ClusterView:
    """Shares one status among concurrent viewers with the same rights."""

    def __init__(self, link: RouterLink) -> None:
        self._link = link
        self._asking = asyncio.Lock()
        self._shown: dict[str, tuple[float, bytes]] = {}  # caller |-> until (loop time), what

    async def show(self, exchange: Exchange, _: dict[str, Any]) -> None:
        """Answer with the status; raises PagewireError if the router does not report it."""
        loop = asyncio.get_running_loop()
        async with self._asking:
            caller, now = self._link.key(exchange.authorization), loop.time()
            self._shown = {key: each for key, each in self._shown.items() if now < each[0]}
            if caller not in self._shown:
                status = await self._link.status(exchange.authorization)
                shown = json.dumps(cluster_json(status, time.time())).encode()
                self._shown[caller] = loop.time() + FRESH_S, shown
            shown = self._shown[caller][1]
        await exchange.answer(200, shown, HEADERS)


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
    del values["address"]  # viewers of the page do not call workers
    # As in the logs; as a number it exceeds JavaScript's range.
    return values | {"incarnation": f"{worker.incarnation:016x}"}
