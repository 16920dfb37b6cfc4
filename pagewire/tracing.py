"""The caller's span, below which a router traces a call. Nothing of OpenTelemetry is imported."""

import sys
from contextvars import ContextVar

# What a caller gives by itself, as a W3C traceparent; empty: see `traceparent`.
caller_span: ContextVar[str] = ContextVar("caller_span", default="")


def traceparent() -> str:
    """Return the span that is active here, given or of OpenTelemetry; empty: there is none."""
    if own := caller_span.get():
        return own
    api = sys.modules.get("opentelemetry.trace")
    if api is None:  # a program that traces has imported it
        return ""
    span = api.get_current_span().get_span_context()
    if not span.is_valid:
        return ""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags) & 0xFF:02x}"
