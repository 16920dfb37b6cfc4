import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from observability.tallies import Spread, Spreads, Tallies, Tally

BOUNDS = (0.001, 0.25, 1, 10_000, 1_000_000)


def test_a_scrape_reads_what_prometheus_client_would_have_counted() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tallies = Tallies("pagewire_calls", "Calls.", ("model", "outcome"), ours)
    spreads = Spreads("pagewire_seconds", "Times.", ("model",), ours, bounds=BOUNDS)
    counter = Counter("pagewire_calls", "Calls.", ("model", "outcome"), registry=theirs)
    histogram = Histogram("pagewire_seconds", "Times.", ("model",), registry=theirs, buckets=BOUNDS)

    for metric in (tallies, counter):
        metric.labels("m", "ok").inc()
        metric.labels("m", 'a "quoted" one').inc(2.5)
        metric.labels("m", "ok").inc(3)
    for metric in (spreads, histogram):
        for seconds in (0.0, 0.001, 0.0011, 0.25, 7, 10_000, 2_000_000):
            metric.labels("m").observe(seconds)

    assert without_times(ours) == without_times(theirs)


def test_a_series_that_is_added_while_others_are_read_ends_no_scrape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = CollectorRegistry()
    tallies = Tallies("pagewire_calls", "Calls.", ("model",), registry)
    spreads = Spreads("pagewire_seconds", "Times.", ("model",), registry, bounds=BOUNDS)
    tallies.labels("m").inc()
    spreads.labels("m").observe(1)

    def add_another(self: object) -> float:
        tallies.labels("n"), spreads.labels("n")  # as another thread may
        return 1.0

    monkeypatch.setattr(Tally, "value", property(add_another, lambda *_: None), raising=False)
    monkeypatch.setattr(Spread, "buckets", lambda self: [("+Inf", add_another(self))])

    assert 'pagewire_calls_total{model="m"} 1.0' in without_times(registry)


def without_times(registry: CollectorRegistry) -> list[str]:
    """Drop the series that say when others began."""
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]
