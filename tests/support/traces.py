"""The spans of this process, kept in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from observability.tracing import stop_tracing, trace_to


class Traces:
    """What was traced and has ended."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    @property
    def spans(self) -> list[ReadableSpan]:
        """All spans, by their beginning."""
        return sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        [span] = self.named(name)
        return span

    def path(self, span: ReadableSpan) -> list[str]:
        """Return the names from the first span down to this one."""
        by_id = {each.context.span_id: each for each in self.spans}
        names = [span.name]
        while span.parent is not None and span.parent.span_id in by_id:
            span = by_id[span.parent.span_id]
            names.insert(0, span.name)
        return names


def values(span: ReadableSpan) -> dict[str, Any]:
    """Return its attributes, without the project's prefix."""
    return {key.removeprefix("pagewire."): value for key, value in (span.attributes or {}).items()}


@contextmanager
def traced(sample_ratio: float = 1.0) -> Iterator[Traces]:
    """Trace everything that this process does while entered."""
    exporter = InMemorySpanExporter()
    trace_to(
        SimpleSpanProcessor(exporter), sample_ratio=sample_ratio, service="test", instance="test-0"
    )
    try:
        yield Traces(exporter)
    finally:
        stop_tracing()
