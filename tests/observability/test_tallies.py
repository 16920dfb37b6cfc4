from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from observability.tallies import Spreads, Tallies

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


def without_times(registry: CollectorRegistry) -> list[str]:
    """Drop the series that say when others began."""
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]
