"""GET /health, /ready and /metrics."""

import asyncio
from contextlib import suppress
from typing import Any

from http_gateway.errors import SERVER, HttpError
from http_gateway.exchange import Exchange
from http_gateway.wire import RouterLink
from observability.cluster_metrics import expose_cluster
from observability.request_metrics import CONTENT_TYPE
from pagewire import PagewireError

STATUS_TIMEOUT_S = 2.0  # less than the 10 s that Prometheus waits by default


class Probes:
    """Tells orchestrators and Prometheus how the gateway is."""

    def __init__(self, link: RouterLink) -> None:
        self._link = link

    async def health(self, exchange: Exchange, _: dict[str, Any]) -> None:
        """Say that this process answers, whatever stands behind it."""
        await exchange.answer(200, b"")

    async def ready(self, exchange: Exchange, _: dict[str, Any]) -> None:
        """Say whether a request would find a worker."""
        model = await self._link.model()
        workers = (await self._link.status()).workers
        if not any((each.pool, each.state) == ("decode", "ready") for each in workers):
            message = "no decode worker takes requests"
            raise HttpError(503, message, kind=SERVER, code="unavailable")
        await exchange.answer_json({"status": "ready", "model": model.name})

    async def metrics(self, exchange: Exchange, _: dict[str, Any]) -> None:
        """Show all counters: those of this gateway, and those of the cluster, if a router tells."""
        status = None
        with suppress(PagewireError, TimeoutError):
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                status = await self._link.status()
        headers = (("content-type", CONTENT_TYPE),)
        text = exchange.metrics.expose() + expose_cluster(status)
        await exchange.answer(200, text, headers)
