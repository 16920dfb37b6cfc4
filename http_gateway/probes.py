"""GET /health, /ready and /metrics."""

import asyncio
import hmac
from typing import Any

from http_gateway.errors import SERVER, HttpError
from http_gateway.exchange import Exchange
from http_gateway.wire import NO_WORKER, RouterLink
from observability.cluster_metrics import expose_cluster
from observability.request_metrics import CONTENT_TYPE
from pagewire import AuthenticationError, PagewireError

STATUS_TIMEOUT_S = 2.0  # less than the 10 s that Prometheus waits by default


class Probes:
    """Reports the gateway's state to orchestrators and Prometheus."""

    def __init__(self, link: RouterLink) -> None:
        self._link = link
        # Authorization of the last operator; empty: callers need none. None: no router has told.
        self._operator: bytes | None = None

    async def health(self, exchange: Exchange, _: dict[str, Any]) -> None:
        """Report that this process answers, whatever the state of the cluster."""
        await exchange.answer(200, b"")

    async def ready(self, exchange: Exchange, _: dict[str, Any]) -> None:
        """Report whether a request would find a worker."""
        if not await self._link.is_serving():
            raise HttpError(503, NO_WORKER, kind=SERVER, code="unavailable")
        await exchange.answer_json({"status": "ready"})

    async def metrics(self, exchange: Exchange, _: dict[str, Any]) -> None:
        """Show all counters: the gateway's, and the cluster's if a router reports them.

        They are for operators. While no router can say who is one, the last operator's token
        counts; before any router has said whether callers need one, nobody sees them.
        """
        status = None
        asking = exchange.authorization.encode()
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                status = await self._link.status(exchange.authorization)
        except AuthenticationError:
            raise
        except (PagewireError, TimeoutError):
            if self._operator is None:
                message = "no router has answered yet, so it is not known who may read metrics"
                raise HttpError(503, message, kind=SERVER, code="unavailable") from None
            if self._operator and not hmac.compare_digest(self._operator, asking):
                message = "the router does not say who is an operator"
                raise HttpError(503, message, kind=SERVER, code="unavailable") from None
        else:
            self._operator = asking if status.tenants else b""
        headers = (("content-type", CONTENT_TYPE),)
        # In a thread: with many workers and tenants, writing it takes longer than a token may wait.
        text = await asyncio.to_thread(lambda: exchange.metrics.expose() + expose_cluster(status))
        await exchange.answer(200, text, headers)
