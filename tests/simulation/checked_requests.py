"""Requests to a simulated cluster, and checks of what they get against the oracle."""

import asyncio
import random
from dataclasses import replace

from llm_engine.sampling import SamplingParams
from tests.support.fake_cluster import MODEL, FakeCluster
from tests.support.history import RequestHistory, check_history
from tests.support.oracle import RequestSpec, expected_choices
from tests.support.scenario import MAX_CONTEXT_TOKENS, VOCAB_SIZE, ClusterShape

PAGE = 4
TWO_AND_TWO = ClusterShape(num_prefill=2, num_decode=2, page_transfer_s=0.01)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=77, max_tokens=16, ignore_eos=True)


def tokens(num_tokens: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(num_tokens))


def request(name: str, num_tokens: int = 40, **fields: object) -> RequestSpec:
    spec = RequestSpec(name=name, prompt=tokens(num_tokens, hash_of(name)), params=GREEDY)
    return replace(spec, **fields)


def hash_of(name: str) -> int:
    return sum(ord(character) * 31**index for index, character in enumerate(name))


def assert_right(*histories: RequestHistory) -> None:
    for history in histories:
        expected = expected_choices(
            history.spec, model=MODEL, max_context_tokens=MAX_CONTEXT_TOKENS
        )
        assert check_history(history, expected) == []


async def start_request(cluster: FakeCluster, spec: RequestSpec) -> "asyncio.Task[RequestHistory]":
    return asyncio.create_task(cluster.generate(spec))


def assert_disaggregated(histories: list[RequestHistory]) -> None:
    for history in histories:
        assert history.usage.stats.decode_computed_tokens == 0
        assert history.usage.stats.pages_moved >= -(-len(history.spec.prompt) // PAGE)
