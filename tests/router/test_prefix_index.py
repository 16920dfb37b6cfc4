import random
import tracemalloc
from collections.abc import Iterable

import pytest

from router.prefix_index import CacheBatch, PrefixIndex

CHAINS = [[bytes([chain, page]) * 8 for page in range(12)] for chain in range(5)]
WORKERS = ("decode-0", "decode-1", "prefill-0")


def batch(
    sequence: int,
    *,
    stored: Iterable[bytes] = (),
    removed: Iterable[bytes] = (),
    incarnation: int = 1,
    is_snapshot: bool = False,
) -> CacheBatch:
    return CacheBatch(
        incarnation=incarnation,
        sequence=sequence,
        is_snapshot=is_snapshot,
        stored=b"".join(stored),
        removed=b"".join(removed),
    )


def depth(pages: set[bytes], chain: list[bytes]) -> int:
    return next((i for i, page in enumerate(chain) if page not in pages), len(chain))


class NaiveWorker:
    """A worker's cache and event log, as plain as can be."""

    def __init__(self) -> None:
        self.incarnation = 1
        self.sequence = 0
        self.pages: set[bytes] = set()

    def change(self, rng: random.Random) -> CacheBatch:
        chain = rng.choice(CHAINS)
        have = depth(self.pages, chain)
        target = rng.randrange(len(chain) + 1)
        stored, removed = chain[have:target], chain[target:have]
        self.pages.update(stored)
        self.pages.difference_update(removed)
        self.sequence += 1
        return batch(self.sequence, stored=stored, removed=removed, incarnation=self.incarnation)

    def snapshot(self) -> CacheBatch:
        return batch(
            self.sequence, stored=self.pages, incarnation=self.incarnation, is_snapshot=True
        )


@pytest.mark.parametrize("seed", range(40))
def test_the_index_equals_a_naive_one_over_gaps_repetitions_and_restarts(seed: int) -> None:
    rng = random.Random(seed)
    index = PrefixIndex(max_pages=1000)
    workers = {worker_id: NaiveWorker() for worker_id in WORKERS}
    for worker_id, worker in workers.items():
        assert index.apply(worker_id, worker.snapshot())

    for _ in range(300):
        worker_id = rng.choice(WORKERS)
        worker = workers[worker_id]
        change = worker.change(rng)
        fault = rng.random()
        if fault < 0.1:  # lost: the next one shows a gap
            change = worker.change(rng)
            before = index.position(worker_id)
            assert not index.apply(worker_id, change)
            assert index.position(worker_id) == before
            assert index.apply(worker_id, worker.snapshot())
        elif fault < 0.2:  # restarted: events of the new incarnation need a snapshot first
            workers[worker_id] = worker = NaiveWorker()
            worker.incarnation = rng.randrange(2, 2**63)
            assert not index.apply(worker_id, worker.change(rng))
            assert index.apply(worker_id, worker.snapshot())
        elif fault < 0.25:  # died and came back
            index.remove_worker(worker_id)
            assert worker_id not in index.match(CHAINS[0], 0.0)
            assert index.apply(worker_id, worker.snapshot())
        else:
            assert index.apply(worker_id, change)
            if fault < 0.4:
                assert index.apply(worker_id, change), "a repetition changes nothing"

        index.check_integrity()
        for chain in CHAINS:
            depths = {name: depth(each.pages, chain) for name, each in workers.items()}
            assert index.match(chain, 0.0) == {n: d for n, d in depths.items() if d}


def test_own_decisions_count_until_they_expire() -> None:
    index = PrefixIndex(max_pages=100)
    index.apply("decode-0", batch(1, stored=CHAINS[0][:2], is_snapshot=True))

    index.expect("decode-0", CHAINS[0][:5], expires_at=5.0)
    index.expect("decode-1", CHAINS[0][:3], expires_at=8.0)

    assert index.match(CHAINS[0], 4.9) == {"decode-0": 5, "decode-1": 3}
    assert index.match(CHAINS[0], 5.0) == {"decode-0": 2, "decode-1": 3}
    assert index.match(CHAINS[0], 8.0) == {"decode-0": 2}
    index.check_integrity()


def test_a_renewed_expectation_lives_as_long_as_the_newest() -> None:
    index = PrefixIndex(max_pages=100)
    index.expect("decode-0", CHAINS[0][:3], expires_at=5.0)
    index.expect("decode-0", CHAINS[0][:2], expires_at=9.0)

    assert index.match(CHAINS[0], 6.0) == {"decode-0": 2}
    assert index.match(CHAINS[0], 9.0) == {}
    assert not index._expected


@pytest.mark.parametrize("seed", range(40))
def test_expectations_equal_naive_ones_and_take_no_more_room_than_they_need(seed: int) -> None:
    rng = random.Random(seed)
    index = PrefixIndex(max_pages=1000)
    naive: dict[tuple[str, bytes], float] = {}  # worker, page hash |-> when it expires
    now = 0.0

    for _ in range(400):
        now += rng.choice([0.0, 0.0, 0.5, 3.0])
        worker_id, chain = rng.choice(WORKERS), rng.choice(CHAINS)
        pages, expires_at = chain[: rng.randrange(13)], now + rng.choice([0.0, 2.0, 5.0])
        if rng.random() < 0.05:
            index.remove_worker(worker_id)
            naive = {key: at for key, at in naive.items() if key[0] != worker_id}
        else:
            index.expect(worker_id, pages, expires_at)
            for page in pages:
                key = worker_id, page
                naive[key] = max(expires_at, naive.get(key, 0.0))

        index.check_integrity()
        for asked in CHAINS:
            known = {name: {page for each, page in naive if each == name} for name in WORKERS}
            live = {
                name: {page for page in pages if naive[name, page] > now}
                for name, pages in known.items()
            }
            depths = {name: depth(live[name], asked) for name in WORKERS}
            assert index.match(asked, now) == {n: d for n, d in depths.items() if d}
        naive = {key: at for key, at in naive.items() if at > now}
        index.check_integrity()


def test_a_prompt_that_is_repeated_before_its_pages_expire_takes_no_more_memory() -> None:
    def prompt() -> list[bytes]:  # each request computes its own hashes
        return [page.to_bytes(16, "big") for page in range(2000)]

    index = PrefixIndex(max_pages=10_000)
    tracemalloc.start()
    try:
        index.expect("decode-0", prompt(), expires_at=5.0)
        once, _ = tracemalloc.get_traced_memory()
        for number in range(50):
            now = number * 0.01
            index.match(prompt(), now)
            index.expect("decode-0", prompt(), expires_at=now + 5.0)
        often, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert often < 1.5 * once


def test_memory_is_bounded_and_beginnings_stay() -> None:
    index = PrefixIndex(max_pages=20)
    pages = [page for chain in CHAINS for page in chain]

    index.apply("decode-0", batch(1, stored=pages, is_snapshot=True))
    for chain in CHAINS:
        index.expect("decode-1", chain, expires_at=5.0)

    assert index.num_pages == 20
    index.check_integrity()
    assert index.match(CHAINS[0], 0.0) == {"decode-0": 12, "decode-1": 12}


def test_removal_of_pages_that_did_not_fit_is_harmless() -> None:
    index = PrefixIndex(max_pages=3)
    index.apply("decode-0", batch(1, stored=CHAINS[0], is_snapshot=True))

    assert index.apply("decode-0", batch(2, removed=CHAINS[0][::-1]))

    assert index.num_pages == 0
    index.check_integrity()


def test_a_removed_worker_leaves_nothing_and_its_bit_is_not_inherited() -> None:
    index = PrefixIndex(max_pages=100)
    index.apply("decode-0", batch(1, stored=CHAINS[0], is_snapshot=True))
    index.expect("decode-0", CHAINS[1], expires_at=50.0)
    index.expect("decode-1", CHAINS[1][:1], expires_at=50.0)

    index.remove_worker("decode-0")
    index.expect("decode-2", CHAINS[2][:1], expires_at=50.0)  # takes the free bit

    assert index.num_pages == 0
    assert index.match(CHAINS[0], 0.0) == {}
    assert index.match(CHAINS[1], 0.0) == {"decode-1": 1}
    assert index.match(CHAINS[2], 60.0) == {}
    index.check_integrity()


def test_holders_are_those_that_have_told_so() -> None:
    index = PrefixIndex(max_pages=100)
    first, second = CHAINS[0][:2]
    index.apply("decode-1", batch(0, stored=[first, second], is_snapshot=True))
    index.apply("decode-0", batch(0, stored=[first], is_snapshot=True))
    index.expect("prefill-0", [first], expires_at=10.0)

    assert index.holders(first) == ["decode-0", "decode-1"]
    assert index.holders(second) == ["decode-1"]
    assert index.holders(CHAINS[1][0]) == []
    index.forget("decode-1")
    assert index.holders(first) == ["decode-0"]
