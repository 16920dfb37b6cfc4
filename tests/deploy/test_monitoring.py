"""Dashboard, alerts and queries of documents: what they name is told, and alerts fire in time.

The names are checked everywhere; what Prometheus itself thinks of them, where promtool is.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.all_metrics import all_metrics
from tests.support.promql import OF_TARGETS, faults, named

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "kubernetes" / "components" / "monitoring"
ALERT_CASES = Path(__file__).parent / "alert_cases.yaml"
METRICS = all_metrics()

PROMTOOL = shutil.which(f"{sys.prefix}/bin/promtool") or shutil.which("promtool")

needs_promtool = pytest.mark.skipif(
    not PROMTOOL,
    reason="there is no promtool: `make test` takes it from Debian's package prometheus, if it can",
)


def groups():
    return yaml.safe_load((MONITORING / "prometheusrule.yaml").read_text())["spec"]["groups"]


def alerts():
    return {rule["alert"]: rule for group in groups() for rule in group["rules"]}


def dashboard():
    return json.loads((MONITORING / "dashboard.json").read_text())


def panels():
    return [each for each in dashboard()["panels"] if each["type"] != "row"]


def of_dashboard():
    """Panel and letter |-> query, as Grafana sends it."""
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        .replace("$__rate_interval", "5m")
        .replace("$job", "a-job")
        for panel in panels()
        for target in panel["targets"]
    }


def of_documents():
    found = {}
    for name in ("metrics.md", "observability.md"):
        for query in re.findall(
            r"`([^`]*\(.*?pagewire_[^`]*)`", (ROOT / "docs" / name).read_text()
        ):
            found[f"{name} {len(found)}"] = query
    assert len(found) > 3
    return found


QUERIES = {
    **{name: rule["expr"] for name, rule in alerts().items()},
    **of_dashboard(),
    **of_documents(),
}


@pytest.mark.parametrize("query", QUERIES.values(), ids=list(QUERIES))
def test_a_query_names_only_what_is_told(query):
    assert faults(query, METRICS) == []


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("pagewire_router_upp == 0", "nobody tells pagewire_router_upp"),
        ("sum(rate(pagewire_http_requests[5m]))", "nobody tells pagewire_http_requests"),
        ('pagewire_worker_pages{usage="free"}', "pagewire_worker_pages has no label usage"),
        ("sum by (worker) (pagewire_worker_running)", "no series has worker"),
        ("histogram_quantile(0.5, sum by (le) (pagewire_router_up))", "no series has le"),
        ("time() - 5", "it names no series"),
    ],
)
def test_a_query_of_what_nobody_tells_is_found(query, words):
    assert words in faults(query, METRICS)


def test_a_query_is_read_with_all_that_it_names():
    query = (
        """sum by (job, le) (rate(a_bucket{x="b{c=d}", y!~"e"}[5m] offset 1h)) / on (z) b and 1"""
    )

    found = named(query)

    assert found.series == (("a_bucket", {"x", "y"}), ("b", frozenset()))
    assert found.grouping == {"job", "le", "z"}


def test_queries_add_up_no_worker_twice():
    for name, query in QUERIES.items():
        for series, _ in named(query).series:
            if series.startswith(("pagewire_worker_", "pagewire_kv_cache_")):
                assert "max by (worker_id" in query or "max(" in query, name


def test_annotations_name_labels_that_an_alert_has():
    for name, rule in alerts().items():
        grouping = named(rule["expr"]).grouping
        for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
            assert label in grouping, name


def test_each_alert_has_a_place_in_the_guide_and_a_severity():
    guide = (ROOT / "docs" / "observability.md").read_text()
    for name, rule in alerts().items():
        assert f"`{name}`" in guide
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_each_panel_says_what_it_tells_and_has_a_place_in_the_guide():
    guide = (ROOT / "docs" / "observability.md").read_text()
    assert len({each["id"] for each in dashboard()["panels"]}) == len(dashboard()["panels"])
    for each in panels():
        assert each["description"].endswith("."), each["title"]
        assert f"**{each['title']}**" in guide


def test_legends_name_labels_that_a_query_keeps():
    for panel in panels():
        for target in panel["targets"]:
            kept = named(target["expr"]).grouping | OF_TARGETS
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept, panel["title"]


def promtool(*arguments, cwd):
    done = subprocess.run(
        [PROMTOOL, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_takes_every_query(tmp_path):
    rules = [
        {"record": f"query:{index}", "expr": query} for index, query in enumerate(QUERIES.values())
    ]
    recorded = {"groups": [*groups(), {"name": "queries", "rules": rules}]}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(recorded))

    promtool("check", "rules", "rules.yaml", cwd=tmp_path)


@needs_promtool
def test_alerts_fire_when_they_should_and_are_silent_else(tmp_path):
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups()}))
    shutil.copy(ALERT_CASES, tmp_path)

    promtool("test", "rules", ALERT_CASES.name, cwd=tmp_path)


def test_each_alert_is_tested_both_ways():
    cases = [
        each
        for test in yaml.safe_load(ALERT_CASES.read_text())["tests"]
        for each in test["alert_rule_test"]
    ]

    for is_firing in (True, False):
        assert {
            each["alertname"] for each in cases if bool(each["exp_alerts"]) == is_firing
        } == set(alerts())
