"""A span and its trace as they travel between processes, in the terms of W3C Trace Context."""

from collections.abc import Iterable
from typing import Any, NamedTuple

SAMPLED = 1  # the only flag that is passed on
MAX_TRACEPARENT = 64  # characters; a valid one has 55
MAX_TRACESTATE = 512  # characters; W3C asks everyone to pass on at least as many


class TraceContext(NamedTuple):
    """What names a span to another process; whoever reads it decides whether it is valid."""

    traceparent: str = ""  # empty: none
    tracestate: str = ""  # what others told of the trace; empty: nothing


NO_TRACE = TraceContext()


def context_of(span: Any) -> TraceContext:
    """Return what names a span to another process.

    Args:
        span: A SpanContext of OpenTelemetry, of which this module imports nothing.
    """
    return TraceContext(
        f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags & SAMPLED:02x}",
        span.trace_state.to_header(),
    )


def trace_context(headers: Iterable[tuple[str, str]]) -> TraceContext:
    """Return the context among headers or metadata, with names in lower case.

    As W3C says, of several traceparents none counts, and several tracestates are one list. A
    traceparent or a list that is too long counts as none.
    """
    found = [each for each in headers if each[0] in TraceContext._fields]
    parents = [value for name, value in found if name == "traceparent"]
    if len(parents) != 1:
        return NO_TRACE
    return told_context(
        parents[0], ",".join(value for name, value in found if name == "tracestate")
    )


def told_context(traceparent: str, tracestate: str) -> TraceContext:
    """Return the context that a stranger tells; what is too long counts as none."""
    if len(traceparent) > MAX_TRACEPARENT:
        return NO_TRACE
    return TraceContext(traceparent, tracestate if len(tracestate) <= MAX_TRACESTATE else "")
