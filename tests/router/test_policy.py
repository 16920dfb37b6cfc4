import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.config import RouterConfig
from router.expected_wait import DecodeQueue
from router.policy import PolicyWeights, RouteDecision, RouteQuery, WorkerLoad, route

CONFIG = RouterConfig()
WEIGHTS = PolicyWeights(
    prefill_tokens_per_s=8000.0,
    new_work_weight=2.0,
    decode_load_s=0.05,
    page_pressure_s=0.5,
    local_prefill_max_tokens=64,
    max_prefill_candidates=3,
)
PAGE = 16
TOKEN_BYTES = 131_072  # of Llama-3-8B
SETTINGS = settings(derandomize=True, database=None, max_examples=200)
NVLINK_S, NETWORK_S = (
    TOKEN_BYTES / rate for rate in (CONFIG.gpu_bytes_per_s, CONFIG.tcp_bytes_per_s)
)


def decide(
    decode: list[WorkerLoad],
    prefill: list[WorkerLoad] | None = None,
    *,
    overlaps: Mapping[str, int] | None = None,
    num_tokens: int = 1600,
    num_sequences: int = 1,
    affinity: bytes = b"a",
    device: str = "",
) -> RouteDecision:
    return route(
        RouteQuery(
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            max_new_tokens=100,
            page_size=PAGE,
            affinity=affinity,
            device=device,
        ),
        decode_workers=decode,
        prefill_workers=prefill or [],
        overlaps=overlaps or {},
        weights=WEIGHTS,
    )


def idle(*worker_ids: str) -> list[WorkerLoad]:
    return [load(worker_id) for worker_id in worker_ids]


def load(worker_id: str, num_requests: int = 0, **fields: object) -> WorkerLoad:
    return WorkerLoad(worker_id=worker_id, num_requests=num_requests, **fields)


def pool(used: int, **fields: int | float) -> DecodeQueue:
    return DecodeQueue(num_pages=1000, num_free_pages=1000 - used, holding_s=5.0, **fields)


@pytest.mark.parametrize(
    ("name", "workers", "overlaps", "expected"),
    [
        ("the one that holds more", idle("d0", "d1"), {"d1": 50}, "d1"),
        ("the less loaded, all else equal", [load("d0", 4), load("d1")], {}, "d1"),
        ("800 tokens to compute cost more than one request", [load("d0", 1), load("d1")],
         {"d0": 50}, "d0"),
        ("but not more than five", [load("d0", 5), load("d1")], {"d0": 50}, "d1"),
        ("a full pool counts", [load("d0", queue=pool(900)), load("d1", queue=pool(0))],
         {"d0": 10}, "d1"),
        ("a wait for pages counts",
         [load("d0", 5, queue=pool(950, num_holding=5)), load("d1", 6, queue=pool(850))], {}, "d1"),
        ("a wait for a place counts",
         [load("d0", 4, queue=pool(0, max_sequences=4, num_sequences=4)),
          load("d1", 5, queue=pool(0, max_sequences=8, num_sequences=5))], {}, "d1"),
        ("queued tokens count", [load("d0", queued_tokens=8000), load("d1")], {"d0": 20}, "d1"),
    ],
)  # fmt: skip
def test_without_prefill_workers_the_decode_worker_is_the_cheapest(
    name: str, workers: list[WorkerLoad], overlaps: Mapping[str, int], expected: str
) -> None:
    assert decide(workers, overlaps=overlaps).decode_worker == expected, name


@pytest.mark.parametrize(
    ("name", "device", "workers", "expected"),
    [
        ("a new request goes by load", "", [load("d0", 9, device="a"), load("d1", device="b")],
         "d1"),
        ("one of unknown type, too", "", [load("d0", 9), load("d1", device="b")], "d1"),
        ("one that has tokens stays on its type", "a",
         [load("d0", 200, device="a"), load("d1", device="b")], "d0"),
        ("by load among several of it", "a",
         [load("d0", 9, device="a"), load("d1", device="b"), load("d2", 3, device="a")], "d2"),
        ("a short wait is accepted", "a",
         [load("d0", device="a", queue=pool(0, max_sequences=4, num_sequences=4)),
          load("d1", device="b")], "d0"),
        ("a long one is not", "a",
         [load("d0", device="a", queue=pool(0, max_sequences=4, num_sequences=8)),
          load("d1", device="b")], "d1"),
        ("if all wait long, the shortest wait counts", "a",
         [load("d0", device="a", queue=pool(0, max_sequences=4, num_sequences=8)),
          load("d1", device="b", queue=pool(0, max_sequences=4, num_sequences=12))], "d0"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("has_prefill", [True, False])
def test_a_request_that_has_tokens_stays_on_the_type_of_device_that_drew_them(
    name: str, device: str, workers: list[WorkerLoad], expected: str, has_prefill: bool
) -> None:
    decision = decide(workers, idle("p0") if has_prefill else [], device=device)

    assert decision.decode_worker == expected, name


@pytest.mark.parametrize("device", ["", "a"])
def test_where_all_have_one_type_of_device_it_decides_nothing(device: str) -> None:
    busy = load("d0", device="a", queue=pool(0, max_sequences=4, num_sequences=8))
    overlaps = {"d0": 160_000 // PAGE}  # for which the other one would compute longer than it waits

    decision = decide(
        [busy, load("d1", device="a")], overlaps=overlaps, num_tokens=160_000, device=device
    )

    assert decision.decode_worker == "d0"


def requests_until_b(prefix_len: int, receive_s_per_token: float, held_by_prefill: bool) -> int:
    """Return how many requests worker A, which holds a prefix, has before idle B is chosen."""
    num_pages = prefix_len // PAGE
    overlaps = {"a": num_pages} | ({"p": num_pages} if held_by_prefill else {})
    for num_requests in range(1000):
        workers = [
            load("a", num_requests, receive_s_per_token=receive_s_per_token),
            load("b", receive_s_per_token=receive_s_per_token),
        ]
        decision = decide(workers, idle("p"), overlaps=overlaps, num_tokens=prefix_len + 200)
        if decision.decode_worker == "b":
            return num_requests
    raise AssertionError("never")


@pytest.mark.parametrize(
    ("name", "prefix_len", "receive_s_per_token", "expected"),
    [
        ("8k over NVLink: 7 ms", 8192, NVLINK_S, 1),
        ("32k over NVLink: 29 ms", 32_768, NVLINK_S, 1),
        ("8k over a network: 1.1 s", 8192, NETWORK_S, 22),
        ("32k over a network: 4.3 s", 32_768, NETWORK_S, 86),
    ],
)
@pytest.mark.parametrize("held_by_prefill", [True, False])
def test_a_prefix_on_another_decode_worker_is_worth_its_transfer(
    name: str,
    prefix_len: int,
    receive_s_per_token: float,
    held_by_prefill: bool,
    expected: int,
) -> None:
    # Where no prefill worker holds it, one computes it for either of the two.
    assert requests_until_b(prefix_len, receive_s_per_token, held_by_prefill) == expected, name


def test_a_prefix_that_spares_all_prefill_is_worth_its_computation() -> None:
    workers = [load("a", 100), load("b")]
    prompt = {"num_tokens": 32_768 + 64, "overlaps": {"a": 2048}}

    # Two times four seconds of a prefill worker, against 100 x 0.05 s.
    assert decide(workers, idle("p"), **prompt).decode_worker == "a"
    prompt["overlaps"] = {"a": 2048, "p": 2048}
    assert decide(workers, idle("p"), **prompt).decode_worker == "b", "the prefill worker has it"


@pytest.mark.parametrize(
    ("name", "prefill", "overlaps", "computing", "num_tokens"),
    [
        ("the prefill worker", ["p"], {}, "p", 1600),
        ("what its own cache lacks", ["p"], {"d": 90, "p": 10}, "p", 1440),
        ("a short rest is computed where it is decoded", ["p"], {"d": 96, "p": 100}, "d", 64),
        ("one token more is not", ["p"], {"d": 95, "p": 100}, "p", 1),
        ("without prefill workers", [], {"d": 50}, "d", 800),
    ],
)
def test_who_computes_and_how_much(
    name: str, prefill: list[str], overlaps: dict[str, int], computing: str, num_tokens: int
) -> None:
    decision = decide(idle("d"), idle(*prefill), overlaps=overlaps)

    assert (decision.computing_worker, decision.num_computed_tokens) == (computing, num_tokens)
    assert decision.num_received_pages == -(-(1600 - min(16 * overlaps.get("d", 0), 1599)) // 16)


def test_prefill_candidates_come_cheapest_first_and_are_bounded() -> None:
    prefill = [
        load("p0", queued_tokens=5000),
        load("p1"),
        load("p2", queued_tokens=1000),
        load("p3", queued_tokens=3000),
    ]

    decision = decide(idle("d0"), prefill, overlaps={"p3": 90, "p1": 1})

    assert decision.prefill_candidates == ("p1", "p3", "p2")


def test_without_prefill_workers_there_are_no_candidates() -> None:
    assert decide(idle("d0")).prefill_candidates == ()


def test_an_overlap_never_covers_the_last_token() -> None:
    assert decide(idle("d0"), overlaps={"d0": 100}).num_computed_tokens == 1


@pytest.mark.parametrize(
    ("name", "decode", "prefill", "expected"),
    [
        ("nothing is known", [load("d")], [load("p")], 0.0),
        ("the shortest wait of all",
         [load("d", queue=pool(1000, num_holding=5)), load("e", queue=pool(950, num_holding=5))],
         [], 0.55),
        ("the least busy prefill worker", [load("d")],
         [load("p", prefill_wait_s=3.0), load("q", prefill_wait_s=2.0)], 2.0),
        ("the longer of the two", [load("d", queue=pool(1000, num_holding=5))],
         [load("p", prefill_wait_s=2.0)], 2.0),
        ("its own queue, without prefill workers", [load("d", prefill_wait_s=4.0)], [], 4.0),
    ],
)  # fmt: skip
def test_the_least_wait_is_that_of_the_best_worker(
    name: str, decode: list[WorkerLoad], prefill: list[WorkerLoad], expected: float
) -> None:
    assert decide(decode, prefill).least_wait_s == pytest.approx(expected), name


def test_a_prompt_that_is_cached_does_not_wait_for_prefill_workers() -> None:
    prefill = [load("p", prefill_wait_s=60.0)]

    assert decide([load("d")], prefill, overlaps={"d": 100}).least_wait_s == 0.0


def test_a_decision_depends_on_nothing_but_its_inputs() -> None:
    rng = random.Random(3)
    for _ in range(50):
        workers = [load(f"d{i}", rng.randrange(3)) for i in range(6)]
        overlaps = {f"d{i}": rng.randrange(5) for i in range(6)}
        shuffled = rng.sample(workers, len(workers))

        assert decide(workers, overlaps=overlaps) == decide(shuffled, overlaps=overlaps)


loads = st.builds(
    load,
    st.just("d"),
    st.integers(0, 50),
    queued_tokens=st.integers(0, 10_000),
    receive_s_per_token=st.sampled_from([0.0, NVLINK_S, NETWORK_S]),
    queue=st.builds(
        DecodeQueue,
        num_pages=st.sampled_from([0, 100]),
        num_free_pages=st.integers(0, 100),
        num_awaited_pages=st.integers(0, 300),
        num_holding=st.integers(0, 20),
        num_waiting=st.integers(0, 20),
        max_sequences=st.sampled_from([0, 8]),
        num_sequences=st.integers(0, 20),
        holding_s=st.floats(0.1, 60),
    ),
)
HEAVIER = {
    "num_requests": 1,
    "queued_tokens": 100,
    "receive_s_per_token": 1e-6,
}
QUEUE_HEAVIER = {
    "num_free_pages": -1,
    "num_awaited_pages": 1,
    "num_waiting": 1,
    "num_sequences": 1,
    "holding_s": 1.0,
}


def chosen(
    mine: WorkerLoad, other: WorkerLoad, overlaps: dict[str, int], has_prefill: bool
) -> bool:
    """Return whether worker `d` is chosen and not the other one."""
    workers = [mine, replace(other, worker_id="e")]
    decision = decide(workers, idle("p") if has_prefill else [], overlaps=overlaps)
    return decision.decode_worker == "d"


@SETTINGS
@given(loads, loads, st.integers(0, 100), st.integers(0, 100), st.integers(0, 100), st.booleans())
def test_more_overlap_never_makes_a_worker_less_attractive(
    mine: WorkerLoad, other: WorkerLoad, own: int, others: int, prefill: int, has_prefill: bool
) -> None:
    overlaps = {"d": own, "e": others, "p": prefill}

    if chosen(mine, other, overlaps, has_prefill):
        for more in (own + 1, 96, 99, 100):
            assert chosen(mine, other, overlaps | {"d": max(own, more)}, has_prefill)


@SETTINGS
@given(loads, loads, st.integers(0, 100), st.integers(0, 100), st.booleans())
def test_more_load_never_makes_a_worker_more_attractive(
    mine: WorkerLoad, other: WorkerLoad, own: int, others: int, has_prefill: bool
) -> None:
    overlaps = {"d": own, "e": others, "p": 50}

    if not chosen(mine, other, overlaps, has_prefill):
        heavier = [replace(mine, **{n: getattr(mine, n) + more}) for n, more in HEAVIER.items()]
        for name, more in QUEUE_HEAVIER.items():
            queue = replace(mine.queue, **{name: getattr(mine.queue, name) + more})
            heavier.append(replace(mine, queue=queue))
        assert not any(chosen(each, other, overlaps, has_prefill) for each in heavier)


@SETTINGS
@given(st.lists(loads, min_size=1, max_size=4), st.integers(1, 5000), st.integers(1, 64))
def test_a_larger_request_never_waits_less(
    workers: list[WorkerLoad], num_tokens: int, num_sequences: int
) -> None:
    def wait_s(num_tokens: int, num_sequences: int) -> float:
        return decide(
            workers, idle("p"), num_tokens=num_tokens, num_sequences=num_sequences
        ).least_wait_s

    wait = wait_s(num_tokens, num_sequences)
    assert wait >= 0
    assert wait_s(num_tokens + PAGE, num_sequences) >= wait
    assert wait_s(num_tokens, num_sequences + 1) >= wait


def place(
    num_requests: int, num_workers: int, *, shared_pages: int, unique_pages: int
) -> Counter[str]:
    """Send requests at once; all share a beginning, no events come back in between."""
    held: Counter[str] = Counter()  # worker |-> pages of the shared beginning
    load_of: Counter[str] = Counter()
    for _ in range(num_requests):
        workers = [load(f"d{i}", load_of[f"d{i}"]) for i in range(num_workers)]
        tokens = (shared_pages + unique_pages) * PAGE
        chosen = decide(workers, overlaps=held, num_tokens=tokens).decode_worker
        held[chosen] = shared_pages
        load_of[chosen] += 1
    return load_of


def test_a_shared_first_page_does_not_send_everything_to_one_worker() -> None:
    spread = place(80, 8, shared_pages=1, unique_pages=100)

    assert max(spread.values()) <= 11, spread


def test_even_a_long_shared_prefix_spills_over_before_one_worker_drowns() -> None:
    spread = place(80, 4, shared_pages=200, unique_pages=4)  # 0.4 s = 8 requests of difference

    assert len(spread) == 4
    assert max(spread.values()) - min(spread.values()) <= 9, spread


@pytest.mark.parametrize("has_prefill", [True, False])
def test_requests_with_one_prefix_are_grouped(has_prefill: bool) -> None:
    held: dict[str, Counter[str]] = {}
    load_of: Counter[str] = Counter()
    used: dict[str, set[str]] = {}
    for index in range(24):  # six groups of four, interleaved, over six workers
        group = f"g{index % 6}"
        workers = [load(f"d{i}", load_of[f"d{i}"], receive_s_per_token=NVLINK_S) for i in range(6)]
        overlaps = held.setdefault(group, Counter())
        chosen = decide(
            workers,
            idle("p") if has_prefill else [],
            overlaps=overlaps,
            num_tokens=110 * PAGE,
            affinity=group.encode(),
        ).decode_worker
        overlaps[chosen] = 100
        load_of[chosen] += 1
        used.setdefault(group, set()).add(chosen)

    assert max(load_of.values()) <= 8, load_of
    assert all(len(workers) == 1 for workers in used.values()), used


def test_cold_prompts_on_an_idle_cluster_spread() -> None:
    chosen = Counter(
        decide(idle("d0", "d1", "d2", "d3"), affinity=bytes([i])).decode_worker for i in range(200)
    )

    assert min(chosen.values()) >= 30, chosen


def test_a_prefix_that_is_being_computed_is_waited_for_rather_than_computed_twice() -> None:
    prefill = [load("p0", queued_tokens=1600), load("p1")]

    decision = decide(idle("d0"), prefill, overlaps={"p0": 98})

    assert decision.prefill_candidates == ("p0", "p1")
