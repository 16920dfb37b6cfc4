"""The order in which prompts are computed: short before long, and nobody waits for ever."""

import random
from dataclasses import dataclass
from statistics import mean

from worker.prompt_order import in_turn


@dataclass
class Waiting:
    arrived_s: float
    num_left: int


def order(now_s: float, *prompts: tuple[float, int], max_overtaken_s: float = 100) -> list[int]:
    """Return the turns of prompts of (arrival, tokens), as their places in the arguments."""
    waiting = [Waiting(*each) for each in prompts]
    turns = in_turn(waiting, now_s=now_s, max_overtaken_s=max_overtaken_s)
    return [next(i for i, each in enumerate(waiting) if each is prompt) for prompt in turns]


def test_of_those_that_came_together_the_shortest_goes_first() -> None:
    assert order(0.0, (0.0, 30), (0.0, 10), (0.0, 20)) == [1, 2, 0]
    assert order(9.0, (0.0, 30), (0.0, 10), (0.0, 20)) == [1, 2, 0]


def test_equal_ones_go_as_they_came() -> None:
    assert order(5.0, (2.0, 10), (2.0, 10), (2.0, 10)) == [0, 1, 2]


def test_a_long_one_goes_first_when_it_has_waited_in_proportion() -> None:
    assert order(20.0, (0.0, 1000), (18.9, 50)) == [1, 0]
    assert order(20.0, (0.0, 1000), (19.2, 50)) == [0, 1]


def test_a_short_one_that_came_just_now_overtakes_a_long_one() -> None:
    assert order(1.0, (0.0, 8000), (1.0, 500)) == [1, 0]
    assert order(1.0, (0.0, 4000), (1.0, 500)) == [0, 1]


def test_who_has_waited_for_the_limit_goes_before_all_others_in_order_of_arrival() -> None:
    assert order(50.0, (10.0, 900), (11.0, 800), (40.0, 1), max_overtaken_s=39) == [0, 1, 2]
    assert order(50.0, (10.0, 900), (11.0, 800), (40.0, 1), max_overtaken_s=40) == [0, 2, 1]


def test_who_has_waited_for_the_limit_goes_by_arrival_whoever_began_first() -> None:
    assert order(50.0, (11.0, 800), (40.0, 1), (10.0, 900), max_overtaken_s=39) == [2, 0, 1]


def test_without_a_wait_all_go_as_they_came() -> None:
    assert order(50.0, (10.0, 900), (50.0, 5), (50.0, 1), max_overtaken_s=0) == [0, 1, 2]


def test_prompts_of_which_nothing_is_left_have_turns_too() -> None:
    assert order(5.0, (0.0, 7), (0.0, 0)) == [1, 0]


def waits_s(max_overtaken_s: float, *, load: float) -> list[float]:
    """Compute a token a second while `load` tokens come a second; return the prompts' waits."""
    source = random.Random(5)
    sizes = [4] * 19 + [200]
    waiting: list[Waiting] = []
    waits = []
    arrives_s = now_s = 0.0
    while now_s < 20_000:
        while arrives_s <= now_s:
            waiting.append(Waiting(arrives_s, source.choice(sizes)))
            arrives_s += source.expovariate(load * len(sizes) / sum(sizes))
        if not waiting:
            now_s = arrives_s
            continue
        prompt = in_turn(waiting, now_s=now_s, max_overtaken_s=max_overtaken_s)[0]
        now_s += min(prompt.num_left, 8)
        prompt.num_left -= 8
        if prompt.num_left <= 0:
            waiting.remove(prompt)
            waits.append(now_s - prompt.arrived_s)
    return waits + [now_s - prompt.arrived_s for prompt in waiting]


def test_short_ones_first_divide_the_mean_wait_and_lengthen_the_longest_by_little() -> None:
    fair, short_first = waits_s(0, load=0.9), waits_s(1e9, load=0.9)

    assert mean(short_first) < mean(fair) / 5
    assert max(short_first) < 1.3 * max(fair)


def test_the_limit_bounds_the_longest_wait_while_more_come_than_can_be_computed() -> None:
    fair, limited, endless = (waits_s(each, load=1.3) for each in (0, 600, 1e9))

    assert max(limited) < 600 + max(fair)
    assert max(endless) > 600 + max(fair)
