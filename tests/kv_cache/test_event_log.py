import random

from kv_cache.errors import OutOfPages
from kv_cache.event_log import CacheEvent, EventLog, Removed, Stored
from kv_cache.prefix_cache import PrefixCache, SequencePages


def stored(*names: int) -> list[CacheEvent]:
    return [Stored(bytes([name]) * 16) for name in names]


def removed(*names: int) -> list[CacheEvent]:
    return [Removed(bytes([name]) * 16) for name in names]


class Follower:
    """Applies batches as a router does."""

    def __init__(self) -> None:
        self.incarnation = 0
        self.sequence = 0
        self.hashes: set[bytes] = set()
        self.num_snapshots = 0

    def follow(self, log: EventLog) -> None:
        for batch in log.batches_after(self.incarnation, self.sequence):
            if batch.is_snapshot:
                self.hashes.clear()
                self.num_snapshots += 1
            else:
                assert batch.incarnation == self.incarnation
                assert batch.sequence == self.sequence + 1
                assert not set(batch.stored) & set(batch.removed)
                assert self.hashes >= set(batch.removed)
                assert not self.hashes & set(batch.stored)
            self.hashes -= set(batch.removed)
            self.hashes |= set(batch.stored)
            self.incarnation, self.sequence = batch.incarnation, batch.sequence


def test_sequence_numbers_are_contiguous() -> None:
    log = EventLog(7)
    for name in range(5):
        batch = log.append(stored(name))
        assert batch is not None
        assert batch.sequence == name + 1
    assert [batch.sequence for batch in log.batches_after(7, 2)] == [3, 4, 5]
    assert log.batches_after(7, 5) == []


def test_a_batch_holds_the_net_change() -> None:
    log = EventLog(7)
    log.append(stored(1))
    assert log.append([]) is None
    assert log.append([*stored(2), *removed(2)]) is None
    assert log.append([*removed(1), *stored(1)]) is None
    batch = log.append([*removed(1), *stored(1), *removed(1), *stored(3)])
    assert batch is not None
    assert (batch.sequence, batch.stored, batch.removed) == (2, (b"\3" * 16,), (b"\1" * 16,))


def test_another_incarnation_gets_a_snapshot() -> None:
    log = EventLog(7)
    log.append(stored(1, 2))
    log.append(removed(1))
    for incarnation, sequence in ((0, 0), (6, 1), (6, 2), (7, 3)):
        (batch,) = log.batches_after(incarnation, sequence)
        assert batch.is_snapshot
        assert (batch.incarnation, batch.sequence) == (7, 2)
        assert batch.stored == (b"\2" * 16,)


def test_a_new_subscriber_of_an_empty_log_gets_an_empty_snapshot() -> None:
    (batch,) = EventLog(7).batches_after(0, 0)
    assert (batch.is_snapshot, batch.sequence, batch.stored) == (True, 0, ())
    assert EventLog(7).batches_after(7, 0) == []


def test_a_gap_that_is_too_old_gets_a_snapshot() -> None:
    log = EventLog(7, max_hashes=3)
    for name in range(6):
        log.append(stored(name))
    assert [batch.sequence for batch in log.batches_after(7, 3)] == [4, 5, 6]
    (batch,) = log.batches_after(7, 2)
    assert batch.is_snapshot
    assert len(batch.stored) == 6


def test_an_update_looks_at_no_batch_that_the_subscriber_has() -> None:
    """The log may keep tens of thousands, and each change is an update for each router."""
    log = EventLog(7)
    for name in range(5):
        log.append(stored(name))
    log._batches[1] = log._batches[2] = None  # type: ignore[call-overload]

    assert [batch.sequence for batch in log.batches_after(7, 3)] == [4, 5]
    assert log.batches_after(7, 5) == []


def test_a_batch_larger_than_the_log_is_sent_as_a_snapshot() -> None:
    log = EventLog(7, max_hashes=3)
    log.append(stored(1, 2, 3, 4))
    (batch,) = log.batches_after(7, 0)
    assert batch.is_snapshot
    assert len(batch.stored) == 4


def test_replay_equals_the_cache_whatever_the_lag() -> None:
    rng = random.Random(3)
    cache = PrefixCache(num_pages=12, page_size=2, fingerprint="model")
    log = EventLog(1, max_hashes=20)
    followers = [Follower() for _ in range(3)]
    sequences: list[SequencePages] = []
    for step in range(3000):
        if sequences and rng.random() < 0.5:
            cache.release(sequences.pop(rng.randrange(len(sequences))))
        else:
            tokens = rng.choices([0, 1], k=rng.randint(1, 9))
            try:
                if cache.match(tokens).num_pending_pages == 0:
                    sequences.append(cache.reserve(tokens, incoming=False))
                    cache.commit(sequences[-1], rng.randint(0, len(sequences[-1].page_ids)))
            except OutOfPages:
                pass
        if rng.random() < 0.3:
            log.append(cache.drain_events())
            assert list(log.snapshot().stored) == cache.snapshot()
            for follower, period in zip(followers, (1, 7, 60), strict=True):
                if step % period == 0:
                    follower.follow(log)
                    assert sorted(follower.hashes) == cache.snapshot()
    assert followers[0].num_snapshots == 1
    assert followers[2].num_snapshots > 1
