from kv_cache.prefix_cache import PrefixCache
from worker.parking import Parking


def scene() -> tuple[PrefixCache, Parking[str], list[int]]:
    """A cache with a pending prompt of three full pages, and the parking beside it."""
    cache = PrefixCache(num_pages=16, page_size=4, fingerprint="f")
    pages = cache.reserve(list(range(13)), incoming=False)
    cache.drain_settled()
    return cache, Parking(cache), pages.page_ids


def test_those_who_wait_for_a_page_are_woken_when_it_is_ready_and_not_before() -> None:
    cache, parking, _ = scene()
    seq = cache.reserve([50] * 13, incoming=False)
    for name in "ab":
        match = cache.match([50] * 13)
        assert match.last_pending_page is not None
        parking.park(name, match.last_pending_page)

    cache.commit(seq, 2)
    assert parking.take_woken() == []
    cache.commit(seq, 3)
    assert parking.take_woken() == ["a", "b"]
    assert len(parking) == 0
    assert parking.take_woken() == []


def test_those_who_wait_are_woken_when_nobody_fills_the_page_any_more() -> None:
    cache, parking, page_ids = scene()
    seq = cache.reserve([50] * 13, incoming=True)
    parking.park("a", seq.page_ids[2])
    parking.park("b", page_ids[0])

    cache.abort(seq, quarantine=True)

    assert parking.take_woken() == ["a"]
    assert list(parking) == ["b"]


def test_who_is_gone_is_not_woken() -> None:
    cache, parking, _ = scene()
    seq = cache.reserve([50] * 13, incoming=False)
    for name in "abc":
        parking.park(name, seq.page_ids[2])

    parking.remove(lambda name: name == "b")

    assert list(parking) == ["a", "c"]
    cache.commit(seq, 3)
    assert parking.take_woken() == ["a", "c"]
