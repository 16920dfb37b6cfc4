"""The way to a first token in parts, each of which begins where the one before ends. Pure.

A part ends at the beginning of a span or at an event of one (docs/observability.md#traces). The
time in which the engine computes the prompt comes out of the passes that computed some of it; the
rest of the time at that worker is waits, also for a pass that already runs for others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.stream_statistics import Row, percentile

# Name of a part |-> its heading
PARTS: Mapping[str, str] = {
    "to_router": "client to router",
    "router": "router",
    "to_decode": "to decode worker",
    "decode_wait": "decode worker waits",
    "to_prefill": "to prefill worker",
    "prefill_wait": "prefill worker waits",
    "passes": "passes",
    "from_prefill": "back to decode worker",
    "from_decode": "to router",
    "to_client": "to client",
}
REMOTE = tuple(PARTS)  # of a prompt that a prefill worker computes
LOCAL = tuple(  # of one that the decode worker computes itself
    each for each in PARTS if each not in ("to_prefill", "prefill_wait", "from_prefill")
)


class UnclearPath(Exception):
    """A request was attempted more than once, so its parts do not follow one another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """An event of a span. Times are nanoseconds of the wall clock."""

    at_ns: int
    passes_ms: float = 0.0  # of the engine for the prompt, until then


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """What is needed of a span."""

    began_ns: int
    ended_ns: int
    events: Mapping[str, Event]


Trace = dict[str, list[Span]]  # name of a span |-> the spans of that name


def is_whole(trace: Trace) -> bool:
    """Tell whether all spans of a request have come."""
    needed = {"generate", "attempt", "decode", *(("prefill",) if "receive" in trace else ())}
    return needed <= trace.keys()


def parts_ms(trace: Trace, *, called_ns: int, token_ns: int) -> dict[str, float]:
    """Return the parts of the time from a call to its first token, ms, by name.

    Args:
        trace: The whole trace.
        called_ns: When the client called, on the wall clock.
        token_ns: When it had the token.

    Raises:
        UnclearPath: Some part of the request was attempted more than once.
    """
    if repeated := sorted(name for name, spans in trace.items() if len(spans) > 1):
        raise UnclearPath(f"a request has several spans {', '.join(repeated)}")
    at = {name: span for name, [span] in trace.items()}
    begin = [called_ns, *(at[name].began_ns for name in ("generate", "attempt", "decode"))]
    if "receive" in at:
        computed = at["prefill"].events["computed"]
        begin += [at["receive"].began_ns, at["prefill"].began_ns]
        end = [at["receive"].events["first_token"].at_ns]
        names = REMOTE
    else:
        computed = at["decode"].events["first_token"]
        end = []
        names = LOCAL
    passes_began_ns = computed.at_ns - round(1e6 * computed.passes_ms)
    answered_ns = at["generate"].events["first_token"].at_ns
    marks = [*begin, passes_began_ns, computed.at_ns, *end, answered_ns, token_ns]
    return {
        name: (after - before) / 1e6
        for name, (before, after) in zip(names, pairwise(marks), strict=True)
    }


def pages_ms(trace: Trace) -> dict[str, float]:
    """Return when the decode worker had all pages, ms: after the passes, after the first token.

    Empty for a prompt that the decode worker computed itself.
    """
    if "receive" not in trace:
        return {}
    [prefill], [receive] = trace["prefill"], trace["receive"]
    return {
        "pages_after_passes_ms": (receive.ended_ns - prefill.events["computed"].at_ns) / 1e6,
        "pages_after_token_ms": (receive.ended_ns - receive.events["first_token"].at_ns) / 1e6,
    }


def median_parts(found: Sequence[Mapping[str, float]]) -> Row:
    """Return the medians of requests of one kind: of the whole, of each part, and what they leave.

    Parts that only some of the requests have count as 0 where they lack.
    """
    whole_ms = percentile([sum(each.values()) for each in found], 50)
    names = [name for name in PARTS if any(name in each for each in found)]
    parts = {name: percentile([each.get(name, 0.0) for each in found], 50) for name in names}
    return {
        "ms": round(whole_ms, 2),
        "parts_ms": {name: round(value, 3) for name, value in parts.items()},
        "rest_ms": round(whole_ms - sum(parts.values()), 3),
    }
