"""Which calls count as made before."""

from hypothesis import given
from hypothesis import strategies as st

from credentials import replay
from credentials.party import Party
from credentials.replay import MAX_CALLERS, WINDOW, ReplayGuard


def party(incarnation: int = 1, name: str = "router-0") -> Party:
    return Party(role="router", name=name, incarnation=incarnation)


def test_a_number_is_new_once() -> None:
    guard = ReplayGuard()

    assert guard.is_new(party(), 0)
    assert not guard.is_new(party(), 0)
    assert guard.is_new(party(incarnation=2), 0), "another start numbers its own calls"
    assert guard.is_new(party(name="router-1"), 0)


@given(st.lists(st.integers(0, 60)), st.integers(1, 8))
def test_no_number_is_new_twice_whatever_the_order(numbers: list[int], window: int) -> None:
    original, replay.WINDOW = replay.WINDOW, window
    try:
        guard = ReplayGuard()
        taken = [number for number in numbers if guard.is_new(party(), number)]
    finally:
        replay.WINDOW = original

    assert len(set(taken)) == len(taken)
    # What is larger than all before it is new, so a caller that counts up is never refused.
    largest = -1
    for number in numbers:
        if number > largest:
            largest = number
            assert number in taken


def test_calls_may_overtake_as_many_others_as_the_window_has() -> None:
    guard = ReplayGuard()
    for number in range(1, WINDOW + 1):
        assert guard.is_new(party(), number)

    assert guard.is_new(party(), 0)

    late = ReplayGuard()
    for number in range(1, WINDOW + 2):
        assert late.is_new(party(), number)
    assert not late.is_new(party(), 0), "too old to know"


def test_what_is_remembered_is_bounded() -> None:
    guard = ReplayGuard()
    for number in range(5 * WINDOW):
        guard.is_new(party(), number)
    for incarnation in range(2 * MAX_CALLERS):
        guard.is_new(party(incarnation), 10**9)
        guard.is_new(party(), 10**9 + incarnation)  # one that calls all the time

    [window] = [each for who, each in guard._windows.items() if who == party()]
    assert len(guard._windows) == MAX_CALLERS
    assert len(window._seen) == len(window._order) == WINDOW
    assert not guard.is_new(party(), 10**9 + 2 * MAX_CALLERS - 1), "it was not forgotten"
