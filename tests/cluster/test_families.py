"""Every family gives the same greedy tokens as transformers, through router and both workers."""

import asyncio
import random

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.cluster.in_process import generate_all, in_process_cluster, one_plus_one
from tests.support.checkpoints import LLAMA3_ROPE, reference_after, write_checkpoint

NUM_TOKENS = 32
FAMILIES = {
    "llama2": ("llama", {}),
    "llama3": ("llama", {"rope_parameters": LLAMA3_ROPE, "max_shard_size": "60KB"}),
    "mistral": ("mistral", {"sliding_window": 13}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 12}),
}
# In each run several files and a window; the tests of the engine alone have all families there.
ALWAYS = {"llama3", "mistral"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.thorough) for name in FAMILIES],
)
def test_greedy_tokens_equal_those_of_transformers(name, tmp_path):
    family, changes = FAMILIES[name]
    model = write_checkpoint(tmp_path, family, seed=7, **changes)
    source = random.Random(name)
    prompts = [[source.randrange(3, 211) for _ in range(length)] for length in (1, 8, 9, 40, 100)]

    async def scenario():
        async with one_plus_one(tmp_path) as client:
            return await generate_all(client, prompts, max_tokens=NUM_TOKENS)

    completions = asyncio.run(scenario())

    for prompt, completion in zip(prompts, completions, strict=True):
        answer = list(completion.token_ids)
        assert len(answer) == NUM_TOKENS
        assert answer == reference_after(model, prompt, answer)
        assert completion.usage.bytes_moved > 0
        assert completion.usage.decode_computed_tokens == 0


def test_decode_workers_without_prefill_workers_compute_the_prompts_themselves(tmp_path):
    model = write_checkpoint(tmp_path, "llama", seed=7)
    source = random.Random(1)
    shared = [source.randrange(3, 211) for _ in range(40)]
    prompts = [shared + [source.randrange(3, 211) for _ in range(9)] for _ in range(4)]

    async def scenario():
        async with in_process_cluster(tmp_path, num_prefill=0, num_decode=1) as client:
            first = await generate_all(client, prompts[:1], max_tokens=NUM_TOKENS)
            return first + await generate_all(client, prompts[1:], max_tokens=NUM_TOKENS)

    completions = asyncio.run(scenario())

    for prompt, completion in zip(prompts, completions, strict=True):
        usage = completion.usage
        answer = list(completion.token_ids)
        assert len(answer) == NUM_TOKENS
        assert answer == reference_after(model, prompt, answer)
        assert usage.bytes_moved == usage.prefill_computed_tokens == 0
        assert usage.decode_computed_tokens + usage.decode_cached_tokens == len(prompt)
    cached = [completion.usage.decode_cached_tokens for completion in completions]
    assert cached == [0, 40, 40, 40], "a prefix is computed once"


def test_every_server_tells_its_health(tmp_path):
    write_checkpoint(tmp_path)

    async def scenario():
        async with one_plus_one(tmp_path) as client:
            status = await client.status()
            workers = [each.address for each in status.workers]
            return [await _health(address) for address in (client.address, *workers)]

    health = asyncio.run(scenario())

    assert health == [health_pb2.HealthCheckResponse.SERVING] * 3


async def _health(address):
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)).status
