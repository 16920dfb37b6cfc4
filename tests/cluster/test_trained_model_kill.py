"""Seeded answers of a trained model are the same text whether or not their worker is killed."""

import asyncio
import os
import signal

import pytest

from cluster.config_file import load_config
from cluster.environment import prepare_ray
from cluster.preflight import check_start
from pagewire import AsyncClient
from tests.support.local_ray import forget_token
from tests.support.trained_model import trained_path

pytestmark = [pytest.mark.cluster, pytest.mark.thorough, pytest.mark.timeout(300)]

NUM_TOKENS = 48
QUESTIONS = ("What is a lighthouse?", "Why is the sea salty?", "Tell me a story about a seagull.")
SAMPLING = (
    {"temperature": 0.7, "top_p": 0.9, "seed": 5},
    {"temperature": 1.2, "top_p": 0.8, "seed": 2**63 + 1},
    {"temperature": 0.9, "top_k": 40, "min_p": 0.02, "repetition_penalty": 1.1, "seed": 0},
)


@pytest.fixture(scope="module")
def cluster():
    prepare_ray(is_local=True)
    forget_token()
    from cluster.launch import start_cluster

    options = {
        "model": trained_path(),
        "device": "cpu",
        "prefill": 1,
        "decode": 2,
        "port": 0,
        "page_size": 16,
        "cpu_pages_mib": 64,
        "log_level": "warning",
        "prefill_worker.max_step_tokens": 256,
        "decode_worker.max_step_tokens": 512,
        "decode_worker.local_prefill_max_tokens": 0,
        "decode_worker.heartbeat_s": 0.1,
        "prefill_worker.heartbeat_s": 0.1,
    }
    config = load_config(None, options)
    running = start_cluster(config, check_start(config), shows_worker_logs=False)
    yield running
    running.stop(0.0)


def test_a_killed_decode_worker_changes_no_word(cluster):
    def open_streams(client):
        return [
            client.stream_chat(
                [{"role": "user", "content": question}],
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                **sampling,
            )
            for question, sampling in zip(QUESTIONS, SAMPLING, strict=True)
        ]

    async def scenario():
        async with AsyncClient(cluster.address, default_timeout_s=120) as client:
            calm = await asyncio.gather(*map(completion, open_streams(client)))
            streams = open_streams(client)
            tasks = [asyncio.create_task(completion(stream)) for stream in streams]
            while min(len(stream.completion.token_ids) for stream in streams) < 8:
                await asyncio.sleep(0.01)
            os.kill(cluster.pid(busiest(await client.status())), signal.SIGKILL)
            return calm, await asyncio.gather(*tasks)

    calm, interrupted = asyncio.run(scenario())

    assert [each.text for each in interrupted] == [each.text for each in calm]
    assert [each.token_ids for each in interrupted] == [each.token_ids for each in calm]
    assert all(len(each.token_ids) == NUM_TOKENS for each in calm)
    assert len({each.text for each in calm}) == len(QUESTIONS)
    assert sum(each.usage.resumptions for each in interrupted) > 0
    assert all(each.usage.resumptions == 0 for each in calm)


async def completion(stream):
    async with stream:
        async for _ in stream:
            pass
    return stream.completion


def busiest(status):
    """The decode worker with most running requests."""
    workers = [each for each in status.workers if each.pool == "decode"]
    return max(workers, key=lambda each: each.running).worker_id
