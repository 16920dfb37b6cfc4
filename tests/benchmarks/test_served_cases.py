"""Cases of both benchmarks on a cluster of one event loop, read by client processes."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import kills
from benchmarks.altered_workers import Alteration
from benchmarks.case_runs import CaseFailed, Clock, Run
from benchmarks.checkpoint_shapes import SHAPES, ensure_random_checkpoint
from benchmarks.client_processes import ClientProcesses
from benchmarks.disaggregation import dedup, move_again, new_prompt
from benchmarks.random_checkpoint import write_random_checkpoint
from benchmarks.run_arguments import LOCAL_PREFILL, SCALES, Sizes
from benchmarks.served_cluster import ClusterSpec, ServedCluster
from benchmarks.serving_matrix import cached, decode, ttft
from tests.cluster.in_process import in_process_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

PAGE_SIZE = 8
AS_IT_IS = Alteration()
SIZES = Sizes(tokens_by=1, streams_by=1, repeats=2, steps=40)


def test_cases_measure_what_they_say_and_refuse_a_cluster_that_only_looks_right(
    tmp_path: Path,
) -> None:
    write_random_checkpoint(SHAPES["tiny"], tmp_path, torch.device("cpu"))
    assert ensure_random_checkpoint("tiny", tmp_path) == f"found {tmp_path}"
    with pytest.raises(SystemExit, match="is not empty"):
        ensure_random_checkpoint("small", tmp_path)

    rows = asyncio.run(measure_all(tmp_path))

    step = rows["decode"]
    assert 0 < step["min_ms"] <= step["ms"] <= step["max_ms"]
    assert (step["prime_prompt_tokens"], step["prime_hit_tokens"]) == (3 * 64, 0)
    assert step["prime_pages_moved"] == 3 * 64 // PAGE_SIZE
    # Of a cached prompt the last token is computed and the last page moved again, in two repeats.
    assert step["hit_tokens"] == 2 * 3 * (64 - 1)
    assert step["pages_moved"] == 2 * 3
    assert step["tokens"] == 2 * 3 * 40
    first = rows["ttft"]
    assert first["prefill_prompt_tokens"] == first["prompt_tokens"] == 2 * 32
    assert first["each_ms_max"] == pytest.approx(first["max_ms"], abs=0.01)
    again = rows["cached"]
    assert again["prefill_prompt_tokens"] == 2 * 2
    shared = rows["dedup"]
    assert (shared["times_computed"], shared["times_moved"]) == (1.0, 1.0)
    new = rows["new"]
    assert new["pages_moved"] == 5 * 64 // PAGE_SIZE
    assert 0 < new["exposed_ms"] <= new["receive_ms"]
    assert all(row["decode_prompt_tokens"] == 0 for row in rows.values())


@pytest.mark.thorough
def test_a_cluster_for_measurements_has_altered_workers(tmp_path: Path) -> None:
    altered = Alteration(moves_again=True, scatters_pages=True)
    spec = tiny_spec(tmp_path, altered=altered)
    with ServedCluster(spec, start_timeout_s=100.0) as cluster, ClientProcesses(1) as clients:
        run = Run(cluster, clients, SIZES, Clock(100.0, seed=1))
        row = move_again(64, run)  # which refuses less than all pages of each prompt
    assert row["pages_moved"] == 5 * 64 // 16
    assert row["decode_prompt_tokens"] == 0


@pytest.mark.thorough
def test_streams_pause_while_a_killed_decode_worker_starts_again(tmp_path: Path) -> None:
    spec = tiny_spec(tmp_path, kills.OPTIONS)
    with ServedCluster(spec, start_timeout_s=100.0) as cluster, ClientProcesses(1) as clients:
        run = Run(cluster, clients, SCALES["small"], Clock(100.0, seed=1))
        row = kills.strike("kill", "decode", "after", 1, run)
    (round_,) = row["rounds"]
    assert (row["lost_requests"], row["wrong_tokens"]) == (0, 0)
    assert len(round_["pauses_ms"]) == row["streams"]
    # Nobody else decodes: all streams wait until the worker is back.
    assert 0.5 * row["restarted_ms"] < min(round_["pauses_ms"])
    assert row["pause_ms_max"] == max(round_["pauses_ms"])
    assert row["calm_gap_ms_p50"] > 0
    assert 0 < row["resumed_gap_ms_p50"] <= row["resumed_gap_ms_max"] < min(round_["pauses_ms"])


def tiny_spec(
    model: Path, options: Mapping[str, Any] = {}, *, altered: Alteration = AS_IT_IS
) -> ClusterSpec:
    """One worker of each kind, on CPUs, with a model that this writes."""
    write_random_checkpoint(SHAPES["tiny"], model, torch.device("cpu"))
    return ClusterSpec(
        model=model,
        prefill=1,
        decode=1,
        device="cpu",
        options={"page_size": 16, LOCAL_PREFILL: 0, **options},
        altered=altered,
    )


async def measure_all(model_dir: Path) -> dict[str, dict[str, Any]]:
    # Large: on a busy host no deadline passes, after which decode workers compute prompts.
    async with in_process_cluster(
        model_dir, num_prefill=1, num_decode=1, page_size=PAGE_SIZE, is_large=True
    ) as client:
        loop = asyncio.get_running_loop()
        cluster: Any = SimpleNamespace(
            address=client.address,
            addresses=[client.address],
            model=(await client.list_models())[0],
            spec=SimpleNamespace(is_disaggregated=True, options={}),
            status=lambda: asyncio.run_coroutine_threadsafe(client.status(), loop).result(),
        )
        with ClientProcesses(2) as clients:
            run = Run(cluster, clients, SIZES, Clock(100.0, seed=1))
            rows = {
                "decode": await asyncio.to_thread(decode, 3, 64, run),
                "ttft": await asyncio.to_thread(ttft, 1, 32, run),
                "new": await asyncio.to_thread(new_prompt, 64, run),
            }
            small = Run(cluster, clients, Sizes(tokens_by=32, repeats=2), Clock(100.0, seed=2))
            rows["cached"] = await asyncio.to_thread(cached, 2, small)
            few = Run(cluster, clients, Sizes(tokens_by=64, streams_by=16), Clock(100.0, seed=3))
            rows["dedup"] = await asyncio.to_thread(dedup, few)
            # The same cluster, taken for one without prefill workers.
            cluster.spec.is_disaggregated = False
            with pytest.raises(CaseFailed, match="pages moved without prefill workers"):
                await asyncio.to_thread(ttft, 1, 32, run)
    return rows
