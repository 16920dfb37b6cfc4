"""Serves a checkpoint on a cluster of this host and accounts for computed, moved and cached tokens.

    python -m benchmarks.serving --model DIR --prefill 1 --decode 1 --out benchmarks/results/X.json

Two waves of the same greedy requests: prompts of random token ids that share a prefix. The run
fails if no page moved, if a decode worker computed a prompt token, or if the waves' tokens differ.
It shows that the real path works and what it costs today; nothing in it is tuned.
"""

import argparse
import asyncio
import json
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from cluster.config import ClusterConfig
from cluster.config_file import load_config
from cluster.environment import prepare_ray
from cluster.preflight import check_start
from pagewire import AsyncClient, Completion

CALL_TIMEOUT_S = 300.0
FIRST_TOKEN_ID = 10  # after the special tokens


async def run_waves(address: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Send both waves and return one case each."""
    prompts = make_prompts(options)
    async with AsyncClient(address, default_timeout_s=CALL_TIMEOUT_S) as client:
        waves = [await _run_wave(client, prompts, options.output_tokens) for _ in range(2)]
    tokens = [[each.token_ids for each in completions] for completions, _ in waves]
    if tokens[0] != tokens[1]:
        raise SystemExit("the second wave's tokens differ from the first's")
    return [
        _case(name, completions, seconds)
        for name, (completions, seconds) in zip(("cold", "again"), waves, strict=True)
    ]


def make_prompts(options: argparse.Namespace) -> list[list[int]]:
    """Return prompts of random token ids with one shared prefix."""
    source = random.Random(options.seed)  # noqa: S311 - reproducible, nothing secret

    def ids(count: int) -> list[int]:
        return [source.randrange(FIRST_TOKEN_ID, options.vocab_tokens) for _ in range(count)]

    prefix = ids(options.shared_tokens)
    return [prefix + ids(options.unique_tokens) for _ in range(options.requests)]


async def _run_wave(
    client: AsyncClient, prompts: list[list[int]], output_tokens: int
) -> tuple[list[Completion], float]:
    started = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                client.generate(prompt, temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
            )
            for prompt in prompts
        ]
    return [task.result() for task in tasks], time.monotonic() - started


def _case(name: str, completions: list[Completion], seconds: float) -> dict[str, Any]:
    usages = [each.usage for each in completions if each.usage]

    def total(field: str) -> int:
        return sum(getattr(usage, field) for usage in usages)

    case = {
        "case": name,
        "seconds": round(seconds, 3),
        "output_tokens_per_s": round(total("completion_tokens") / seconds, 1),
        "ttft_ms_median": round(statistics.median(usage.ttft_ms for usage in usages), 1),
        "tpot_ms_median": round(statistics.median(usage.tpot_ms for usage in usages), 2),
        "prompt_tokens": total("prompt_tokens"),
        "completion_tokens": total("completion_tokens"),
        "prefill_computed_tokens": total("prefill_computed_tokens"),
        "decode_computed_tokens": total("decode_computed_tokens"),
        "prefill_cached_tokens": total("prefill_cached_tokens"),
        "decode_cached_tokens": total("decode_cached_tokens"),
        "pages_moved": total("pages_moved"),
        "bytes_moved": total("bytes_moved"),
    }
    if not case["bytes_moved"] or case["decode_computed_tokens"]:
        raise SystemExit(f"not disaggregated: {case}")
    return case


def serve_and_run(config: ClusterConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Start the cluster, run the waves, stop it, and return what is written."""
    import ray  # after prepare_ray

    from cluster.launch import start_cluster

    started = time.monotonic()
    cluster = start_cluster(config, check_start(config), shows_worker_logs=False)
    ready_s = time.monotonic() - started
    try:
        cases = asyncio.run(run_waves(cluster.address, options))
    finally:
        cluster.stop(0.0)
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    arguments = [Path(argument).name for argument in sys.argv[1:]]  # folders are the host's own
    return {
        "command": " ".join(["python -m benchmarks.serving", *arguments]),
        "hardware": gpus or [platform.machine()],
        "versions": {"torch": torch.__version__, "ray": ray.__version__},
        "device": cluster.device,
        "start_to_ready_s": round(ready_s, 1),
        "requests": options.requests,
        "shared_tokens": options.shared_tokens,
        "unique_tokens": options.unique_tokens,
        "output_tokens": options.output_tokens,
        "cases": cases,
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--shared-tokens", type=int, default=1024)
    parser.add_argument("--unique-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--vocab-tokens", type=int, default=500, help="prompt ids are below it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    prepare_ray(is_local=True)
    config = load_config(
        None,
        {
            "model": options.model,
            "prefill": options.prefill,
            "decode": options.decode,
            "device": options.device,
            "page_size": options.page_size,
            "port": 0,
            "http_port": 0,
            "log_level": "warning",
            # Without it short remainders would be prefilled where they are decoded.
            "decode_worker.local_prefill_max_tokens": 0,
        },
    )
    result = json.dumps(serve_and_run(config, options), indent=2) + "\n"
    sys.stdout.write(result)
    if options.out:
        options.out.write_text(result, encoding="utf-8")


if __name__ == "__main__":
    main()
