"""The parts of first tokens on a cluster of one event loop, whose spans go over HTTP."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.case_runs import CaseFailed, Clock, Run
from benchmarks.checkpoint_shapes import SHAPES
from benchmarks.client_processes import ClientProcesses
from benchmarks.first_token_parts import cached, engine_time, mixed, moved, new
from benchmarks.first_token_path import LOCAL, REMOTE
from benchmarks.random_checkpoint import write_random_checkpoint
from benchmarks.run_arguments import Sizes
from benchmarks.span_collector import SpanCollector, SpansMissing, span_collector
from observability.tracing import TracingConfig, configure_tracing, stop_tracing
from tests.cluster.in_process import in_process_cluster
from tests.support.cluster_status import ONE_OF_EACH
from tests.support.rarely import rarely

SIZES = Sizes(tokens_by=16, streams_by=16, repeats=1)


def test_spans_that_do_not_come_are_named() -> None:
    refused = pytest.raises(SpansMissing, match="1 of 1 traces lack spans")
    with span_collector() as collector, refused:
        collector.take(["0" * 32], timeout_s=0.01)


def test_the_time_of_an_engine_is_divided_whole() -> None:
    [before] = ONE_OF_EACH.workers
    later = {"prompt_step_s": 2.6, "decode_step_s": 3.7, "mixed_step_s": 4.8, "steps": 12}
    after: Any = SimpleNamespace(**later)

    assert engine_time(before, after, 1000.0) == {
        "prompt_ms": 100.0,
        "decode_ms": 200.0,
        "mixed_ms": 300.0,
        "no_step_ms": 400.0,
        "steps": 10,
    }


@pytest.mark.cluster
@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_prefill", [*rarely(0), 1])
def test_parts_of_a_cluster_add_up_to_what_its_clients_saw(
    num_prefill: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # ms, between two sendings
    write_random_checkpoint(SHAPES["tiny"], tmp_path, torch.device("cpu"))
    with span_collector() as collector:
        config = TracingConfig(endpoint=collector.endpoint)
        configure_tracing(config, service="pagewire", instance="all")
        try:
            rows = asyncio.run(measure_all(tmp_path, num_prefill, collector))
        finally:
            stop_tracing()

    for name in ("new", "cached"):
        row = rows[name]
        assert row["last"]["parts_ms"].keys() == set(REMOTE if num_prefill else LOCAL)
        for each in (row["first"], row["last"]):
            parts = each["parts_ms"]
            assert sum(parts.values()) + each["rest_ms"] == pytest.approx(each["ms"], abs=0.01)
            assert min(parts.values()) > -1, "one part ends before it begins"
            assert 0 < parts["passes"] < each["ms"]
        assert row["first"]["ms"] <= row["last"]["ms"]
        assert row["last"]["ms"] == pytest.approx(row["ms"], abs=0.5)
        assert row["untraced_min_ms"] <= row["untraced_ms"] <= row["untraced_max_ms"]
        assert ("pages_after_passes_ms" in row) == (num_prefill > 0)
    if num_prefill:  # the token leaves the prefill worker after the passes
        assert rows["new"]["pages_after_passes_ms"] > rows["new"]["pages_after_token_ms"]
        assert "pages moved, not" in rows["moved"]["refusal"], "this cluster moves nothing again"
    engines = rows["mixed"]["engines"]
    assert len(engines) == num_prefill + 1
    assert engines["decode-0"]["decode_ms"] > 0
    assert all(each["no_step_ms"] > 0 for each in engines.values())
    if num_prefill:
        assert engines["prefill-0"]["prompt_ms"] > 0
        assert engines["decode-0"]["mixed_ms"] == engines["decode-0"]["prompt_ms"] == 0


async def measure_all(
    model_dir: Path, num_prefill: int, collector: SpanCollector
) -> dict[str, dict[str, Any]]:
    async with in_process_cluster(
        model_dir, num_prefill=num_prefill, num_decode=1, num_pages=2000, is_large=True
    ) as client:
        loop = asyncio.get_running_loop()
        cluster: Any = SimpleNamespace(
            addresses=[client.address],
            model=(await client.list_models())[0],
            spec=SimpleNamespace(
                is_disaggregated=num_prefill > 0,
                options={"decode_worker.local_prefill_max_tokens": 0},
            ),
            status=lambda: asyncio.run_coroutine_threadsafe(client.status(), loop).result(30.0),
        )
        with ClientProcesses(1) as clients:
            run = Run(cluster, clients, SIZES, Clock(100.0, seed=1))
            rows = {
                "new": await asyncio.to_thread(new, 32, 512, collector, run),
                "cached": await asyncio.to_thread(cached, 32, collector, run),
                "mixed": await asyncio.to_thread(mixed, run),
            }
            if num_prefill:
                with pytest.raises(CaseFailed) as refused:
                    await asyncio.to_thread(moved, 512, collector, run)
                rows["moved"] = {"refusal": str(refused.value)}
            return rows
