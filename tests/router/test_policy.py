import random
from collections import Counter
from collections.abc import Mapping

import pytest

from router.policy import PolicyWeights, RouteDecision, RouteQuery, WorkerLoad, route

WEIGHTS = PolicyWeights(
    prefill_tokens_per_s=8000.0,
    new_work_weight=2.0,
    decode_load_s=0.05,
    page_pressure_s=0.5,
    max_prefill_candidates=3,
)
PAGE = 16


def decide(
    decode: list[WorkerLoad],
    prefill: list[WorkerLoad] | None = None,
    *,
    overlaps: Mapping[str, int] | None = None,
    num_tokens: int = 1600,
    affinity: bytes = b"a",
) -> RouteDecision:
    return route(
        RouteQuery(num_tokens=num_tokens, page_size=PAGE, affinity=affinity),
        decode_workers=decode,
        prefill_workers=prefill or [],
        overlaps=overlaps or {},
        weights=WEIGHTS,
    )


def idle(*worker_ids: str) -> list[WorkerLoad]:
    return [WorkerLoad(worker_id=worker_id) for worker_id in worker_ids]


@pytest.mark.parametrize(
    ("name", "workers", "overlaps", "expected"),
    [
        ("the one that holds more", idle("d0", "d1"), {"d1": 50}, "d1"),
        (
            "the less loaded, all else equal",
            [WorkerLoad(worker_id="d0", num_requests=4), WorkerLoad(worker_id="d1")],
            {},
            "d1",
        ),
        (
            "overlap worth 100 ms beats one request more",
            [WorkerLoad(worker_id="d0", num_requests=1), WorkerLoad(worker_id="d1")],
            {"d0": 50},
            "d0",
        ),
        (
            "but not five more",
            [WorkerLoad(worker_id="d0", num_requests=5), WorkerLoad(worker_id="d1")],
            {"d0": 50},
            "d1",
        ),
        (
            "a full pool counts",
            [WorkerLoad(worker_id="d0", used_page_share=1.0), WorkerLoad(worker_id="d1")],
            {"d0": 10},
            "d1",
        ),
        (
            "queued tokens count",
            [WorkerLoad(worker_id="d0", queued_tokens=8000), WorkerLoad(worker_id="d1")],
            {"d0": 20},
            "d1",
        ),
    ],
)
def test_the_decode_worker_is_the_cheapest(
    name: str, workers: list[WorkerLoad], overlaps: Mapping[str, int], expected: str
) -> None:
    assert decide(workers, overlaps=overlaps).decode_worker == expected, name


def test_prefill_candidates_come_cheapest_first_and_are_bounded() -> None:
    prefill = [
        WorkerLoad(worker_id="p0", queued_tokens=5000),
        WorkerLoad(worker_id="p1"),
        WorkerLoad(worker_id="p2", queued_tokens=1000),
        WorkerLoad(worker_id="p3", queued_tokens=3000),
    ]

    decision = decide(idle("d0"), prefill, overlaps={"p3": 90, "p1": 1})

    assert decision.prefill_candidates == ("p1", "p3", "p2")
    assert decision.prefill_overlaps == (16, 1440, 0)


def test_without_prefill_workers_there_are_no_candidates() -> None:
    assert decide(idle("d0")).prefill_candidates == ()


def test_an_overlap_never_covers_the_last_token() -> None:
    assert decide(idle("d0"), overlaps={"d0": 100}).decode_overlap == 1599


def test_a_decision_depends_on_nothing_but_its_inputs() -> None:
    rng = random.Random(3)
    for _ in range(50):
        workers = [WorkerLoad(worker_id=f"d{i}", num_requests=rng.randrange(3)) for i in range(6)]
        overlaps = {f"d{i}": rng.randrange(5) for i in range(6)}
        shuffled = rng.sample(workers, len(workers))

        assert decide(workers, overlaps=overlaps) == decide(shuffled, overlaps=overlaps)


def place(
    num_requests: int, num_workers: int, *, shared_pages: int, unique_pages: int
) -> Counter[str]:
    """Send requests at once; all share a beginning, no events come back in between."""
    held: Counter[str] = Counter()  # worker |-> pages of the shared beginning
    load: Counter[str] = Counter()
    for _ in range(num_requests):
        workers = [
            WorkerLoad(worker_id=f"d{i}", num_requests=load[f"d{i}"]) for i in range(num_workers)
        ]
        tokens = (shared_pages + unique_pages) * PAGE
        chosen = decide(workers, overlaps=held, num_tokens=tokens).decode_worker
        held[chosen] = shared_pages
        load[chosen] += 1
    return load


def test_a_shared_first_page_does_not_send_everything_to_one_worker() -> None:
    load = place(80, 8, shared_pages=1, unique_pages=100)

    assert max(load.values()) <= 11, load


def test_even_a_long_shared_prefix_spills_over_before_one_worker_drowns() -> None:
    load = place(80, 4, shared_pages=200, unique_pages=4)  # 0.4 s = 8 requests of difference

    assert len(load) == 4
    assert max(load.values()) - min(load.values()) <= 9, load


def test_requests_with_one_prefix_are_grouped() -> None:
    held: dict[str, Counter[str]] = {}
    load: Counter[str] = Counter()
    used: dict[str, set[str]] = {}
    for index in range(24):  # six groups of four, interleaved, over six workers
        group = f"g{index % 6}"
        workers = [WorkerLoad(worker_id=f"d{i}", num_requests=load[f"d{i}"]) for i in range(6)]
        overlaps = held.setdefault(group, Counter())
        chosen = decide(
            workers, overlaps=overlaps, num_tokens=110 * PAGE, affinity=group.encode()
        ).decode_worker
        overlaps[chosen] = 100
        load[chosen] += 1
        used.setdefault(group, set()).add(chosen)

    assert all(len(workers) == 1 for workers in used.values()), used
    assert max(load.values()) <= 8, load


def test_cold_prompts_on_an_idle_cluster_spread() -> None:
    chosen = Counter(
        decide(idle("d0", "d1", "d2", "d3"), affinity=bytes([i])).decode_worker for i in range(200)
    )

    assert min(chosen.values()) >= 30, chosen


def test_a_prefix_that_is_being_computed_is_waited_for_rather_than_computed_twice() -> None:
    prefill = [WorkerLoad(worker_id="p0", queued_tokens=1600), WorkerLoad(worker_id="p1")]

    decision = decide(idle("d0"), prefill, overlaps={"p0": 98})

    assert decision.prefill_candidates == ("p0", "p1")
