"""The caller's span, the parent of a router's trace of a call. Imports nothing of OpenTelemetry."""

import sys
from contextvars import ContextVar

# The caller's own W3C traceparent; empty: see `traceparent`.
caller_span: ContextVar[str] = ContextVar("caller_span", default="")


def traceparent() -> str:
    """Return the active span, the caller's own or OpenTelemetry's; empty: none."""
    if own := caller_span.get():
        return own
    api = sys.modules.get("opentelemetry.trace")
    if api is None:  # a program with tracing would have imported it
        return ""
    span = api.get_current_span().get_span_context()
    if not span.is_valid:
        return ""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags) & 0xFF:02x}"
