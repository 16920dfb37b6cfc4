"""The caller's span, the parent of a router's trace of a call. Imports nothing of OpenTelemetry."""

import sys
from contextvars import ContextVar

from pagewire.protos.trace_context import NO_TRACE, TraceContext, context_of

# The caller's own; empty: see `active_span`.
caller_span: ContextVar[TraceContext] = ContextVar("caller_span", default=NO_TRACE)


def active_span() -> TraceContext:
    """Return the active span, the caller's own or OpenTelemetry's; empty: none."""
    own = caller_span.get()
    if own.traceparent:
        return own
    api = sys.modules.get("opentelemetry.trace")
    if api is None:  # a program with tracing would have imported it
        return NO_TRACE
    span = api.get_current_span().get_span_context()
    return context_of(span) if span.is_valid else NO_TRACE
