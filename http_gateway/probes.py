"""GET /health, /ready and /metrics."""

from typing import Any

from http_gateway.errors import SERVER, HttpError
from http_gateway.exchange import Exchange
from http_gateway.metrics import CONTENT_TYPE
from http_gateway.wire import RouterLink


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
        if not await self._link.has_worker():
            message = "no decode worker takes requests"
            raise HttpError(503, message, kind=SERVER, code="unavailable")
        await exchange.answer_json({"status": "ready", "model": model.name})

    async def metrics(self, exchange: Exchange, _: dict[str, Any]) -> None:
        """Show all counters."""
        headers = (("content-type", CONTENT_TYPE),)
        await exchange.answer(200, exchange.metrics.expose(), headers)
