"""GET /v1/models and /v1/models/{model}."""

import time
from dataclasses import asdict
from typing import Any

from http_gateway.errors import HttpError
from http_gateway.exchange import Exchange
from http_gateway.wire import RouterLink
from pagewire import Model


class Models:
    """Shows the served model."""

    def __init__(self, link: RouterLink) -> None:
        self._link = link
        self._created = int(time.time())  # when this gateway first offered it

    async def list(self, exchange: Exchange, _: dict[str, Any]) -> None:
        """Show all models."""
        model = await self._link.model(exchange.authorization)
        await exchange.answer_json({"object": "list", "data": [self._shown(model)]})

    async def show(self, exchange: Exchange, _: dict[str, Any]) -> None:
        """Show the model that the path names."""
        name, model = exchange.path_params["model"], await self._link.model(exchange.authorization)
        if name != model.name:
            message = f"model: found {name[:100]!r}; allowed: {model.name!r}"
            raise HttpError(404, message, param="model", code="model_not_found")
        await exchange.answer_json(self._shown(model))

    def _shown(self, model: Model) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "pagewire",
            "root": model.name,
            "parent": None,
            "max_model_len": model.max_context_tokens,
            "sampling_defaults": model.sampling_defaults and asdict(model.sampling_defaults),
        }
