"""Named scenarios: what the design promises, one test a promise."""

import asyncio
import itertools
from dataclasses import replace

import grpc
import pytest

from llm_engine.sampling import SamplingParams
from pagewire.protos import worker_pb2, worker_pb2_grpc
from pagewire.wire import usage_from
from protos.contract import CONTRACT_VERSION
from tests.simulation.checked_requests import (
    GREEDY,
    PAGE,
    SEEDED,
    assert_right,
    request,
    start_request,
    tokens,
)
from tests.support.fake_cluster import MODEL, FakeCluster
from tests.support.history import check_history
from tests.support.loopback import FaultKind, LoopbackFault, planned
from tests.support.oracle import expected_choices
from tests.support.scenario import DAMAGES, MAX_CONTEXT_TOKENS, ClusterShape
from tests.support.simulator import in_cluster
from tests.support.virtual_time import wait_until
from worker.wire import worker_to_proto

SLOW = ClusterShape(num_prefill=2, max_step_tokens=33, page_transfer_s=0.05)


def test_one_prefill_and_one_decode_worker_answer_as_the_oracle() -> None:
    async def body(cluster: FakeCluster) -> None:
        history = await cluster.generate(request("r0", 41))

        assert_right(history)
        stats = history.usage.stats
        assert stats.pages_moved == 11
        assert stats.bytes_moved == 11 * PAGE * 16
        assert stats.prefill_computed_tokens == 41
        assert stats.decode_computed_tokens == 0

    in_cluster(FakeCluster(), body)


def test_16_requests_with_one_new_prefix_move_and_compute_its_pages_once() -> None:
    prefix = tokens(40, seed=1)  # ten pages
    suffixes = [tokens(1 + index % 4, seed=100 + index) for index in range(16)]
    suffixes = [(index, *suffix) for index, suffix in enumerate(suffixes)]  # all different

    async def body(cluster: FakeCluster) -> None:
        histories = await asyncio.gather(
            *(
                cluster.generate(request(f"r{index}", prompt=prefix + suffix))
                for index, suffix in enumerate(suffixes)
            )
        )

        assert_right(*histories)
        moved = sum(history.usage.stats.pages_moved for history in histories)
        assert moved == 10 + sum(-(-len(suffix) // PAGE) for suffix in suffixes)
        computed = cluster.workers["prefill-0"].engine.num_computed_tokens
        assert computed == 40 + sum(len(suffix) for suffix in suffixes)
        assert sum(history.usage.stats.decode_computed_tokens for history in histories) == 0

    in_cluster(FakeCluster(), body)


def test_requests_that_wait_for_a_prefix_in_flight_hold_up_nobody_else() -> None:
    """More of them than decode and prefill schedulers look at in one step."""
    prefix = tokens(80, seed=1)
    # The prefix takes two seconds to move, another prompt of one page very little.
    shape = ClusterShape(
        page_transfer_s=0.2,
        max_running_sequences=64,
        max_step_tokens=128,
        chunk_pages=1,
        num_prefill=2,
    )

    async def body(cluster: FakeCluster) -> None:
        specs = [request(f"r{index}", prompt=(*prefix, index)) for index in range(36)]
        sharing = [await start_request(cluster, spec) for spec in specs]
        await asyncio.sleep(0.5)
        other = await cluster.generate(request("other", 4, arrives_at=0.5))

        assert_right(other, *await asyncio.gather(*sharing))
        assert other.deltas[0].at - other.arrived_at < 0.5
        # The first token of the one whose prefix is in flight does not wait for it.
        firsts = sorted(task.result().deltas[0].at for task in sharing)
        assert firsts[0] < 0.5
        assert firsts[1] > 2.0, "the prefix was in flight all the while"
        moved = sum(task.result().usage.stats.pages_moved for task in sharing)
        assert moved == 20 + 36, "it moved once"

    in_cluster(FakeCluster(shape=shape), body)


@pytest.mark.parametrize("silently", [True, False])
def test_requests_that_wait_for_a_prefix_in_flight_go_on_when_its_sender_dies(
    silently: bool,
) -> None:
    prefix = tokens(80, seed=1)

    async def body(cluster: FakeCluster) -> None:
        specs = [request(f"r{index}", prompt=(*prefix, index)) for index in range(40)]
        serving = [await start_request(cluster, spec) for spec in specs]
        victim = await _serving_prefill(cluster)
        pool = cluster.workers["decode-0"].cache.pool
        await wait_until(lambda: pool.counts().live >= 5)

        cluster.kill(victim, silently=silently)

        histories = await asyncio.gather(*serving)
        assert_right(*histories)
        assert sum(history.usage.stats.decode_computed_tokens for history in histories) == 0
        assert sum(history.usage.stats.prefill_retries for history in histories) == 1
        assert sum(history.usage.stats.pages_moved for history in histories) == 20 + 40

    in_cluster(FakeCluster(shape=SLOW), body)


def test_a_second_turn_moves_only_what_the_decode_worker_lacks() -> None:
    first = request("r0", 40)

    async def body(cluster: FakeCluster) -> None:
        history = await cluster.generate(first)
        # 40 prompt tokens and 16 drawn ones, the last of which has no K and V: 13 full pages.
        second = request("r1", prompt=first.prompt + history.tokens(0) + tokens(7, seed=5))
        again = await cluster.generate(second)

        assert_right(history, again)
        assert again.usage.stats.decode_cached_tokens == 13 * PAGE
        assert again.usage.stats.pages_moved == 16 - 13

    in_cluster(FakeCluster(), body)


def test_a_short_rest_is_prefilled_where_it_is_decoded() -> None:
    async def body(cluster: FakeCluster) -> None:
        history = await cluster.generate(request("r0", 8))

        assert_right(history)
        assert history.usage.stats.pages_moved == 0
        assert history.usage.stats.decode_computed_tokens == 8

    in_cluster(FakeCluster(shape=ClusterShape(local_prefill_max_tokens=8)), body)


async def _serving_prefill(cluster: FakeCluster) -> str:
    """Wait until a prefill worker has computed something and return its name."""
    names = [name for name in cluster.workers if name.startswith("prefill")]
    await wait_until(lambda: any(cluster.workers[n].engine.num_computed_tokens for n in names))
    return next(n for n in names if cluster.workers[n].engine.num_computed_tokens)


@pytest.mark.parametrize("hangs", [True, False])
@pytest.mark.parametrize("silently", [True, False])
@pytest.mark.parametrize("phase", ["computes", "transfers", "is done"])
def test_a_prefill_worker_killed_while_it(phase: str, silently: bool, hangs: bool) -> None:
    async def body(cluster: FakeCluster) -> None:
        serving = await start_request(cluster, request("r0", 80))
        victim = await _serving_prefill(cluster)
        decode = cluster.workers["decode-0"].cache.pool
        if phase == "transfers":
            await wait_until(lambda: 0 < decode.counts().incoming < 20)
        elif phase == "is done":
            await wait_until(lambda: decode.counts().live == 21)

        cluster.kill(victim, silently=silently)

        history = await serving
        assert_right(history)
        stats = history.usage.stats
        assert stats.prefill_retries == (0 if phase == "is done" else 1)
        assert stats.resumptions == 0
        assert stats.pages_moved >= 20
        assert stats.decode_computed_tokens == 0

    in_cluster(FakeCluster(shape=replace(SLOW, hangs_on_peer_death=hangs)), body)


def test_what_was_committed_before_a_prefill_worker_died_is_not_moved_again() -> None:
    async def body(cluster: FakeCluster) -> None:
        serving = await start_request(cluster, request("r0", 80))
        victim = await _serving_prefill(cluster)
        pool = cluster.workers["decode-0"].cache.pool
        await wait_until(lambda: pool.counts().live >= 10)

        cluster.kill(victim)

        history = await serving
        assert_right(history)
        assert len(history.deltas) > 0
        # The first token was told before its pages were there; it belongs to the prompt now.
        assert history.usage.stats.pages_moved == 20 + 1

    in_cluster(FakeCluster(shape=SLOW), body)


@pytest.mark.parametrize("silently", [True, False])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("victim", ["prefill", "decode", "both"])
def test_a_worker_killed_between_the_first_token_and_its_pages(
    victim: str, params: SamplingParams, silently: bool
) -> None:
    async def body(cluster: FakeCluster) -> None:
        spec = request("r0", 80, n=3, params=params)
        serving = await start_request(cluster, spec)
        prefill = await _serving_prefill(cluster)
        decodes = [name for name in cluster.workers if name.startswith("decode")]

        def serving_decode() -> str | None:
            # All is computed, so that the first tokens are told, and most pages have not arrived.
            if cluster.workers[prefill].engine.num_computed_tokens < 80:
                return None
            pools = {name: cluster.workers[name].cache.pool.counts() for name in decodes}
            return next((name for name, pool in pools.items() if pool.incoming > 4), None)

        await wait_until(lambda: serving_decode() is not None)
        decode = serving_decode()
        assert decode is not None
        await asyncio.sleep(0.02)
        if victim != "prefill":
            cluster.kill(decode, silently=silently)
        if victim != "decode":
            cluster.kill(prefill, silently=silently)

        history = await serving
        assert_right(history)
        assert min(delta.at for delta in history.deltas) < 0.3, "told before the kill"
        assert history.usage.stats.resumptions == (victim != "prefill")
        assert history.usage.stats.pages_moved > 0

    in_cluster(FakeCluster(shape=replace(SLOW, num_decode=2)), body)


def test_without_any_prefill_worker_left_the_decode_worker_computes() -> None:
    async def body(cluster: FakeCluster) -> None:
        serving = await start_request(cluster, request("r0", 80))
        await _serving_prefill(cluster)

        cluster.kill("prefill-0")
        cluster.kill("prefill-1")

        history = await serving
        assert_right(history)
        assert history.usage.stats.decode_computed_tokens > 0

    in_cluster(FakeCluster(shape=SLOW), body)


@pytest.mark.parametrize("silently", [True, False])
@pytest.mark.parametrize(
    ("params", "n"), [(GREEDY, 1), (SEEDED, 1), (SEEDED, 3)], ids=["greedy", "seeded", "n3"]
)
def test_a_decode_worker_killed_in_mid_stream_loses_and_changes_no_token(
    params: SamplingParams, n: int, silently: bool
) -> None:
    penalized = replace(params, frequency_penalty=0.5, presence_penalty=0.25)

    async def body(cluster: FakeCluster) -> None:
        spec = request("r0", 30, params=penalized, n=n)
        serving = await start_request(cluster, spec)
        names = ["decode-0", "decode-1"]
        await wait_until(lambda: any(cluster.workers[each].engine.num_passes > 4 for each in names))
        victim = max(names, key=lambda each: cluster.workers[each].engine.num_passes)
        assert cluster.workers[victim].executor.num_unread, "no step was in flight"

        cluster.kill(victim, silently=silently)

        history = await serving
        assert_right(history)
        assert len(history.deltas) > n, "it died before it had streamed"
        times = [delta.at for delta in history.deltas]
        assert max(b - a for a, b in itertools.pairwise(times)) < 4.0, "pings tell soon"
        assert history.usage.stats.resumptions == 1
        # 8 pages to each of the two; what the dead one received counts too.
        assert history.usage.stats.pages_moved >= 2 * 8
        assert list(history.usage.decode_workers) == [
            victim,
            next(each for each in names if each != victim),
        ]

    in_cluster(FakeCluster(shape=ClusterShape(num_decode=2)), body)


@pytest.mark.parametrize("local_prefill_max_tokens", [0, 8])
def test_what_a_request_found_is_told_as_found_also_when_it_is_resumed(
    local_prefill_max_tokens: int,
) -> None:
    shape = ClusterShape(num_decode=2, local_prefill_max_tokens=local_prefill_max_tokens)
    prefix = tokens(40, seed=1)

    async def body(cluster: FakeCluster) -> None:
        earlier = await cluster.generate(request("r0", prompt=prefix))
        spec = request("r1", prompt=(*prefix, *tokens(6, seed=2)))
        passes = {name: worker.engine.num_passes for name, worker in cluster.workers.items()}
        serving = await start_request(cluster, spec)

        def serves(name: str) -> bool:
            return cluster.workers[name].engine.num_passes > passes[name] + 4

        await wait_until(lambda: any(map(serves, ("decode-0", "decode-1"))))
        cluster.kill(next(filter(serves, ("decode-0", "decode-1"))))

        history = await serving
        assert_right(earlier, history)
        assert history.usage.stats.resumptions == 1
        assert usage_from(earlier.usage).cached_tokens == 0
        assert usage_from(history.usage).cached_tokens == len(prefix)

    in_cluster(FakeCluster(shape=shape), body)


def test_the_only_decode_worker_killed_comes_back_and_goes_on() -> None:
    async def body(cluster: FakeCluster) -> None:
        serving = await start_request(cluster, request("r0", 30, params=SEEDED, n=2))
        old = cluster.workers["decode-0"]
        await wait_until(lambda: old.engine.num_passes > 4)
        cluster.kill("decode-0")
        await asyncio.sleep(1.0)

        new = await cluster.start_worker("decode-0")

        history = await serving
        assert_right(history)
        assert new.identity.incarnation != old.identity.incarnation
        assert history.usage.stats.resumptions >= 1

    in_cluster(FakeCluster(), body)


def test_a_zombie_that_wakes_up_changes_nothing() -> None:
    """A decode worker stands still for longer than the limit, then goes on as if nothing was."""

    async def body(cluster: FakeCluster) -> None:
        spec = request("r0", 30, params=replace(SEEDED, max_tokens=60))
        serving = await start_request(cluster, spec)
        names = ["decode-0", "decode-1"]
        await wait_until(lambda: any(cluster.workers[each].engine.num_passes > 4 for each in names))
        zombie = max(names, key=lambda each: cluster.workers[each].engine.num_passes)
        process = cluster.process(zombie)

        process.pause()
        # It wakes up while the other one streams.
        other = next(each for each in names if each != zombie)
        await wait_until(lambda: cluster.workers[other].engine.num_passes > 4)
        process.resume()

        history = await serving
        assert_right(history)
        assert history.usage.stats.resumptions == 1

    in_cluster(FakeCluster(shape=ClusterShape(num_decode=2)), body)


@pytest.mark.parametrize(("how", "seconds"), [("pause", 1.0), ("block", 8.0)])
def test_a_worker_that_is_late_is_nobodys_death(how: str, seconds: float) -> None:
    """Its process stands still for a moment, or only its event loop, and for longer."""

    async def body(cluster: FakeCluster) -> None:
        serving = await start_request(cluster, request("r0", 30))
        process = cluster.process("decode-0")
        await wait_until(lambda: cluster.workers["decode-0"].engine.num_passes > 4)
        getattr(process, how)()
        await asyncio.sleep(seconds)
        process.resume()

        history = await serving
        assert_right(history)
        assert history.usage.stats.resumptions == 0

    in_cluster(FakeCluster(), body)


def test_a_decode_worker_that_stays_silent_is_dead_though_its_connection_holds() -> None:
    async def body(cluster: FakeCluster) -> None:
        spec = request("r0", 30, params=replace(SEEDED, max_tokens=60))
        serving = await start_request(cluster, spec)
        names = ["decode-0", "decode-1"]
        await wait_until(lambda: any(cluster.workers[each].engine.num_passes > 4 for each in names))
        silent = max(names, key=lambda each: cluster.workers[each].engine.num_passes)
        cluster.process(silent).block()

        history = await serving
        assert_right(history)
        assert history.usage.stats.resumptions == 1
        cluster.process(silent).resume()

    in_cluster(FakeCluster(shape=ClusterShape(num_decode=2)), body)


PHASES = ["is queued", "is computed", "is moved", "is decoded"]


@pytest.mark.parametrize("phase", PHASES)
def test_a_client_that_leaves_while_its_request(phase: str) -> None:
    """... frees everything on both sides within a second."""
    # Everything takes seconds, so that what is not stopped is still there after one.
    shape = ClusterShape(
        max_step_tokens=33, token_s=0.02, pass_s=0.1, page_transfer_s=0.2, max_running_sequences=4
    )
    params = replace(GREEDY, max_tokens=90)

    async def body(cluster: FakeCluster) -> None:
        other = None
        if phase == "is queued":
            other = await start_request(cluster, request("other", 40))
            await _serving_prefill(cluster)
        leaving = await start_request(cluster, request("r0", 40, n=2, params=params))
        prefill = cluster.workers["prefill-0"].engine
        decode = cluster.workers["decode-0"]
        if phase == "is queued":
            await asyncio.sleep(0.005)
        elif phase == "is computed":
            await wait_until(lambda: 0 < prefill.num_computed_tokens < 40)
        elif phase == "is moved":
            await wait_until(lambda: 0 < decode.cache.pool.counts().live < 10)
        else:
            await wait_until(lambda: decode.engine.num_passes > 4)

        leaving.cancel()
        gone = await leaving

        assert gone.ends == ["CANCELLED"]
        if other is None:
            assert await cluster.wait_quiescent() <= 1.0
        else:
            await asyncio.sleep(1.0)
            assert decode.cache.pool.counts().incoming <= 10, "pages of the other one only"
            assert_right(await other)
        num_passes = decode.engine.num_passes
        await asyncio.sleep(1.0)
        assert decode.engine.num_passes <= num_passes + 1, "it decodes for nobody"

    in_cluster(FakeCluster(shape=shape), body)


@pytest.mark.parametrize("damage", DAMAGES)
def test_pages_whose_copy_went_wrong_are_never_decoded(damage: str) -> None:
    async def body(cluster: FakeCluster) -> None:
        fault = LoopbackFault(kind=FaultKind[damage.upper()], abort_s=0.5)
        cluster.pages.fault_policy = planned([LoopbackFault(), fault])
        history = await cluster.generate(request("r0", 80))

        assert_right(history)
        assert cluster.pages.num_faults == 1
        assert history.usage.stats.prefill_retries == 1

    in_cluster(FakeCluster(shape=replace(SLOW, chunk_pages=4)), body)


def test_a_write_that_comes_late_hits_nobody() -> None:
    """A posted receive lands after its request is gone, when others long for its pages."""
    shape = ClusterShape(decode_pages=24, pass_s=0.05, chunk_pages=8, local_prefill_max_tokens=40)

    async def body(cluster: FakeCluster) -> None:
        late = LoopbackFault(kind=FaultKind.LATE_WRITE, abort_s=1.0)
        cluster.pages.fault_policy = planned([late])
        leaving = await start_request(cluster, request("r0", 80))
        await wait_until(lambda: cluster.pages.num_faults == 1)
        params = replace(GREEDY, max_tokens=50)
        others = [
            await start_request(cluster, request(f"o{index}", 40, params=params))
            for index in range(3)
        ]
        leaving.cancel()

        assert_right(*await asyncio.gather(*others))

    in_cluster(FakeCluster(shape=shape), body)


@pytest.mark.parametrize("how", ["stops", "is cancelled"])
def test_pages_of_a_request_that(how: str) -> None:
    """... are received into only when no step that was launched for it writes there any more."""
    # The second request needs all pages, and has them long before a step of the first one ends.
    shape = ClusterShape(decode_pages=13, page_transfer_s=0.0002)
    second = request("second", 48, params=replace(GREEDY, max_tokens=3))
    first = request("first", 29)
    if how == "stops":
        drawn = expected_choices(first, model=MODEL, max_context_tokens=MAX_CONTEXT_TOKENS)[
            0
        ].tokens
        stop = next(token for index, token in enumerate(drawn) if index == drawn.index(token) > 4)
        first = replace(first, params=replace(GREEDY, stop_token_ids=(stop,)))

    async def body(cluster: FakeCluster) -> None:
        decode = cluster.workers["decode-0"]
        assert_right(await cluster.generate(second))  # the prefill worker now has its pages
        serving = await start_request(cluster, first)
        await wait_until(lambda: cluster.workers["prefill-0"].cache.pool.counts().live > 0)
        decode.executor.slowdown = 20.0
        num_passes = decode.engine.num_passes
        waiting = await start_request(cluster, second)
        await wait_until(lambda: decode.engine.num_passes > num_passes + 3, timeout_s=10.0)
        if how == "is cancelled":
            await asyncio.sleep(0.05)  # two steps are launched
            serving.cancel()

        ended, history = await serving, await waiting
        if how == "stops":
            assert_right(ended)
        assert_right(history)
        assert history.deltas[0].at > ended.ended_at, "there was room for both"

    in_cluster(FakeCluster(shape=shape), body)


def test_a_pool_that_fills_preempts_and_nobody_starves() -> None:
    shape = ClusterShape(decode_pages=30, prefill_pages=40)

    async def body(cluster: FakeCluster) -> None:
        specs = [
            request(f"r{index}", 30 + index, params=replace(SEEDED, max_tokens=40), n=1 + index % 3)
            for index in range(12)
        ]
        histories = await asyncio.gather(*(cluster.generate(spec) for spec in specs))

        assert_right(*histories)
        assert sum(history.usage.stats.preemptions for history in histories) > 0
        started_at = [history.deltas[0].at for history in histories]
        assert max(started_at) < 60.0

    in_cluster(FakeCluster(shape=shape), body)


def test_a_slow_reader_does_not_stall_others() -> None:
    ended_at: dict[bool, float] = {}

    def run(has_slow_reader: bool) -> None:
        async def body(cluster: FakeCluster) -> None:
            slow = None
            if has_slow_reader:
                params = replace(GREEDY, max_tokens=50)
                spec = request("slow", 20, params=params, reads_slowly_s=2.0)
                slow = await start_request(cluster, spec)
            others = [request(f"r{index}", 20) for index in range(4)]
            histories = await asyncio.gather(*(cluster.generate(spec) for spec in others))
            ended_at[has_slow_reader] = max(history.ended_at for history in histories)
            assert_right(*histories)
            if slow is not None:
                history = await slow
                assert_right(history)
                assert len(history.deltas) < 50, "deltas merge while the client does not read"

        in_cluster(FakeCluster(shape=ClusterShape(window_bytes=128)), body)

    run(False)
    run(True)
    # It shares their steps, which take longer by its own tokens, and nothing else.
    assert ended_at[True] < 1.5 * ended_at[False]


def test_a_message_for_another_incarnation_is_refused() -> None:
    async def body(cluster: FakeCluster) -> None:
        old = cluster.workers["decode-0"].identity.incarnation
        cluster.kill("decode-0")
        new = await cluster.start_worker("decode-0")
        stub = worker_pb2_grpc.DecodeServiceStub(cluster.router_channel("decode-0"))
        session = stub.Session(timeout=5.0)
        hello = worker_pb2.SessionHello(incarnation=old, contract_version=CONTRACT_VERSION)
        await session.write(worker_pb2.SessionRequest(hello=hello))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await session.read()
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION

        prefill = cluster.workers["prefill-0"].identity
        channel = cluster.decode_channel("decode-0", "prefill-0")
        prefill_stub = worker_pb2_grpc.PrefillServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await prefill_stub.Connect(
                worker_pb2.ConnectRequest(
                    receiver=worker_to_proto(new.identity),
                    sender_incarnation=prefill.incarnation + 1,
                    connection_id="c",
                    transport="loopback",
                ),
                timeout=5.0,
            )
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        call = prefill_stub.Prefill(timeout=5.0)
        ticket = worker_pb2.TransferTicket(
            transfer_id=b"t" * 16,
            sender_incarnation=prefill.incarnation + 1,
            receiver_incarnation=new.identity.incarnation,
        )
        start = worker_pb2.PrefillStart(
            ticket=ticket,
            token_ids=b"\1\0\0\0",
            choices=[0],
            contract_version=CONTRACT_VERSION,
        )
        await call.write(worker_pb2.PrefillRequest(attempt_id=1, start=start))
        response = await call.read()
        assert response.end.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
        call.cancel()

    in_cluster(FakeCluster(), body)


def test_a_step_that_fails_under_another_is_computed_again_and_so_is_the_other() -> None:
    async def body(cluster: FakeCluster) -> None:
        decode = cluster.workers["decode-0"].executor
        serving = [await start_request(cluster, request(f"r{index}", 20)) for index in range(2)]
        await wait_until(lambda: decode.num_unread == 2 and decode.passes[-2:] == [2, 2])
        num_launched = len(decode.passes)
        decode.num_failing_passes = 1

        histories = await asyncio.gather(*serving)
        assert_right(*histories)
        # A probe, the requests of the one one by one, and those of the other together.
        assert decode.passes[num_launched : num_launched + 4] == [1, 1, 1, 2]
        assert sum(history.usage.stats.resumptions for history in histories) == 0

    in_cluster(FakeCluster(), body)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_worker_whose_engine_always_fails_costs_no_request_of_many(name: str) -> None:
    """It fails however often it starts anew, and is the least loaded of its pool each time."""

    async def body(cluster: FakeCluster) -> None:
        cluster.broken.add(name)
        cluster.workers[name].executor.is_broken = True
        specs = [request(f"r{index}", 20, arrives_at=0.1 * index) for index in range(40)]
        histories = await asyncio.gather(*(cluster.generate(spec) for spec in specs))

        assert_right(*histories)
        assert len(cluster.lost_engines) > 2, "it came back again and again"
        assert set(cluster.lost_engines) == {name}
        assert max(history.usage.stats.resumptions for history in histories) <= 1

    in_cluster(FakeCluster(shape=ClusterShape(num_prefill=2, num_decode=2)), body)


def test_a_request_is_given_up_after_its_resumptions() -> None:
    """A bounded number of lost attempts; then one clear end, and right tokens up to there."""

    async def body(cluster: FakeCluster) -> None:
        params = replace(GREEDY, max_tokens=60)
        serving = await start_request(cluster, request("r0", 20, params=params))
        for _ in range(4):
            worker = cluster.workers["decode-0"]
            await wait_until(lambda worker=worker: worker.engine.num_passes > 2)
            cluster.kill("decode-0")
            await cluster.start_worker("decode-0")

        history = await serving
        expected = expected_choices(
            history.spec, model=MODEL, max_context_tokens=MAX_CONTEXT_TOKENS
        )
        assert check_history(history, expected, allowed_ends=("ABORTED", "UNAVAILABLE")) == []

    in_cluster(FakeCluster(), body)
