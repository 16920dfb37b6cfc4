"""Spans leave a process and hold up nobody; where nothing is traced, nothing is there."""

import json
import subprocess
import sys
import threading
import time

import pytest

from observability import tracing
from observability.tracing import (
    NO_SPAN,
    TracingConfig,
    TracingUnavailable,
    begin_part,
    begin_trace,
    check_tracing,
    configure_tracing,
    stop_tracing,
)
from options.option import WrongOptions
from pagewire.protos.trace_context import (
    MAX_TRACEPARENT,
    MAX_TRACESTATE,
    NO_TRACE,
    TraceContext,
    told_context,
)
from tests.observability.trace_collector import collecting
from tests.support.traces import traced, values
from tests.support.waiting import wait_until
from tests.support.wall_clock import assert_within


def test_nothing_of_opentelemetry_is_imported_where_nothing_is_traced():
    code = """
import json, sys
import router.process, decode_worker.worker, prefill_worker.worker, http_gateway.server, pagewire
from observability.tracing import TracingConfig, begin_trace, configure_tracing
from pagewire.protos.trace_context import NO_TRACE
from pagewire.tracing import active_span
configure_tracing(TracingConfig(), service="s", instance="i")
begin_trace("generate", NO_TRACE).child("attempt").end()
assert active_span() == NO_TRACE
print(json.dumps([name for name in sys.modules if name.startswith("opentelemetry")]))"""

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert json.loads(done.stdout) == []


def test_without_configuration_every_span_is_the_one_that_does_nothing():
    span = begin_trace("generate", NO_TRACE, request_id="r")

    assert not span.is_traced
    assert span.child("attempt") is NO_SPAN
    assert (span.context, span.log_fields) == (NO_TRACE, {})
    with traced() as traces:
        assert begin_part("decode", NO_TRACE) is NO_SPAN, "a worker begins no trace by itself"
        assert begin_part("decode", TraceContext("forged")) is not NO_SPAN
    assert len(traces.spans) == 0, "what has not ended"


def test_a_request_that_its_caller_leaves_out_costs_no_span(monkeypatch):
    left_out = TraceContext(f"00-{1:032x}-{1:016x}-00", "other=1")
    with traced() as traces:
        monkeypatch.setattr(tracing, "_parent", None)
        for begin in (begin_trace, begin_part):
            span = begin("generate", left_out)
            assert (span.is_traced, span.context) == (False, left_out)
    assert traces.spans == []


@pytest.mark.parametrize("ids", [(0, 1), (1, 0)], ids=["trace", "span"])
def test_ids_of_zeros_name_no_caller(ids):
    trace, span = ids
    with traced() as traces:
        begin_trace("generate", TraceContext(f"00-{trace:032x}-{span:016x}-00")).end()
    [found] = traces.spans
    assert found.parent is None


@pytest.mark.parametrize("extra", [0, 1])
def test_of_a_strangers_context_what_is_too_long_counts_as_none(extra):
    parent, state = "p" * (MAX_TRACEPARENT + extra), "s" * (MAX_TRACESTATE + extra)
    assert told_context(parent, "") == TraceContext("" if extra else parent, "")
    assert told_context("p", state) == TraceContext("p", "" if extra else state)


def test_values_that_are_none_are_left_out_and_a_log_line_names_the_trace():
    with traced() as traces:
        span = begin_trace("generate", NO_TRACE, request_id="r", missing=None)
        trace_id = span.log_fields["trace_id"]
        span.end(prompt_tokens=3, ttft_ms=None)

    [span] = traces.spans
    assert values(span) == {"request_id": "r", "gen_ai.usage.input_tokens": 3}
    assert trace_id == f"{span.context.trace_id:032x}"


def test_what_still_runs_when_a_process_stops_goes_on_untraced():
    with traced() as traces:
        span = begin_trace("generate", NO_TRACE)
    assert span.child("attempt") is NO_SPAN
    span.event("first_token")
    span.end(outcome="ok")
    assert traces.spans == []


def test_the_last_spans_reach_the_collector_when_a_process_stops():
    with collecting() as (endpoint, requests):
        config = TracingConfig(endpoint=endpoint)
        configure_tracing(config, service="pagewire-decode", instance="decode-0")

        begin_trace("generate", NO_TRACE).end()
        stop_tracing()

    [(path, request)] = requests
    [resource] = request.resource_spans
    assert path == "/v1/traces"
    told = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert told["service.name"] == "pagewire-decode"
    assert told["service.instance.id"] == "decode-0"
    assert [span.name for scope in resource.scope_spans for span in scope.spans] == ["generate"]


def test_a_collector_that_is_gone_holds_up_nobody(caplog, monkeypatch):
    monkeypatch.setattr(tracing, "FLUSH_S", 0.5)
    monkeypatch.setattr(tracing, "EXPORT_TIMEOUT_S", 2.0)
    monkeypatch.setattr(tracing, "MAX_QUEUED_SPANS", 600)  # two batches, of a second each
    threads = set(threading.enumerate())
    config = TracingConfig(endpoint="http://127.0.0.1:9/v1/traces")
    configure_tracing(config, service="pagewire-router", instance="router-0")
    began = time.process_time()
    for _ in range(20_000):  # more than wait
        begin_trace("generate", NO_TRACE).end()
    assert_within(time.process_time() - began, 10)
    stopping_at = time.monotonic()
    stop_tracing()
    assert_within(time.monotonic() - stopping_at, 5)
    assert not begin_trace("generate", NO_TRACE).is_traced
    wait_until(lambda: any(record.message == "traces_lost" for record in caplog.records))
    assert all(record.name == "observability.tracing" for record in caplog.records)
    # Their threads draw from `random`, which Hypothesis takes for a fault of later tests.
    wait_until(lambda: threads.issuperset(threading.enumerate()))


def test_missing_packages_are_named_with_what_installs_them(monkeypatch):
    monkeypatch.setattr(tracing, "_MODULES", ("no_such_package.sdk",))

    check_tracing(TracingConfig())
    with pytest.raises(TracingUnavailable, match=r"pip install \. './server\[traces\]'"):
        check_tracing(TracingConfig(endpoint="http://c/v1/traces"))


@pytest.mark.parametrize("value", ["collector:4318", "grpc://c", "http://", 7])
def test_an_endpoint_that_is_no_url_is_refused_by_name(value):
    with pytest.raises(WrongOptions, match="endpoint"):
        TracingConfig(endpoint=value)
