"""What workers of whole clusters tell of their work, as the router's status has it."""

import asyncio
from dataclasses import replace

import pytest

from pagewire import WorkerStatus
from tests.simulation.checked_requests import GREEDY, assert_right, request, tokens
from tests.support.fake_cluster import FakeCluster
from tests.support.fake_engine import SLOT_BYTES
from tests.support.scenario import ClusterShape
from tests.support.simulator import in_cluster

NUM_REQUESTS = 8
PREFIX = tokens(40, seed=1)
UNIT_LEN = 8  # the prefix is five units
LATENCY_S = 0.0001  # of each chunk
PASS_S, TOKEN_S = ClusterShape().pass_s, ClusterShape().token_s
NUM_DECODED = 2 * 19


async def worker_of(cluster: FakeCluster, name: str) -> WorkerStatus:
    """A worker's numbers when its next heartbeat has come."""
    await asyncio.sleep(1.0)
    status = cluster.routers["router-0"].router.cluster_status()
    return next(each for each in status.workers if each.worker_id == name)


@pytest.mark.parametrize("unit_len", [0, UNIT_LEN], ids=["flat", "cascade"])
@pytest.mark.parametrize("num_prefill", [0, 1])
def test_attention_needs_all_keys_of_all_rows_and_reads_a_shared_prefix_once(
    unit_len: int, num_prefill: int
) -> None:
    specs = [request(f"r{i}", prompt=(*PREFIX, i, *tokens(i, seed=i))) for i in range(NUM_REQUESTS)]

    async def scenario(cluster: FakeCluster) -> None:
        assert_right(*await asyncio.gather(*map(cluster.generate, specs)))
        told = await worker_of(cluster, "decode-0")

        # The first token of each is drawn with its prompt; each further one is a row.
        needed = sum(
            len(spec.prompt) + index for spec in specs for index in range(1, GREEDY.max_tokens)
        )
        assert told.attention_needed_bytes == needed * SLOT_BYTES
        spared = told.attention_needed_bytes - told.attention_read_bytes
        if not unit_len:
            assert (spared, told.sharing_groups, told.sharing_rows) == (0, 0, 0)
            return
        # In each group one row reads the prefix, whose last unit is full, for all the others.
        assert spared == len(PREFIX) * SLOT_BYTES * (told.sharing_rows - told.sharing_groups)
        assert told.sharing_rows > 5 * told.sharing_groups > 0, "most of them run together"
        assert 0 < told.attention_read_bytes < 0.6 * told.attention_needed_bytes

    shape = ClusterShape(num_prefill=num_prefill, shared_unit_len=unit_len)
    in_cluster(FakeCluster(shape=shape), scenario)


@pytest.mark.parametrize("num_streams", [1, NUM_REQUESTS])
def test_nearly_all_steps_are_launched_before_the_tokens_of_the_one_before_are_known(
    num_streams: int,
) -> None:
    params = replace(GREEDY, max_tokens=80)
    specs = [request(f"r{i}", 12, params=params) for i in range(num_streams)]

    async def scenario(cluster: FakeCluster) -> None:
        assert_right(*await asyncio.gather(*map(cluster.generate, specs)))
        told = await worker_of(cluster, "decode-0")

        assert told.steps >= params.max_tokens - 1
        assert told.steps_ahead >= 0.95 * told.steps

    in_cluster(FakeCluster(), scenario)


def test_two_prefixes_are_two_groups_and_strangers_are_in_none() -> None:
    groups = {2: tokens(16, seed=5), 3: tokens(24, seed=6), 1: tokens(32, seed=7)}
    specs = [
        request(f"r{size}-{i}", prompt=(*prefix, size, i))
        for size, prefix in groups.items()
        for i in range(size)
    ]

    async def scenario(cluster: FakeCluster) -> None:
        assert_right(*await asyncio.gather(*map(cluster.generate, specs)))
        told = await worker_of(cluster, "decode-0")

        # All decode together but for the first steps, while the last ones are prefilled.
        assert told.sharing_groups >= 2 * (GREEDY.max_tokens - 4)
        assert 2 * told.sharing_groups < told.sharing_rows < 3 * told.sharing_groups

    shape = ClusterShape(num_prefill=0, shared_unit_len=UNIT_LEN)
    in_cluster(FakeCluster(shape=shape), scenario)


@pytest.mark.parametrize(
    ("page_transfer_s", "pass_s", "chunk_pages", "is_hidden"),
    [(0.05, 0.0, 11, False), (0.002, 0.2, 1, True)],
    ids=["the network is slow", "the engine is slow"],
)
def test_transfer_time_is_exposed_where_it_follows_the_prompt_and_hidden_where_it_does_not(
    page_transfer_s: float, pass_s: float, chunk_pages: int, is_hidden: bool
) -> None:
    shape = ClusterShape(
        page_transfer_s=page_transfer_s,
        pass_s=pass_s,
        chunk_pages=chunk_pages,
        max_step_tokens=8,
        max_running_sequences=4,
    )

    async def scenario(cluster: FakeCluster) -> None:
        assert_right(await cluster.generate(request("r0", 41)))
        told = await worker_of(cluster, "decode-0")

        chunks = -(-11 // chunk_pages)
        all_s = 11 * page_transfer_s + chunks * LATENCY_S
        # The last chunk holds the last tokens: it cannot go before the prompt is computed.
        last_s = page_transfer_s * (1 if is_hidden else 11) + LATENCY_S
        assert told.transfer_s == pytest.approx(all_s)
        assert told.exposed_transfer_s == pytest.approx(last_s)
        assert (last_s < 0.1 * all_s) is is_hidden
        sender = await worker_of(cluster, "prefill-0")
        assert sender.transfer_s == 0, "only one side counts"

    in_cluster(FakeCluster(shape=shape), scenario)


@pytest.mark.parametrize("num_prefill", [0, 1])
def test_the_time_of_steps_is_told_by_what_they_compute(num_prefill: int) -> None:
    params = replace(GREEDY, max_tokens=20)

    async def scenario(cluster: FakeCluster) -> None:
        first = asyncio.create_task(cluster.generate(request("r0", 41, params=params)))
        await asyncio.sleep(0.15)  # it decodes
        assert_right(await cluster.generate(request("r1", 4, params=params)), await first)
        names = [f"prefill-{index}" for index in range(num_prefill)] + ["decode-0"]
        told = [await worker_of(cluster, name) for name in names]

        prompts_s, shared_s = PASS_S + 41 * TOKEN_S, PASS_S + 4 * TOKEN_S
        found = [(each.prompt_step_s, each.mixed_step_s) for each in told]
        if num_prefill:
            assert found[0] == (pytest.approx(prompts_s + shared_s, abs=0.002), 0)
            assert told[0].decode_step_s == 0
            assert found[1] == (0, 0)
        else:
            # A token of the first request is decoded beside the other's prompt.
            assert found[0] == (
                pytest.approx(prompts_s, abs=0.002),
                pytest.approx(shared_s + TOKEN_S, abs=0.002),
            )
        assert told[-1].decode_step_s == pytest.approx(
            (told[-1].steps - (0 if num_prefill else 2)) * PASS_S + NUM_DECODED * TOKEN_S, abs=0.005
        )

    in_cluster(FakeCluster(shape=ClusterShape(num_prefill=num_prefill)), scenario)
