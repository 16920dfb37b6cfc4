"""One exchange alone, without a connection."""

import asyncio
import json

import pytest

from http_gateway.body import Bodies
from http_gateway.config import GatewayConfig
from http_gateway.exchange import Endpoint, RequestLog
from http_gateway.http_metrics import Metrics


@pytest.mark.parametrize("is_early", [False, True])
def test_a_bug_of_the_gateway_is_told_as_any_error_and_logged_once(caplog, is_early):
    async def admit(_):
        return ""

    async def crash(*_):
        raise RuntimeError("a bug")

    async def never():
        await asyncio.Event().wait()

    async def scenario():
        config, metrics, sent = GatewayConfig(), Metrics(), []
        endpoint = Endpoint(
            "/x",
            crash,
            admit=crash if is_early else admit,
            config=config,
            metrics=metrics,
            bodies=Bodies(config),
            reads_body=False,
            checks_host=False,
        )

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": "/x", "headers": []}
        await RequestLog(endpoint, metrics)(scope, never, send)
        return sent, metrics.expose().decode()

    (start, body), exposed = asyncio.run(scenario())

    assert start["status"] == 500
    assert json.loads(body["body"])["error"]["code"] == "internal_error"
    assert [each.msg for each in caplog.records if each.exc_info] == ["request_crashed"]
    assert 'pagewire_http_requests_total{method="GET",path="/x",status="500"} 1.0' in exposed
