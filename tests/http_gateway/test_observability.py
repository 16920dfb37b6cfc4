"""What a gateway tells of itself: log lines, metrics, request ids; and web pages that may call."""

import asyncio
import json
import logging
import re
import socket
from contextlib import ExitStack
from dataclasses import replace

import pytest
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client.parser import text_string_to_metric_families

from http_gateway.config import GatewayConfig
from http_gateway.found_routers import FoundRouters
from observability.cluster_metrics import expose_cluster
from observability.logs import ATTRIBUTE
from observability.tracing import begin_trace
from pagewire import Encryption
from pagewire.protos.trace_context import TraceContext
from pagewire.routers import Connector
from tests.http_gateway.bodies import TEXT, body_of
from tests.http_gateway.conftest import openai as client_of
from tests.http_gateway.raw_http import exchange, request
from tests.http_gateway.serving import gateway, scripted
from tests.pagewire.scripted_service import never_ends, two_words
from tests.support.cluster_status import ONE_OF_EACH
from tests.support.traces import traced, values
from tests.support.waiting import wait_until

SECRET = "prompt that nobody else may read"
TOKEN = "sk-secret-token"


def lines(caplog):
    return [
        getattr(each, ATTRIBUTE)
        for each in caplog.records
        if each.getMessage() == "http_request" and each.levelno >= logging.INFO
    ]


def test_the_span_of_a_caller_reaches_the_router(served):
    span = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    body = json.dumps({"prompt": "x"})
    for headers, *expected in (
        ([("traceparent", span)], span, ""),
        ([("Traceparent", span), ("Tracestate", "a=1"), ("tracestate", "b=2")], span, "a=1,b=2"),
        ([("traceparent", span), ("tracestate", "x" * 513)], span, ""),
        ([], "", ""),
        ([("tracestate", "a=1")], "", ""),
        ([("traceparent", span), ("traceparent", span)], "", ""),
        ([("traceparent", "x" * 5000)], "", ""),
    ):
        lines = "".join(f"\r\n{name}: {value}" for name, value in headers).encode()
        data = request("/v1/completions", body).replace(b"HTTP/1.1", b"HTTP/1.1" + lines, 1)
        exchange(served.host_and_port, data)

        asked = served.backend.requests[-1]
        assert [asked.traceparent, asked.tracestate] == expected, headers


def asked_of(served):
    """The trace context that the last request took to the router."""
    asked = served.backend.requests[-1]
    return asked.traceparent, asked.tracestate


def test_the_span_of_a_request_is_the_parent_of_its_routers_and_holds_nothing_of_it(served, caplog):
    caplog.set_level(logging.INFO)
    caller = {
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate": "a=1",
    }
    body = json.dumps({"prompt": SECRET, "user": SECRET})
    with traced() as traces:
        exchange(served.host_and_port, request(TEXT, body, **caller))
        wait_until(lambda: traces.spans)
        [span] = traces.spans
        asked = asked_of(served)
        exchange(served.host_and_port, request(TEXT, '{"prompt": 5}'))
        wait_until(lambda: len(traces.spans) == 2)
        wait_until(lambda: len(lines(caplog)) == 2)  # each is written when its span has ended
        _, wrong = traces.spans

    assert (span.name, span.kind) == (f"POST {TEXT}", SpanKind.SERVER)
    assert asked == (f"00-0af7651916cd43dd8448eb211c80319c-{span.context.span_id:016x}-01", "a=1")
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    told = values(span)
    assert told["http.request.method"] == "POST"
    assert told["http.route"] == TEXT
    assert told["http.response.status_code"] == 200
    assert told["gen_ai.usage.input_tokens"] == 40
    assert told["router_request_id"] == "r1"
    assert [event.name for event in span.events] == ["first_token"]
    assert SECRET not in span.to_json()
    assert span.status.status_code is StatusCode.UNSET
    assert (wrong.status.status_code, wrong.status.description) == (StatusCode.ERROR, "invalid")
    assert wrong.parent is None
    assert [each["trace_id"] for each in lines(caplog)] == [
        f"{each.context.trace_id:032x}" for each in (span, wrong)
    ]


def test_a_router_leaves_out_of_traces_what_its_gateway_does(served):
    with traced(sample_ratio=0.0) as traces:
        exchange(served.host_and_port, request(TEXT, body_of(TEXT)))
        given, _ = asked_of(served)
        router_span = begin_trace("generate", TraceContext(given))

    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-00", given)
    assert not router_span.is_traced
    assert traces.spans == []


def test_neither_probes_nor_strangers_make_spans():
    with gateway(lambda: scripted(two_words), needs_tenants=True) as served, traced() as traces:
        for path in ("/health", "/metrics", "/v1/models", "/"):
            exchange(served.host_and_port, request(path, method="GET"))
        refused = exchange(served.host_and_port, request(TEXT, body_of(TEXT)))
        exchange(served.host_and_port, request("/nowhere", "{}"))

    assert refused.status == 503, "there are no tenants"
    assert traces.spans == []


def test_each_request_is_one_line_without_what_it_holds(served, caplog):
    caplog.set_level(logging.DEBUG)
    bodies = [
        ("/v1/completions", {"prompt": SECRET, "user": SECRET}),
        ("/v1/completions", {"prompt": SECRET, "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}]}),
        ("/v1/responses", {"input": SECRET}),
        ("/v1/completions", {"prompt": SECRET, "top_p": SECRET}),
        ("/v1/completions", {"prompt": SECRET, SECRET: 1}),
        ("/tokenize", {"prompt": SECRET}),
        (f"/{TOKEN}?key={TOKEN}", {}),
    ]
    for number, (path, body) in enumerate(bodies, start=1):
        headers = {"authorization": f"Bearer {TOKEN}", "x_api_key": TOKEN}
        exchange(served.host_and_port, request(path, json.dumps(body), **headers))
        wait_until(lambda num=number: len(lines(caplog)) >= num)  # a line follows its answer

    found = lines(caplog)
    assert len(found) == len(bodies)
    text = "\n".join(f"{each.getMessage()} {vars(each)}" for each in caplog.records)
    assert SECRET not in text
    assert TOKEN not in text
    whole, stream, *_, unknown = found
    assert whole["status"] == 200
    assert (whole["model"], whole["stream"], stream["stream"]) == ("tiny", False, True)
    assert (whole["prompt_tokens"], whole["completion_tokens"]) == (40, 2)
    assert 0 < whole["ttft_ms"] <= whole["total_ms"]
    assert whole["router_request_id"] == "r1"
    assert (found[4]["status"], found[4]["outcome"]) == (400, "invalid")
    assert (unknown["path"], unknown["status"]) == ("-", 404)


def test_a_request_that_a_stop_ends_is_no_success_in_the_log(caplog):
    caplog.set_level(logging.INFO)
    with gateway(lambda: scripted(never_ends)) as served, ExitStack() as clients:
        for is_stream in (False, True):
            client = clients.enter_context(socket.create_connection(served.host_and_port))
            client.sendall(request(TEXT, body_of(TEXT, stream=is_stream)))
        wait_until(lambda: len(served.backend.requests) == 2)
        client.recv(1)  # the stream has begun
        served.run(served.server.stop(0.0))

    found = {each["stream"]: (each["status"], each["outcome"]) for each in lines(caplog)}
    assert found == {False: (503, "unavailable"), True: (200, "unavailable")}


def test_probes_write_no_line(served, caplog):
    caplog.set_level(logging.INFO)
    for path in ("/health", "/ready", "/metrics", "/cluster"):
        assert exchange(served.host_and_port, request(path, method="GET")).status == 200

    assert lines(caplog) == []


def refusals(caplog):
    return [getattr(each, ATTRIBUTE) for each in caplog.records if each.msg == "connection_refused"]


def test_a_flood_of_strangers_fills_no_log(caplog):
    caplog.set_level(logging.INFO)
    with gateway(lambda: scripted(two_words)) as served:
        for path in ("/nowhere", "/") * 20:
            exchange(served.host_and_port, request(path, method="GET"))
            exchange(served.host_and_port, b"no HTTP\r\n\r\n")

    assert len(lines(caplog)) == len(refusals(caplog)) == 1


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [("my-id_1.2:3", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("é", False)],
)
def test_a_request_has_the_clients_name_if_it_gives_a_sensible_one(served, given, is_kept):
    data = request(TEXT, body_of(TEXT), x_request_id=given)
    answer = exchange(served.host_and_port, data)

    request_id = answer.headers["x-request-id"]
    assert (request_id == given) == is_kept
    assert json.loads(answer.body)["id"] == f"cmpl-{request_id}"


def test_errors_have_a_name_too(served):
    for data in (request("/nowhere", method="GET"), request(TEXT, "{}")):
        assert len(exchange(served.host_and_port, data).headers["x-request-id"]) == 32


def metrics(served):
    """All samples: (name, labels) |-> value."""
    text = exchange(served.host_and_port, request("/metrics", method="GET")).body.decode()
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_count_requests_tokens_and_times_by_names_that_users_of_vllm_know():
    with gateway(lambda: scripted(two_words)) as served:
        client = client_of(served)
        for _ in range(2):
            client.completions.create(model="tiny", prompt="x")
        exchange(served.host_and_port, request(TEXT, '{"prompt": 5}'))
        exchange(served.host_and_port, request("/nowhere", method="GET"))
        found = metrics(served)

    assert found["pagewire_request_success_total", "stop", "tiny"] == 2
    assert found["pagewire_prompt_tokens_total", "tiny"] == 80
    assert found["pagewire_generation_tokens_total", "tiny"] == 4
    assert found["pagewire_prefix_cache_queries_total", "tiny"] == 80
    assert found["pagewire_prefix_cache_hits_total", "tiny"] == 64
    assert found["pagewire_time_to_first_token_seconds_count", "tiny"] == 2
    assert found["pagewire_e2e_request_latency_seconds_count", "tiny"] == 2
    assert found["pagewire_request_queue_time_seconds_count", "tiny"] == 2
    assert found["pagewire_request_decode_time_seconds_count", "tiny"] == 2
    assert found["pagewire_num_requests_waiting",] == 0
    assert found["pagewire_request_prompt_tokens_sum", "tiny"] == 80
    assert found["pagewire_num_requests_running",] == 0, "the one that asks is none"
    counted = "pagewire_http_requests_total"
    assert found[counted, *sorted((TEXT, "POST", "200"))] == 2
    assert {key[1:] for key in found if key[0] == counted} >= {
        tuple(sorted((TEXT, "POST", "400"))),
        tuple(sorted(("", "GET", "404"))),
    }
    assert not [key for key in found if "nowhere" in key]


def test_what_runs_is_counted_without_who_asks_for_it():
    with gateway(lambda: scripted(never_ends)) as served:
        client = client_of(served)
        with client.completions.create(model="tiny", prompt="x", stream=True) as stream:
            next(stream)
            found = metrics(served)
            assert found["pagewire_num_requests_waiting",] == 0, "its first token has come"

    assert found["pagewire_num_requests_running",] == 1


def test_metrics_tell_of_the_router_and_its_workers(served):
    found = metrics(served)

    assert found["pagewire_router_up",] == 1
    assert found["pagewire_router_requests_active",] == 2
    of_worker = sorted(("decode-0", "decode"))
    assert found["pagewire_worker_state", *sorted(("decode-0", "decode", "ready"))] == 1
    assert found["pagewire_worker_state", *sorted(("decode-0", "decode", "dead"))] == 0
    assert found["pagewire_worker_pages", *sorted(("decode-0", "decode", "live"))] == 6
    assert found["pagewire_worker_looked_up_tokens_total", *of_worker] == 40
    assert found["pagewire_worker_cached_tokens_total", *of_worker] == 30
    assert found["pagewire_kv_cache_usage_perc", *of_worker] == 0.6


def test_metrics_are_written_beside_the_event_loop(served, monkeypatch):
    def find(status):
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return expose_cluster(status)

    monkeypatch.setattr("http_gateway.probes.expose_cluster", find)
    assert metrics(served)["pagewire_router_up",] == 1


def test_metrics_without_a_router_are_those_of_the_gateway():
    with gateway(lambda: scripted(two_words)) as served:
        assert metrics(served)["pagewire_router_up",] == 1
        served.backend.is_away = True
        found = metrics(served)

    assert found["pagewire_router_up",] == 0
    assert found["pagewire_num_requests_running",] == 0
    assert not [key for key in found if key[0].startswith("pagewire_worker_")]


def test_of_a_worker_that_does_not_live_only_the_state_is_told():
    dead = replace(ONE_OF_EACH.workers[0], state="dead", worker_id="decode-9")
    text = expose_cluster(replace(ONE_OF_EACH, workers=(*ONE_OF_EACH.workers, dead))).decode()

    told = [line for line in text.splitlines() if "decode-9" in line]
    assert {line.partition("{")[0] for line in told} == {"pagewire_worker_state"}
    assert [line for line in told if line.endswith(" 1.0")] == [
        'pagewire_worker_state{pool="decode",state="dead",worker_id="decode-9"} 1.0'
    ]


async def routers_at(*addresses):
    async def find():
        return addresses

    routers = FoundRouters(find, Connector())
    await routers.locate()
    return routers


def test_a_lost_router_is_one_line_and_one_that_never_answered_is_none(caplog):
    async def lose():
        routers = await routers_at("127.0.0.1:1")
        routers.leave("127.0.0.1:1")
        await asyncio.sleep(0)
        early = len(caplog.records)
        routers.note_answer()
        for _ in range(3):
            routers.leave("127.0.0.1:1")
            await asyncio.sleep(0.01)
        await routers.aclose()
        return early

    assert asyncio.run(lose()) == 0
    assert [each.getMessage() for each in caplog.records] == ["router_lost"]


def test_ready_says_whether_a_worker_takes_requests(served):
    ready = exchange(served.host_and_port, request("/ready", method="GET"))

    assert json.loads(ready.body) == {"status": "ready"}
    with gateway(lambda: scripted(two_words)) as starting:
        starting.backend.is_away = True
        answer = exchange(starting.host_and_port, request("/ready", method="GET"))

    assert (answer.status, answer.error["code"]) == (503, "unavailable")


def test_head_answers_as_get_does_without_a_body(served):
    answer = exchange(served.host_and_port, request("/health", method="HEAD"))

    assert (answer.status, answer.body) == (200, b"")


# Web pages

PAGE = "https://chat.example.org"
PREFLIGHT = {
    "access_control_request_method": "POST",
    "access_control_request_headers": "authorization,content-type,x-stainless-lang",
}


def preflight(served, origin):
    data = request(TEXT, method="OPTIONS", origin=origin, **PREFLIGHT)
    return exchange(served.host_and_port, data)


def test_no_web_page_may_call_unless_its_origin_is_allowed(served):
    answer = exchange(served.host_and_port, request(TEXT, body_of(TEXT), origin=PAGE))

    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert preflight(served, PAGE).status == 405


@pytest.mark.parametrize("origins", ["*", f"https://a.example.org, {PAGE}"])
def test_pages_of_allowed_origins_may_call_and_stream(origins):
    with gateway(lambda: scripted(two_words), allow_origins=origins) as served:
        allowed = preflight(served, PAGE)
        body = body_of(TEXT, stream=True)
        answer = exchange(served.host_and_port, request(TEXT, body, origin=PAGE))
        refused = preflight(served, "https://evil.example.org")

    assert allowed.status == 200
    assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
    assert answer.headers["access-control-allow-origin"] in ("*", PAGE)
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert b"[DONE]" in answer.body
    assert (refused.status == 200) == (origins == "*")


@pytest.fixture(scope="module")
def named():
    with gateway(lambda: scripted(two_words), allow_hosts="LLM.example.org, b.example") as served:
        yield served


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("localhost", True),
        ("LocalHost.:8000", True),
        ("app.localhost", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("", True),
        ("llm.example.org:443", True),
        ("b.example", True),
        ("evil.example.org:8000", False),
        ("localhost.evil.example.org", False),
        ("127.0.0.1.evil.example.org", False),
        ("notlocalhost", False),
        ("é", False),
    ],
)
def test_a_page_whose_name_leads_here_may_not_call(named, host, is_allowed):
    answers = [
        exchange(named.host_and_port, request(path, body, method=method, host=host))
        for method, path, body in (
            ("POST", TEXT, body_of(TEXT)),
            ("GET", "/v1/models", None),
            ("GET", "/cluster", None),
            ("GET", "/metrics", None),
        )
    ]

    assert {each.status for each in answers} == {200 if is_allowed else 403}
    if not is_allowed:
        assert {each.error["code"] for each in answers} == {"unknown_host"}
        assert "http_gateway.allow_hosts" in answers[0].error["message"]
    health = request("/health", method="GET", host=host)
    assert exchange(named.host_and_port, health).status == 200


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"allow_hosts": "a.org:80"}, "allow_hosts: found 'a.org:80'; allowed: host names"),
        ({"max_connections": 0}, "max_connections: found 0; allowed: an integer, 1 or more"),
        ({"head_timeout_s": 0}, "head_timeout_s: found 0; allowed: a finite number above 0"),
        ({"stream_interval_s": -1}, "stream_interval_s: found -1; allowed: a finite number, 0 or"),
        ({"request_timeout_s": float("inf")}, "request_timeout_s: found inf; allowed: a finite"),
        ({"allow_origins": "example.org"}, "allow_origins: found 'example.org'; allowed: origins"),
        ({"allow_origins": "https://a.org/x"}, "such as https://chat.example.org, or *"),
    ],
)
def test_wrong_limits_are_refused_by_name(options, words):
    with pytest.raises(ValueError, match="allowed: ") as refused:
        GatewayConfig(**options)
    assert words in str(refused.value)


def test_certificates_are_told_by_what_they_are_for_and_nothing_where_there_is_none():
    front = Encryption(encrypted=True, expires_at_s=1_800_000_000)
    in_clear = Encryption(encrypted=False, expires_at_s=None)
    told = expose_cluster(replace(ONE_OF_EACH, front_tls=front, cluster_tls=in_clear)).decode()

    name = "pagewire_router_certificate_expiry_timestamp_seconds"
    assert [line for line in told.splitlines() if line.startswith(name)] == [
        f'{name}{{connections="front"}} 1.8e+09'
    ]
