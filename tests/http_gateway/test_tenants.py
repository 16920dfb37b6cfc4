"""Keys over HTTP: each caller is the tenant of its own key, and nobody else."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from observability.logs import ATTRIBUTE
from pagewire import UnavailableError, routers
from pagewire.calls import Metadata
from pagewire.protos import inference_pb2
from router.tenants.registry import Tenants
from tests.http_gateway.conftest import openai as client_of
from tests.http_gateway.parrot import parrot, write_folder
from tests.http_gateway.raw_http import RawAnswer, exchange, request
from tests.http_gateway.serving import Gateway, gateway, real_router, scripted
from tests.router.tenants.known import CLUSTER_TOKEN, rules, tenants

KNOWN = (
    rules("acme"),
    rules("globex"),
    rules("slow", requests_per_s=0.01, burst=1),
    rules("ops", operator=True),
)
V1 = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/cluster"),
    ("GET", "/metrics"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def known() -> Tenants:
    return tenants(*KNOWN)


@pytest.fixture(scope="module")
def served(folder: Path, known: Tenants) -> Iterator[Gateway]:
    with gateway(lambda: real_router(parrot(folder), folder, tenants=known)) as started:
        yield started


@pytest.fixture
def ask(served: Gateway) -> Callable[..., RawAnswer]:
    def ask(method: str, path: str, key: str | None = None, body: Any = None) -> RawAnswer:
        headers = {} if key is None else {"authorization": key}
        encoded = json.dumps(body or {}) if method == "POST" else None
        return exchange(served.host_and_port, request(path, encoded, method=method, **headers))

    return ask


@pytest.mark.parametrize(("method", "path"), V1)
@pytest.mark.parametrize(
    "key",
    [
        None,
        "acme",
        "Bearer ",
        "Basic acme",
        "Bearer nobody",
        "Bearer " + "x" * 9000,
    ],
    ids=["none", "no scheme", "empty", "basic", "unknown", "long"],
)
def test_nothing_is_told_without_a_key(
    ask: Callable[..., RawAnswer], method: str, path: str, key: str | None
) -> None:
    answer = ask(method, path, key)

    assert answer.status == 401
    assert (answer.error["code"], answer.error["type"]) == (
        "invalid_api_key",
        "invalid_request_error",
    )
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "globex" not in answer.error["message"]


def test_every_endpoint_is_in_the_test_above_or_open_on_purpose(
    ask: Callable[..., RawAnswer],
) -> None:
    endpoints = ask("GET", "/nowhere").error["message"].partition("allowed: ")[2].split(", ")

    closed = {path.replace("/tiny", "/{model}") for _, path in V1}
    assert set(endpoints) == closed | {"/", "/page/{name}", "/health", "/ready"}


@pytest.mark.parametrize("first", ["Bearer acme", "Bearer nobody", "Bearer ops"])
def test_two_keys_are_no_key(served: Gateway, first: str) -> None:
    """What stands before a gateway may have looked at the other one."""
    data = request("/v1/models", method="GET", authorization=first, Authorization="Bearer acme")
    answer = exchange(served.host_and_port, data)

    assert answer.status == 401
    assert answer.error["code"] == "invalid_api_key"


def test_a_key_among_the_trailers_is_no_key(served: Gateway) -> None:
    """What stands before a gateway may have looked at the headers only."""
    framing = {"content_type": "application/json", "transfer_encoding": "chunked"}
    trailers = b"authorization: Bearer acme\r\nx-request-id: of-the-trailer\r\n"
    data = request("/tokenize", **framing) + b"2\r\n{}\r\n0\r\n" + trailers + b"\r\n"
    answer = exchange(served.host_and_port, data)

    assert answer.status == 401
    assert answer.headers["x-request-id"] != "of-the-trailer"


def test_who_has_a_key_may_address_the_gateway_by_any_name(served: Gateway) -> None:
    data = request("/v1/models", method="GET", authorization="Bearer acme", host="llm.example.org")

    assert exchange(served.host_and_port, data).status == 200


def test_a_stranger_is_refused_before_its_body_is_read(served: Gateway) -> None:
    head = request("/v1/completions", b"", content_length=str(10**6))
    answer = exchange(served.host_and_port, head)

    assert answer.status == 401
    assert answer.headers["connection"] == "close"


def test_the_log_holds_all_requests_of_tenants_and_few_of_strangers(
    folder: Path, known: Tenants, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with gateway(lambda: real_router(parrot(folder), folder, tenants=known)) as served:
        for key in ("nobody", "acme") * 10:
            data = request("/v1/models", method="GET", authorization=f"Bearer {key}")
            exchange(served.host_and_port, data)

    found = [getattr(each, ATTRIBUTE) for each in caplog.records if each.msg == "http_request"]
    assert [each["status"] for each in found] == [401] + [200] * 10


@pytest.mark.parametrize("path", ["/health", "/ready", "/", "/page/main.js"])
def test_probes_and_the_files_of_the_page_are_open(
    ask: Callable[..., RawAnswer], path: str
) -> None:
    assert ask("GET", path).status == 200


def test_openai_clients_are_the_tenants_of_their_keys(served: Gateway, known: Tenants) -> None:
    before = {each.name: each.counts.generated_tokens for each in known.told}
    for key in ("acme", "globex", "acme"):
        client = client_of(served).with_options(api_key=key)
        answer = client.completions.create(model="tiny", prompt="hello", max_tokens=3)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
    after = {each.name: each.counts.generated_tokens for each in known.told}

    assert {name: after[name] - before[name] for name in after if after[name] > before[name]} == {
        "acme": 6,
        "globex": 3,
    }


def test_a_wrong_key_is_the_error_that_openai_clients_know(served: Gateway) -> None:
    client = client_of(served).with_options(api_key="wrong")

    with pytest.raises(openai.AuthenticationError) as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "?"}])

    assert caught.value.code == "invalid_api_key"


def test_a_limit_is_429_with_the_time_to_come_again(
    served: Gateway, ask: Callable[..., RawAnswer]
) -> None:
    body = {"prompt": "hello", "max_tokens": 1}
    assert ask("POST", "/v1/completions", "Bearer slow", body).status == 200
    refused = ask("POST", "/v1/completions", "Bearer slow", body)

    assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
    assert 90 <= int(refused.headers["retry-after"]) <= 100
    exact_ms = int(refused.headers["retry-after-ms"])
    assert exact_ms <= 1000 * int(refused.headers["retry-after"])
    client = client_of(served).with_options(api_key="slow")
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="tiny", prompt="hello", max_tokens=1)
    assert ask("POST", "/v1/completions", "Bearer acme", body).status == 200


@pytest.mark.parametrize("path", ["/cluster", "/metrics"])
def test_the_cluster_is_shown_to_operators(ask: Callable[..., RawAnswer], path: str) -> None:
    for key in ("ops", CLUSTER_TOKEN):
        answer = ask("GET", path, f"Bearer {key}")
        assert answer.status == 200
        assert b"decode-0" in answer.body
        assert b"globex" in answer.body
    refused = ask("GET", path, "Bearer acme")
    assert (refused.status, refused.error["code"]) == (403, "permission_denied")


def test_metrics_tell_of_each_tenant_and_of_none_that_is_not_configured(
    ask: Callable[..., RawAnswer],
) -> None:
    for index in range(20):
        ask("POST", "/v1/completions", f"Bearer nobody-{index}", {"prompt": "x", "max_tokens": 1})
    ask("POST", "/v1/completions", "Bearer acme", {"prompt": "x", "max_tokens": 1})
    text = ask("GET", "/metrics", "Bearer ops").body.decode()
    lines = [line for line in text.splitlines() if line.startswith("pagewire_tenant_requests_tot")]

    assert len(lines) == len(KNOWN) + 1
    assert 'pagewire_tenant_requests_total{tenant="globex"}' in text
    assert "nobody" not in text


def streams_of(served: Gateway) -> list[Metadata]:
    """The metadata of a gateway's streams to its router."""
    link = served.server._link
    assert link is not None
    [connection] = link._routers._connections.values()
    return list(connection.streams)


def test_streams_of_callers_that_pause_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "MOST_IDLE_STREAMS", 2)
    with gateway(lambda: real_router(parrot(folder), folder, tenants=tenants(*KNOWN))) as served:
        for key in ("acme", "globex", "acme", "ops", "acme"):
            client = client_of(served).with_options(api_key=key)
            client.completions.create(model="tiny", prompt="hello", max_tokens=1)
        assert streams_of(served) == [
            (("authorization", "Bearer ops"),),
            (("authorization", "Bearer acme"),),
        ]


def test_without_tenants_all_keys_are_one_caller(folder: Path) -> None:
    with gateway(lambda: real_router(parrot(folder), folder)) as served:
        for key in ("one", "two", "three"):
            client = client_of(served).with_options(api_key=key)
            client.completions.create(model="tiny", prompt="hello", max_tokens=1)
        assert streams_of(served) == [()]
        assert exchange(served.host_and_port, request("/metrics", method="GET")).status == 200


def test_a_gateway_that_needs_tenants_serves_nobody_of_a_router_without(folder: Path) -> None:
    open_router = real_router(parrot(folder), folder)
    with gateway(lambda: open_router, needs_tenants=True) as served:
        for method, path in [*V1, ("GET", "/ready")]:
            for key in ({}, {"authorization": "Bearer acme"}):
                body = b"" if method == "GET" else b"{}"
                told = request(path, body, method=method, **key)
                answer = exchange(served.host_and_port, told)
                assert (answer.status, answer.error["code"]) == (503, "unavailable"), path
        assert answer.error["message"] == (
            f"router.tenants_file: the router at {served.router_address} has none; allowed: a "
            "tenants file, or front_tls.client_authority_file of the gateway, where other hosts "
            "can connect to it; or insecure, if whoever can connect may use the model"
        )


def test_a_gateway_that_needs_tenants_serves_those_of_its_router(
    folder: Path, known: Tenants
) -> None:
    backend = real_router(parrot(folder), folder, tenants=known)
    with gateway(lambda: backend, needs_tenants=True) as served:
        ready = request("/ready", method="GET")
        assert exchange(served.host_and_port, ready).status == 200
        client = client_of(served).with_options(api_key="acme")
        client.completions.create(model="tiny", prompt="hello", max_tokens=1)
        metrics = request("/metrics", method="GET", authorization="Bearer ops")
        assert exchange(served.host_and_port, metrics).status == 200
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="x").models.list()


def test_while_the_router_is_away_metrics_are_for_whoever_was_an_operator_last() -> None:
    async def nothing(request: Any, context: Any) -> Any:
        yield

    def known_to_operators() -> inference_pb2.GetClusterStatusResponse:
        acme = inference_pb2.TenantStatus(name="acme")
        return inference_pb2.GetClusterStatusResponse(tenants=[acme])

    with gateway(lambda: scripted(nothing)) as served:

        def ask(key: str) -> RawAnswer:
            told = request("/metrics", method="GET", authorization=f"Bearer {key}")
            return exchange(served.host_and_port, told)

        served.backend.cluster = known_to_operators
        assert ask("operator").status == 200
        served.backend.is_away = True
        assert b"pagewire_router_up 0.0" in ask("operator").body
        assert (ask("other").status, ask("").status) == (503, 503)


def test_before_a_router_has_said_who_is_an_operator_nobody_sees_metrics(
    folder: Path, known: Tenants
) -> None:
    def metrics_of(key: str | None) -> RawAnswer:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return exchange(served.host_and_port, request("/metrics", method="GET", **headers))

    with gateway(lambda: real_router(parrot(folder), folder, tenants=known)) as served:
        link = served.server._link
        assert link is not None
        find = link._routers._find
        link._routers._find = nowhere
        for key in (None, "acme", "ops"):
            early = metrics_of(key)
            assert (early.status, early.error["code"]) == (503, "unavailable")
            assert "no router has answered yet" in early.error["message"]
        link._routers._find = find
        assert (metrics_of(None).status, metrics_of("acme").status) == (401, 403)
        assert metrics_of("ops").status == 200


async def nowhere() -> list[str]:
    raise UnavailableError("the router starts", code="UNAVAILABLE")
