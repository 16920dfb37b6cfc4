"""Routers die in mid-stream; a client and a gateway go on at another one, and lose no token."""

import asyncio
import random

import pytest

from http_gateway.wire import RouterLink
from llm_engine.sampling import SamplingParams
from pagewire import AsyncClient, ConnectionFailedError, PagewireError, UnavailableError
from pagewire.protos import inference_pb2
from pagewire.protos.token_ids import unpack_token_ids
from pagewire.routers import Connector
from tests.simulation.checked_completions import assert_right, complete
from tests.simulation.checked_requests import GREEDY, SEEDED, tokens
from tests.support.fake_cluster import MODEL, FakeCluster, generate_request
from tests.support.memory_grpc import MemoryChannel, MemoryNetwork
from tests.support.oracle import RequestSpec, expected_choices
from tests.support.scenario import MAX_CONTEXT_TOKENS, ClusterShape
from tests.support.simulator import in_cluster
from tests.support.virtual_time import wait_until

SHAPE = ClusterShape(num_prefill=1, num_decode=2, num_routers=3, pass_s=0.03)


def client_of(cluster: FakeCluster, *names: str, resume_s: float = 30.0) -> AsyncClient:
    return AsyncClient(
        [f"{name}:1" for name in names],
        resume_s=resume_s,
        channel_factory=cluster.network.channel,
    )


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(GREEDY, id="greedy"),
        pytest.param(SEEDED, id="seeded"),
        pytest.param(
            SamplingParams(temperature=0.9, seed=3, max_tokens=20, frequency_penalty=0.5), id="eos"
        ),
    ],
)
@pytest.mark.parametrize("after", range(0, 16, 3))
def test_a_router_killed_in_mid_stream_costs_no_token_and_changes_none(
    params: SamplingParams, after: int
) -> None:
    async def body(cluster: FakeCluster) -> None:
        spec = RequestSpec(name="r", prompt=tokens(30, seed=after), params=params, n=2)
        client = client_of(cluster, "router-0", "router-1")
        running = asyncio.create_task(complete(client, spec))
        first = cluster.routers["router-0"].router
        await wait_until(lambda: num_emitted(first) >= after or running.done())
        was_running = not running.done()

        cluster.kill("router-0")

        completion = await running
        assert_right(spec, completion)
        assert client.address == ("router-1:1" if was_running else "router-0:1")
        if was_running and after:
            assert completion.usage is not None
            assert completion.usage.resumptions == 1
        await client.aclose()

    in_cluster(FakeCluster(shape=SHAPE), body)


def num_emitted(router: object) -> int:
    """Tokens that a router has for its only request; -1 before it has one."""
    sessions = router.dispatcher._sessions.values()  # type: ignore[attr-defined]
    streams = [each for session in sessions for each in session.streams.values()]
    return max((each.generation.num_tokens for each in streams), default=-1)


def test_without_a_seed_of_its_own_a_client_keeps_the_one_that_the_first_router_drew() -> None:
    async def body(cluster: FakeCluster) -> None:
        client = client_of(cluster, "router-0", "router-1")
        prompt = tokens(20, seed=1)
        async with client.stream(prompt, max_tokens=24, ignore_eos=True) as stream:
            await anext(stream)
            [session] = cluster.routers["router-0"].router.dispatcher._sessions.values()
            [seed] = [s.generation.request.sampling.seed for s in session.streams.values()]
            cluster.kill("router-0")
            async for _ in stream:
                pass
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=24, ignore_eos=True)
        assert_right(RequestSpec(name="r", prompt=prompt, params=params), stream.completion)
        await client.aclose()

    in_cluster(FakeCluster(shape=SHAPE), body)


def test_the_only_router_is_waited_for_and_goes_on_when_it_has_come_back() -> None:
    async def body(cluster: FakeCluster) -> None:
        spec = RequestSpec(name="r", prompt=tokens(30, seed=2), params=SEEDED)
        client = client_of(cluster, "router-0")
        running = asyncio.create_task(complete(client, spec))
        first = cluster.routers["router-0"].router
        await wait_until(lambda: num_emitted(first) >= 4)

        cluster.kill("router-0")
        await asyncio.sleep(12.0)
        await cluster.start_router("router-0")

        assert_right(spec, await running)
        await client.aclose()

    in_cluster(FakeCluster(shape=SHAPE), body)


@pytest.mark.parametrize("away_s", [0.5, 3.0])
def test_a_new_call_waits_for_the_next_start_of_the_only_router(away_s: float) -> None:
    async def body(cluster: FakeCluster) -> None:
        specs = [
            RequestSpec(name="r", prompt=tokens(30, seed=seed), params=GREEDY) for seed in (1, 2)
        ]
        client = client_of(cluster, "router-0")
        assert_right(specs[0], await complete(client, specs[0]))

        cluster.kill("router-0")
        waiting = asyncio.create_task(complete(client, specs[1]))
        await asyncio.sleep(away_s)
        await cluster.start_router("router-0")

        assert_right(specs[1], await waiting)
        await client.aclose()

    in_cluster(FakeCluster(shape=SHAPE), body)


@pytest.mark.parametrize(
    ("has_served", "resume_s", "waits_s"),
    [(False, 30.0, 1.0), (True, 30.0, 5.0), (True, 0.0, 0.0)],
)
def test_a_new_call_without_any_router_fails_soon(
    has_served: bool, resume_s: float, waits_s: float
) -> None:
    async def body(cluster: FakeCluster) -> None:
        spec = RequestSpec(name="r", prompt=tokens(30, seed=1), params=GREEDY)
        client = client_of(cluster, "router-0", resume_s=resume_s)
        if has_served:
            await complete(client, spec)
        cluster.kill("router-0")
        began_at = asyncio.get_running_loop().time()
        with pytest.raises(ConnectionFailedError):
            await complete(client, spec)

        took_s = asyncio.get_running_loop().time() - began_at
        assert 0.5 * waits_s <= took_s <= waits_s + 0.1
        await client.aclose()

    in_cluster(FakeCluster(shape=SHAPE), body)


@pytest.mark.parametrize(("resume_s", "waits_s"), [(0.0, 0.0), (5.0, 5.0)])
def test_a_client_gives_up_in_time_with_the_loss_that_it_had(
    resume_s: float, waits_s: float
) -> None:
    async def body(cluster: FakeCluster) -> None:
        client = client_of(cluster, "router-0", resume_s=resume_s)
        loop = asyncio.get_running_loop()
        stream = client.stream(tokens(20, seed=1), max_tokens=60, ignore_eos=True)
        await anext(stream)
        cluster.kill("router-0")
        killed_at = loop.time()

        with pytest.raises(ConnectionFailedError):
            async for _ in stream:
                pass

        assert waits_s - 2.1 <= loop.time() - killed_at <= waits_s + 0.1
        await client.aclose()

    in_cluster(FakeCluster(shape=SHAPE), body)


def test_a_client_is_told_of_missing_workers_once_its_router_has_waited_for_them() -> None:
    async def body(cluster: FakeCluster) -> None:
        client = client_of(cluster, "router-0")
        loop = asyncio.get_running_loop()
        began_at = loop.time()

        with pytest.raises(UnavailableError, match="no decode worker for 30 s"):
            await client.generate(tokens(20, seed=1))

        assert loop.time() - began_at == pytest.approx(30.0, abs=0.2)
        await client.aclose()

    in_cluster(FakeCluster(shape=ClusterShape(num_prefill=1, num_decode=0)), body)


def test_a_router_that_stops_hands_its_streams_over() -> None:
    async def body(cluster: FakeCluster) -> None:
        spec = RequestSpec(name="r", prompt=tokens(30, seed=2), params=SEEDED, n=2)
        client = client_of(cluster, "router-0", "router-1")
        running = asyncio.create_task(complete(client, spec))
        stopping = cluster.routers["router-0"]
        await wait_until(lambda: num_emitted(stopping.router) >= 4)

        await stopping.process.spawn(stopping.router.stop(0.0))

        assert_right(spec, await running)
        new = RequestSpec(name="new", prompt=tokens(9, seed=2), params=GREEDY)
        assert_right(new, await complete(client_of(cluster, "router-0", "router-1"), new))
        cluster.kill("router-0")
        await client.aclose()

    in_cluster(FakeCluster(shape=SHAPE), body)


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.thorough if seed >= 2 else ()) for seed in range(8)],
)
def test_routers_and_workers_that_die_again_and_again_change_no_token(seed: int) -> None:
    rng = random.Random(seed)

    async def body(cluster: FakeCluster) -> None:
        names = [f"router-{index}" for index in range(3)]
        specs = [
            RequestSpec(
                name=f"r{index}",
                prompt=tokens(rng.randint(1, 50), seed=1000 * seed + index),
                params=SamplingParams(
                    temperature=rng.choice((0.0, 0.9)),
                    seed=index,
                    max_tokens=rng.randint(1, 40),
                    ignore_eos=rng.choice((True, False)),
                    logprobs=rng.choice((None, 2)),
                ),
                n=rng.choice((1, 1, 3)),
                arrives_at=rng.uniform(0.0, 2.0),
            )
            for index in range(24)
        ]
        clients = [client_of(cluster, *rng.sample(names, 3)) for _ in specs]
        running = [
            asyncio.create_task(complete(*each)) for each in zip(clients, specs, strict=True)
        ]
        for _ in range(4):
            name = rng.choice([*names, "decode-0"])
            await asyncio.sleep(rng.uniform(0.0, 0.6))
            cluster.kill(name)
            await asyncio.sleep(rng.uniform(0.0, 0.4))
            start = cluster.start_router if name in names else cluster.start_worker
            await start(name)

        for spec, completion in zip(specs, await asyncio.gather(*running), strict=True):
            assert_right(spec, completion)
        for client in clients:
            await client.aclose()

    in_cluster(FakeCluster(shape=SHAPE), body)


# The HTTP gateway


def link_of(cluster: FakeCluster, *names: str, resume_s: float = 30.0, most: int = 3) -> RouterLink:
    """A gateway's link to routers, which it asks for; it is told so many of those that live."""

    async def find_routers() -> list[str]:
        living = [each for each in names if cluster.routers[each].process.state != "dead"][:most]
        if not living:
            raise UnavailableError("the router starts", code="UNAVAILABLE")
        return [f"{each}:1" for each in living]

    return RouterLink(
        find_routers,
        request_timeout_s=600.0,
        resume_s=resume_s,
        tick_s=15.0,
        connector=MemoryConnector(cluster.network),
    )


class MemoryConnector(Connector):
    """Opens channels of a network in memory."""

    def __init__(self, network: MemoryNetwork) -> None:
        super().__init__()
        self._network = network

    def __call__(self, address: str) -> MemoryChannel:
        return self._network.channel(address)

    async def explain(self, error: PagewireError, address: str) -> PagewireError:
        return error


async def answers_right(link: RouterLink, specs: list[RequestSpec]) -> list[inference_pb2.Usage]:
    """Make the calls of one HTTP request; check their tokens and return what they cost."""
    answers = await link.start("", [generate_request(each) for each in specs], 0.0)
    received: dict[tuple[int, int], list[int]] = {}
    usages: dict[int, inference_pb2.Usage] = {}
    try:
        while not answers.is_over:
            for call, response in await answers.next():
                token_ids = received.setdefault((call, response.choice), [])
                assert response.first_index == len(token_ids) or not response.token_ids
                token_ids += unpack_token_ids(response.token_ids)
                if response.HasField("usage"):
                    usages[call] = response.usage
    finally:
        answers.close()
    for call, spec in enumerate(specs):
        expected = expected_choices(spec, model=MODEL, max_context_tokens=MAX_CONTEXT_TOKENS)
        assert [tuple(received[call, i]) for i in range(spec.n)] == [e.tokens for e in expected]
        assert usages[call].completion_tokens == sum(len(each.tokens) for each in expected)
    return [usages[call] for call in range(len(specs))]


def specs_of(count: int, *, max_tokens: int = 60) -> list[RequestSpec]:
    return [
        RequestSpec(
            name=f"r{index}",
            prompt=tokens(10 + index, seed=index),
            params=SamplingParams(
                temperature=0.9, seed=index, max_tokens=max_tokens, ignore_eos=True
            ),
            n=1 + index % 2,
        )
        for index in range(count)
    ]


def test_an_http_answer_goes_on_at_each_router_that_is_left() -> None:
    async def body(cluster: FakeCluster) -> None:
        link = link_of(cluster, "router-0", "router-1", "router-2")
        running = asyncio.create_task(answers_right(link, specs_of(6)))
        for name in ("router-0", "router-1"):
            await asyncio.sleep(0.8)
            cluster.kill(name)

        usages = await running

        assert [each.stats.resumptions for each in usages] == [2] * 6
        await link.aclose()

    in_cluster(FakeCluster(shape=SHAPE), body)


def test_an_http_answer_goes_on_where_a_router_is_found_after_the_loss() -> None:
    async def body(cluster: FakeCluster) -> None:
        link = link_of(cluster, "router-0", "router-1", most=1)
        running = asyncio.create_task(answers_right(link, specs_of(4)))
        await asyncio.sleep(0.8)

        cluster.kill("router-0")

        assert [each.stats.resumptions for each in await running] == [1] * 4
        assert link._routers.addresses == ("router-1:1",)
        await link.aclose()

    in_cluster(FakeCluster(shape=SHAPE), body)


def test_an_http_answer_waits_for_its_only_router() -> None:
    async def body(cluster: FakeCluster) -> None:
        link = link_of(cluster, "router-0")
        running = asyncio.create_task(answers_right(link, specs_of(4)))
        router = cluster.routers["router-0"].router
        await wait_until(lambda: num_emitted(router) >= 5)

        cluster.kill("router-0")
        await asyncio.sleep(12.0)
        await cluster.start_router("router-0")

        await running
        await link.aclose()

    in_cluster(FakeCluster(shape=SHAPE), body)


@pytest.mark.parametrize("resume_s", [0.0, 5.0])
def test_an_http_answer_fails_in_time_when_no_router_comes_back(resume_s: float) -> None:
    async def body(cluster: FakeCluster) -> None:
        link = link_of(cluster, "router-0", resume_s=resume_s)
        running = asyncio.create_task(answers_right(link, specs_of(2)))
        router = cluster.routers["router-0"].router
        await wait_until(lambda: num_emitted(router) >= 5)
        cluster.kill("router-0")
        loop = asyncio.get_running_loop()
        killed_at = loop.time()

        with pytest.raises(PagewireError, match="no connection to router-0:1"):
            await running

        assert resume_s - 2.1 <= loop.time() - killed_at <= resume_s + 0.1
        await link.aclose()

    in_cluster(FakeCluster(shape=SHAPE), body)
