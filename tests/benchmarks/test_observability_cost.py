"""Metrics and log lines cost little beside what they tell of; traces are exported."""

from benchmarks.observability_cost import measure, measure_scrape


def test_metrics_traces_and_lines_cost_at_most_a_fiftieth_of_a_step() -> None:
    percent = {row["case"]: row["percent"] for row in measure(number=100, repeats=5)}

    assert max(percent[f"metrics/step/{streams}"] for streams in (1, 64, 256)) < 2.0
    assert percent["traces/on/worker/call"] < 2.0
    for line_format in ("text", "json"):
        assert percent[f"logs/{line_format}/router/call"] > percent["traces/off/router/call"]
        assert percent[f"logs/{line_format}/worker/call"] < 2.0
    assert percent["traces/off/router/call"] < percent["traces/on/router/call"]


def test_a_scrape_costs_at_most_a_fiftieth_of_a_core() -> None:
    rows = measure_scrape(number=50, repeats=5)

    assert {row["case"] for row in rows} == {"metrics/scrape/loop", "metrics/scrape/text"}
    assert sum(row["percent"] for row in rows) < 2.0
