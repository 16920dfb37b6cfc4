"""Traces: the course of a request through each process, as spans of OpenTelemetry.

`configure_tracing` is called once in each process, like `configure_logging`. If nothing is
configured, OpenTelemetry is not imported, and every span is a `NoSpan`, which does nothing but keep
its caller's context.

The HTTP gateway, or without one the router, begins the trace of a request, or continues its
caller's. The context of its spans travels with the request to the workers, as W3C Trace Context,
and their spans become children. No span holds text or tokens of a prompt or an answer.
"""

import logging
import math
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from observability.logs import fields
from options.kept_by_name import kept_by_name
from options.option import check_options, option
from pagewire.protos.trace_context import (
    NO_TRACE,
    SAMPLED,
    TraceContext,
    context_of,
)

log = logging.getLogger(__name__)

EXPORT_TIMEOUT_S = 5.0
LOSSES_S = 60.0  # between two log lines about them
FLUSH_S = 2.0  # for the last spans of a process that stops
MAX_QUEUED_SPANS = 8192  # spans beyond this many waiting ones are lost
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_MODULES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
# Fields of log lines with a name in the semantic conventions for HTTP and for generative AI.
_STANDARD_NAMES = {
    "method": "http.request.method",
    "path": "http.route",
    "status": "http.response.status_code",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
}

_tracer: Any = None  # opentelemetry.trace.Tracer
_provider: Any = None  # opentelemetry.sdk.trace.TracerProvider


class TracingUnavailable(Exception):
    """Traces are configured, but their packages are not installed."""


def _is_endpoint(value: object) -> bool:
    return isinstance(value, str) and (not value or re.match(r"https?://[^/]", value) is not None)


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class TracingConfig:
    """The destination of traces. OTEL_EXPORTER_OTLP_* set headers and certificates."""

    endpoint: str = option(
        "",
        "Where gateway, router and workers send traces: URL of a collector that takes OTLP over "
        "HTTP, as in http://collector:4318/v1/traces. Empty: nowhere. Needs the extra `traces`.",
        accepts=_is_endpoint,
        accepted="the URL of a collector, with http or https",
    )
    sample_ratio: float = option(
        1.0,
        "Share of the requests that are traced, chosen by trace id. A caller can refuse a trace, "
        "but cannot ask for more.",
        at_least=0,
        at_most=1,
    )

    def __post_init__(self) -> None:
        check_options(self)


class NoSpan:
    """A span that is not traced.

    Attributes:
        context: What the next process is told: the caller's context if this process does not trace;
            one with the flag *sampled* 0 if it leaves the request out.
    """

    is_traced = False

    def __init__(self, context: TraceContext = NO_TRACE) -> None:
        self.context = context

    def child(self, name: str, **values: object) -> "NoSpan":
        """Begin a child span in this process."""
        return NO_SPAN

    def event(self, name: str, **values: object) -> None:
        """Add an event with the current time."""

    def end(self, error: str = "", **values: object) -> None:
        """End the span now; with an error it counts as failed."""

    @property
    def log_fields(self) -> dict[str, object]:
        """The fields of a log line that link it to the trace."""
        return {}


NO_SPAN = NoSpan()


class Span(NoSpan):
    """A span of a trace. Values are attributes; None values are left out."""

    is_traced = True

    def __init__(self, span: Any) -> None:
        super().__init__(context_of(span.get_span_context()))
        self._span = span

    def child(self, name: str, **values: object) -> NoSpan:
        if _tracer is None:  # the process stops
            return NO_SPAN
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(self._span)
        return Span(_tracer.start_span(name, context=context, attributes=_attributes(values)))

    def event(self, name: str, **values: object) -> None:
        self._span.add_event(name, _attributes(values))

    def end(self, error: str = "", **values: object) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(_attributes(values))
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()

    @property
    def log_fields(self) -> dict[str, object]:
        return {"trace_id": self.context.traceparent[3:35]}


def begin_trace(name: str, caller: TraceContext, **values: object) -> NoSpan:
    """Begin the span of an outside caller's request, below the caller's span if there is one.

    Args:
        name: Name of the span.
        caller: A malformed traceparent or tracestate counts as none.
    """
    return NoSpan(caller) if _tracer is None else _begin(name, caller, values)


def begin_part(name: str, context: TraceContext, **values: object) -> NoSpan:
    """Begin this process's part of a trace; `context` is its parent span's; empty: no trace."""
    if _tracer is None or not context.traceparent:
        return NO_SPAN
    return _begin(name, context, values)


def configure_tracing(config: TracingConfig, *, service: str, instance: str) -> None:
    """Send this process's spans to the collector; call it once, before any request.

    Args:
        config: The destination.
        service: Kind of the process, as in "pagewire-router".
        instance: Name of the process, as in "decode-0".

    Raises:
        TracingUnavailable: OpenTelemetry is not installed.
    """
    if not config.endpoint:
        return
    check_tracing(config)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(endpoint=config.endpoint, timeout=EXPORT_TIMEOUT_S)
    # It exports in a separate thread. Spans that a collector does not take in time are lost.
    noted: Any = _NotedLosses(exporter)
    processor = BatchSpanProcessor(noted, max_queue_size=MAX_QUEUED_SPANS)
    trace_to(processor, sample_ratio=config.sample_ratio, service=service, instance=instance)


def check_tracing(config: TracingConfig) -> None:
    """Raise TracingUnavailable if traces are configured but OpenTelemetry is not installed."""
    if config.endpoint and not all(map(_is_installed, _MODULES)):
        raise TracingUnavailable(
            f"tracing.endpoint is {config.endpoint!r}, and OpenTelemetry is not installed: "
            "pip install . './server[traces]' in Pagewire's repository"
        )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # a parent package is missing
        return False


def trace_to(processor: Any, *, sample_ratio: float, service: str, instance: str) -> None:
    """Give this process's spans to an opentelemetry.sdk.trace.SpanProcessor."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    # Otherwise each failed batch logs two lines or more, and each malformed tracestate is logged as
    # its caller sent it.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    # By trace id, also below a caller's span: all processes then choose alike, and no caller can
    # make the cluster trace more than its configuration says.
    ratio = TraceIdRatioBased(sample_ratio)
    global _provider, _tracer
    _provider = TracerProvider(
        resource=Resource.create({"service.name": service, "service.instance.id": instance}),
        sampler=ParentBased(root=ratio, remote_parent_sampled=ratio),
        shutdown_on_exit=False,
    )
    _provider.add_span_processor(processor)
    _tracer = _provider.get_tracer("pagewire")


def stop_tracing() -> None:
    """Send waiting spans, for at most FLUSH_S, and trace nothing more. It blocks."""
    global _provider, _tracer
    provider, _provider, _tracer = _provider, None, None
    if provider is not None:
        # In a thread, because it has no deadline.
        sending = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        sending.join(FLUSH_S)


class _NotedLosses:
    """A SpanExporter that logs the failures of another one, at most once in LOSSES_S."""

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter
        self._num_lost = 0
        self._told_at = -math.inf

    def export(self, spans: Sequence[Any]) -> Any:
        from opentelemetry.sdk.trace.export import SpanExportResult

        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._num_lost += len(spans)
            if time.monotonic() - self._told_at > LOSSES_S:
                log.warning("traces_lost", extra=fields(spans=self._num_lost))
                self._num_lost, self._told_at = 0, time.monotonic()
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))


def _begin(name: str, caller: TraceContext, values: dict[str, object]) -> NoSpan:
    found = _TRACEPARENT.fullmatch(caller.traceparent)
    if found is not None and not int(found[3], 16) & SAMPLED:
        return NoSpan(caller)  # OpenTelemetry would do the same, in ten times the time
    from opentelemetry.trace import SpanKind

    parent = _parent(found, caller.tracestate)
    span = _tracer.start_span(
        name, context=parent, kind=SpanKind.SERVER, attributes=_attributes(values)
    )
    return Span(span) if span.is_recording() else NoSpan(context_of(span.get_span_context()))


def _parent(found: re.Match[str] | None, tracestate: str) -> Any:
    """Return the context of a traceparent's span, which is sampled; empty if it is not valid."""
    from opentelemetry.context import Context
    from opentelemetry.trace import (
        NonRecordingSpan,
        SpanContext,
        TraceFlags,
        TraceState,
        set_span_in_context,
    )

    if found is None:
        return Context()
    span = SpanContext(
        trace_id=int(found[1], 16),
        span_id=int(found[2], 16),
        is_remote=True,
        trace_flags=TraceFlags(SAMPLED),
        trace_state=TraceState.from_header([tracestate]),
    )
    return set_span_in_context(NonRecordingSpan(span), Context())


def _attributes(values: dict[str, object]) -> dict[str, Any]:
    return {
        _STANDARD_NAMES.get(name, f"pagewire.{name}"): value
        for name, value in values.items()
        if value is not None
    }
