"""A span and its trace as they travel between processes, in the terms of W3C Trace Context."""

from collections.abc import Iterable
from typing import NamedTuple

MAX_TRACEPARENT = 64  # characters; a valid one has 55
MAX_TRACESTATE = 512  # characters, which W3C wants to be passed on


class TraceContext(NamedTuple):
    """What names a span to another process; whoever reads it decides whether it is valid."""

    traceparent: str = ""  # empty: none
    tracestate: str = ""  # what others told of the trace; empty: nothing


NO_TRACE = TraceContext()


def trace_context(headers: Iterable[tuple[str, str]]) -> TraceContext:
    """Return the context among headers or metadata, with names in lower case.

    As W3C says, of several traceparents none counts, and several tracestates are one list. One that
    is too long counts as none.
    """
    found = [each for each in headers if each[0] in TraceContext._fields]
    parents = [value for name, value in found if name == "traceparent"]
    if len(parents) != 1 or len(parents[0]) > MAX_TRACEPARENT:
        return NO_TRACE
    state = ",".join(value for name, value in found if name == "tracestate")
    return TraceContext(parents[0], state if len(state) <= MAX_TRACESTATE else "")
