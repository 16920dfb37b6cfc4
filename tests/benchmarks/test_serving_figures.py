"""Whether the figures of served clusters show what was measured, and leave out what was not."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.bar_chart import PLOT_WIDTH, Chart, draw
from benchmarks.serving_figures import ARMS, VLLM, disaggregation_charts, main, serving_charts
from benchmarks.serving_matrix import measured_cases
from benchmarks.targets import SERVING_MS, Outcome

SVG = "{http://www.w3.org/2000/svg}"
SERVING = {
    "decode/1@1024": {"ms": 5.0},
    "decode/64@1024": {"ms": 10.0},
    "aggregated/decode/64@1024": {"ms": 20.0},
    "ttft/1x512": {"ms": 10.0},
    "ttft/cached": {"ms": 100.0},
}
ITL = {f"itl_ms_{part}": float(value) for value, part in enumerate(("p50", "p90", "p99", "max"), 1)}
DISAGGREGATION: dict[str, dict[str, Any]] = {
    "transfer/ttft_share@32768": {"ms": 3.0, "share": 0.05, "hidden_share": 0.9},
    "itl/disaggregated": ITL,
    **{f"ablation/{arm}/64,8192,256": {"ms": 100.0 * i} for i, arm in enumerate(ARMS, 1)},
    "kill/decode/before": {"failed_ms": None, "quiet_ms": None, "usable_ms": 1000.0},
}


def bars(chart: Chart) -> dict[str, float]:
    """Return the width of each bar by its label, of a chart without anything outside of it."""
    root = ElementTree.fromstring(draw(chart))
    height = float(root.attrib["height"])
    found = {}
    for rect in root.iter(f"{SVG}rect"):
        if (title := rect.find(f"{SVG}title")) is not None:
            found[title.text or ""] = float(rect.attrib["width"])
            assert 0 <= float(rect.attrib["width"]) <= PLOT_WIDTH + 0.1
            assert float(rect.attrib["y"]) < height
    return found


def test_each_case_has_a_bar_for_what_was_measured() -> None:
    charts = dict(serving_charts(SERVING, "one host"))

    assert set(charts) == {"serving-decode", "serving-ttft"}
    widths = bars(charts["serving-decode"])
    assert len(widths) == 5
    ours, alone = (widths[f"64@1024, Pagewire {arm} ms"] for arm in ("1 + 1: 10.0", "0 + 1: 20.0"))
    assert alone == pytest.approx(2 * ours, abs=0.2)
    assert widths["64@1024, vLLM: 7.8 ms"] == pytest.approx(0.777 * ours, abs=0.2)


def test_a_decade_is_the_same_distance_everywhere_on_a_logarithmic_axis() -> None:
    widths = bars(dict(serving_charts(SERVING, "one host"))["serving-ttft"])

    decade = PLOT_WIDTH  # the axis goes from 10 to 100 ms
    assert widths["1x512, Pagewire 1 + 1: 10.0 ms"] == 0
    assert widths["cached, Pagewire 1 + 1: 100 ms"] == pytest.approx(decade, abs=0.1)


def test_arms_shares_and_kills_are_drawn_and_what_is_missing_has_no_bar() -> None:
    charts = dict(disaggregation_charts(DISAGGREGATION, "one host"))

    assert set(charts) == {"transfer-share", "itl", "ablation", "kill"}
    assert len(bars(charts["itl"])) == 4
    assert len(bars(charts["ablation"])) == 4
    assert list(bars(charts["kill"])) == ["decode/before, pages move again: 1,000 ms"]
    assert "32768, of the first token: 5.0 %" in bars(charts["transfer-share"])


def test_every_case_of_the_peer_and_of_the_targets_is_one_of_the_matrix() -> None:
    assert set(VLLM) | set(SERVING_MS) <= set(measured_cases())


def test_a_target_is_the_most_or_the_least_that_counts_as_reached() -> None:
    most = Outcome(what="a step", target=5.0, found=5.0, unit="ms", file="a.json")
    least = replace(most, unit="GB/s", is_least=True)

    assert most.is_reached
    assert least.is_reached
    assert not replace(most, found=5.1).is_reached
    assert not replace(least, found=4.9).is_reached


def test_the_command_draws_what_files_have_and_names_one_that_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, other, out = tmp_path / "one.json", tmp_path / "two.json", tmp_path / "figures"
    head = {
        "hardware": {"cores": 2, "machine": "x86_64"},
        "commit": "abc",
        "configuration": {"scale": "small", "shape": "tiny"},
    }
    rows = [{"case": case} | row for case, row in SERVING.items()]
    failed = {"case": "mixed/512", "error": "CaseFailed: no page moved"}
    results.write_text(json.dumps(head | {"cases": [*rows, failed]}))
    other.write_text("[]")

    monkeypatch.setattr(sys, "argv", ["figures", str(results), str(other), "--out", str(out)])
    with pytest.raises(SystemExit):
        main()
    assert str(other) in capsys.readouterr().err
    assert not out.exists()

    monkeypatch.setattr(sys, "argv", ["figures", str(results), "--out", str(out)])
    main()
    assert {path.name for path in out.iterdir()} == {"serving-decode.svg", "serving-ttft.svg"}
    assert "2 cores, x86_64, shape tiny, scale small" in (out / "serving-decode.svg").read_text()
