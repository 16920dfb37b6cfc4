import pytest

from decode_worker.request import Choice, Request
from decode_worker.seats import Seats
from kv_cache.prefix_cache import PrefixCache
from llm_engine.engine_step import SeatPages
from llm_engine.sampling import SamplingParams


def choice_of(cache: PrefixCache, num_tokens: int) -> Choice:
    """A choice with the pages of its prompt, which no prompt of another length begins."""
    request = Request(
        request_id="r",
        attempt=0,
        prompt=[num_tokens] * num_tokens,
        params=SamplingParams(),
        emitted={0: ()},
        candidates=(),
    )
    choice = Choice(request, 0, [])
    choice.pages = cache.reserve(request.prompt, incoming=False)
    return choice


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(num_pages=16, page_size=4, fingerprint="f")


def test_the_engine_is_told_of_each_choice_once_and_then_of_new_pages(cache: PrefixCache) -> None:
    seats = Seats(2)
    choice = choice_of(cache, 8)
    assert choice.pages is not None
    seats.take(choice)

    assert seats.tell([choice]) == ((choice,), ())
    assert seats.tell([choice]) == ((), ())
    cache.extend(choice.pages, 9)
    new = SeatPages(seat=choice.seat, page_ids=(choice.pages.page_ids[-1],))
    assert seats.tell([choice]) == ((), (new,))
    assert seats.tell([choice]) == ((), ())


def test_a_seat_that_is_left_can_be_taken_again_and_the_engine_is_told_of_both(
    cache: PrefixCache,
) -> None:
    seats = Seats(1)
    first, second = choice_of(cache, 4), choice_of(cache, 5)
    seats.take(first)
    seat = first.seat
    seats.tell([first])

    seats.leave(first)
    seats.take(second)

    assert (first.seat, second.seat, seats.ended) == (-1, seat, [seat])
    assert seats.tell([second]) == ((second,), ())
    seats.check_integrity([second])


def test_a_seat_that_the_engine_never_knew_ends_silently(cache: PrefixCache) -> None:
    seats = Seats(1)
    choice = choice_of(cache, 4)
    seats.take(choice)

    seats.leave(choice)

    assert seats.ended == []
    seats.check_integrity([])


def test_a_lost_seat_is_found(cache: PrefixCache) -> None:
    seats = Seats(2)
    choice = choice_of(cache, 4)
    seats.take(choice)

    with pytest.raises(AssertionError, match="a seat is lost"):
        seats.check_integrity([])
