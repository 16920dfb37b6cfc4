"""Takes the spans that a cluster exports: OTLP over HTTP, as OpenTelemetry's collector does.

A process sends its spans every few seconds, so the last ones of a wave come some time after it.
"""

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Thread
from typing import Any

from benchmarks.first_token_path import Event, Span, Trace, is_whole

PREFIX = "pagewire."  # of attributes
SPANS_S = 30.0  # spans come at most so late


class SpansMissing(Exception):
    """Traces are not whole in time."""


@dataclass(slots=True)
class SpanCollector:
    """The spans that have come. Owned by `span_collector`."""

    endpoint: str
    _changed: Condition
    _traces: dict[str, Trace]  # by trace id

    def take(self, trace_ids: Collection[str], timeout_s: float = SPANS_S) -> list[Trace]:
        """Wait until traces are whole; return them in order, and forget all others.

        Raises:
            SpansMissing: Some are not whole in time.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while missing := [each for each in trace_ids if not self._is_whole(each)]:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise SpansMissing(
                        f"{len(missing)} of {len(trace_ids)} traces lack spans after"
                        f" {timeout_s:.0f} s; one has {sorted(self._traces.get(missing[0], ()))}"
                    )
            found = [self._traces[each] for each in trace_ids]
            self._traces.clear()
        return found

    def _is_whole(self, trace_id: str) -> bool:
        return is_whole(self._traces.get(trace_id, {}))

    def _add(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        request = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        trace = self._traces.setdefault(span.trace_id.hex(), {})
                        trace.setdefault(span.name, []).append(_read(span))
            self._changed.notify_all()


@contextmanager
def span_collector() -> Iterator[SpanCollector]:
    """Yield a collector that listens on this host."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # exporters keep their connections

        def do_POST(self) -> None:
            collector._add(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
    collector = SpanCollector(endpoint, Condition(), {})
    serving = Thread(target=server.serve_forever, name="span-collector", daemon=True)
    serving.start()
    try:
        yield collector
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def _read(span: Any) -> Span:
    return Span(
        began_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        events={
            event.name: Event(at_ns=event.time_unix_nano, passes_ms=_passes_ms(event))
            for event in span.events
        },
    )


def _passes_ms(event: Any) -> float:
    told = [each.value for each in event.attributes if each.key == f"{PREFIX}passes_ms"]
    return float(told[0].double_value) if told else 0.0
